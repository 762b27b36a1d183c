//! Copies of checkpoints in places that others want, too, that are full, or that take few bytes a second.

use crate::common::copies::{Disks, LARGE, MIB, config, small_parts};
#[cfg(target_os = "linux")]
use crate::common::mounts::where_mounts_work;
use crate::common::names_in;
use ringstow::internals::store::{promote, prune, remove_checkpoint};
use ringstow::{Disposal, Error, Job, Promotion, Shortage};
use std::io;
use std::path::Path;
use std::time::Instant;

fn replacing() -> Promotion {
    Promotion { replace_older: true, ..small_parts() }
}

fn assert_taken(error: &Error, words: &str) {
    let text = error.to_string();
    assert!(
        matches!(error, Error::Io { cause, .. } if cause.kind() == io::ErrorKind::AlreadyExists),
        "{text}"
    );
    assert!(text.contains("another checkpoint is there") && text.contains(words), "{text}");
}

#[test]
fn error_of_a_place_that_is_taken_says_by_which_checkpoint() {
    let disks = Disks::new();
    disks.save_at(&disks.second(), 1);
    disks.save(2);
    disks.promote().unwrap();
    assert_taken(&disks.promote_from(&disks.second(), replacing()).unwrap_err(), "later than this");
    assert_taken(&disks.promote_from(&disks.second(), small_parts()).unwrap_err(), "later than");
    disks.assert_copied(2);
}

#[test]
fn rate_holds_back_the_first_bytes_too() {
    let disks = Disks::new();
    disks.save(1);
    let seconds = 0.5;
    let rate = (LARGE as f64 / seconds) as u64;
    let began = Instant::now();
    disks.promote_as(Promotion { rate, ..Promotion::default() }).unwrap(); // one part
    let took = began.elapsed().as_secs_f64();
    assert!(took >= seconds, "{LARGE} bytes at {rate} a second in {took} s");
    disks.assert_copied(1);
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_is_told_with_what_is_missing_before_a_byte_is_sent() {
    where_mounts_work(|| {
        let disks = Disks::new();
        disks.save(1);
        let small = cut_disk::Mount::of_memory("tmpfs", "size=8m")?;
        let job = Job::of(&config());
        let to = small.path().join("step-1");
        let full = promote(&disks.runtime, &disks.from(), &to, small_parts(), &job).unwrap_err();
        let text = full.to_string();
        let Error::Io { shortage: Some(Shortage::Bytes { needed, free }), .. } = full else {
            panic!("{text}")
        };
        assert!(needed > LARGE as u64 && free <= 8 * MIB as u64, "{text}");
        let said = format!("{needed} bytes are needed on this file system, which has {free} free");
        assert!(text.contains(&said) && text.contains(&format!("{} too few", needed - free)));
        assert!(text.contains("free some space; promote again"), "{text}");
        assert_eq!(job.progress().written, 0);
        assert!(names_in(&to).is_empty(), "{:?}", names_in(&to));
        Ok(())
    });
}

#[cfg(debug_assertions)] // the seam exists in these builds only
mod races {
    use super::*;
    use ringstow::internals::sys::seam::{Call, Outcome, on_thread};
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Whether a call begins to write the manifest of a copy.
    fn is_commit(call: Call, on: &Path) -> bool {
        let name = on.file_name().unwrap_or_default().to_string_lossy();
        call == Call::Create && name.starts_with("manifest.json.")
    }

    fn is_manifests_lock(call: Call, on: &Path) -> bool {
        call == Call::Lock && on.ends_with("manifest.json")
    }

    /// Promotes, and when the commit begins, says so and waits until the other one has ended or waits for this one.
    fn promote_first(disks: &Disks, from: &Path, tell: &Sender<()>, told: Receiver<()>) -> bool {
        let tell = tell.clone();
        let mut is_told = false;
        let _watch = on_thread(move |_, call, on| {
            if is_commit(call, on) && !std::mem::replace(&mut is_told, true) {
                tell.send(()).unwrap();
                told.recv().unwrap();
            }
            Outcome::Pass
        });
        disks.promote_from(from, replacing()).is_ok()
    }

    /// Promotes once the other one commits.
    fn promote_second(disks: &Disks, from: &Path, tell: Sender<()>, told: Receiver<()>) -> bool {
        told.recv().unwrap();
        let at_lock = tell.clone();
        let _watch = on_thread(move |_, call, on| {
            if is_manifests_lock(call, on) {
                let _nobody_waits = at_lock.send(());
            }
            Outcome::Pass
        });
        let is_done = disks.promote_from(from, replacing()).is_ok();
        let _nobody_waits = tell.send(());
        is_done
    }

    /// Two promotions of different checkpoints see the same older one; one of them is at its commit when the other one
    /// begins. Returns which of them have succeeded.
    fn race(disks: &Disks, first: &Path, second: &Path) -> (bool, bool) {
        let ((commits, committing), (ends, ended)) = (channel(), channel());
        std::thread::scope(|scope| {
            let one = scope.spawn(|| promote_first(disks, first, &commits, ended));
            let other = scope.spawn(|| promote_second(disks, second, ends, committing));
            (one.join().unwrap(), other.join().unwrap())
        })
    }

    /// An older checkpoint is there; two newer ones are in other places, the newest in `second`.
    fn contended() -> Disks {
        let disks = Disks::new();
        disks.save(1);
        disks.promote().unwrap();
        disks.save(2);
        disks.save_at(&disks.second(), 3);
        disks
    }

    #[test]
    fn newest_of_two_that_replace_one_at_once_gets_the_place_if_it_is_the_second() {
        let disks = contended();
        assert!(race(&disks, &disks.from(), &disks.second()).1);
        disks.assert_copied(3);
    }

    #[test]
    fn newest_of_two_that_replace_one_at_once_gets_the_place_if_it_is_the_first() {
        let disks = contended();
        assert_eq!(race(&disks, &disks.second(), &disks.from()), (true, false));
        disks.assert_copied(3);
        let error = disks.promote_from(&disks.from(), replacing()).unwrap_err();
        assert_taken(&error, "later than this one");
    }

    /// Two want a place that is free; the loser leaves nothing there.
    #[test]
    fn loser_of_a_free_place_removes_what_it_has_sent() {
        let disks = Disks::new();
        disks.save_at(&disks.second(), 1);
        disks.save(2);
        let (commits, committing) = channel();
        let (go, goes) = channel::<()>();
        std::thread::scope(|scope| {
            let loser = scope.spawn(|| {
                let mut is_told = false;
                let _watch = on_thread(move |_, call, on| {
                    if is_commit(call, on) && !std::mem::replace(&mut is_told, true) {
                        commits.send(()).unwrap();
                        goes.recv().unwrap();
                    }
                    Outcome::Pass
                });
                disks.promote_from(&disks.second(), small_parts()).unwrap_err()
            });
            committing.recv().unwrap();
            disks.promote().unwrap();
            go.send(()).unwrap();
            assert_taken(&loser.join().unwrap(), "later than this one");
        });
        disks.assert_copied(2);
        assert_eq!(names_in(disks.second().parent().unwrap()), ["step-1"], "no journal is left");
    }
}

/// A promotion is ended in the middle of its last steps, as a crash does it.
#[cfg(debug_assertions)]
mod crashes {
    use super::*;
    use nix::libc::EIO;
    use ringstow::internals::format::names;
    use ringstow::internals::sys::seam::{Call, Watch, fail_if, on_thread};

    fn fail(of: Call, is_chosen: impl Fn(&str) -> bool + Send + 'static) -> Watch {
        on_thread(fail_if(EIO, move |call, on| {
            call == of && is_chosen(&on.file_name().unwrap_or_default().to_string_lossy())
        }))
    }

    /// The second checkpoint has replaced the first, whose shards are still there.
    fn replaced_and_not_cleared() -> Disks {
        let disks = Disks::new();
        disks.save(1);
        disks.promote().unwrap();
        disks.save(2);
        let watch = fail(Call::Remove, names::is_promoted);
        disks.promote_as(replacing()).unwrap();
        drop(watch);
        assert!(disks.has(2));
        disks
    }

    #[test]
    fn shards_of_a_replaced_checkpoint_go_with_the_next_promotion() {
        let disks = replaced_and_not_cleared();
        disks.promote().unwrap();
        disks.assert_copied(2);
        // Also of another checkpoint.
        let disks = replaced_and_not_cleared();
        disks.save(3);
        disks.promote_as(replacing()).unwrap();
        disks.assert_copied(3);
    }

    #[test]
    fn shards_of_a_replaced_checkpoint_go_with_a_clean_up_where_the_new_one_is_gone() {
        let disks = replaced_and_not_cleared();
        remove_checkpoint(&disks.from(), Disposal::Remove, &config()).unwrap();
        let swept = prune(disks.from().parent().unwrap(), &config()).unwrap();
        assert!(swept.left.is_empty(), "{swept:?}");
        assert!(disks.has(2));
        assert_eq!(names_in(&disks.to()).len(), 2, "{:?}", names_in(&disks.to()));
    }

    #[test]
    fn clean_up_ends_a_copy_whose_place_is_gone() {
        let disks = replaced_and_not_cleared();
        remove_checkpoint(&disks.from(), Disposal::Remove, &config()).unwrap();
        std::fs::remove_dir_all(disks.to()).unwrap();
        let run = disks.from().parent().unwrap().to_path_buf();
        let swept = prune(&run, &config()).unwrap();
        assert!(swept.left.is_empty(), "{swept:?}");
        assert!(names_in(&run).is_empty(), "{:?}", names_in(&run));
    }

    #[test]
    fn shards_of_a_checkpoint_that_was_never_committed_go_with_the_next_one() {
        let disks = Disks::new();
        disks.save(1);
        let watch = fail(Call::Create, |name| name.starts_with("manifest.json."));
        disks.promote().unwrap_err();
        drop(watch);
        assert!(!names_in(&disks.to()).is_empty());
        disks.save(2);
        disks.promote().unwrap();
        disks.assert_copied(2);
    }
}
