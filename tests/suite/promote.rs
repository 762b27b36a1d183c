//! Copies of checkpoints in other directories. `python/tests/test_promote.py` has those in object stores.

use crate::common::copies::{Disks, LARGE, MIB, config, small_parts};
use crate::common::{names_in, some_calls};
use ringstow::internals::{
    format::names,
    store::{list, promote, prune, remove_checkpoint, save},
};
use ringstow::{Disposal, Dtype, Error, Job, Promotion, StateDict, Status, Store};
use std::fs;
use std::io;
use std::path::Path;

#[test]
fn copy_is_a_checkpoint_like_any_other() {
    let disks = Disks::new();
    disks.save(1);
    let report = disks.promote().unwrap();
    assert!(!report.was_there && report.sent_bytes == report.file_bytes, "{report:?}");
    assert!(report.sent_bytes > LARGE as u64);
    assert_eq!(Path::new(&report.to), disks.to());
    disks.assert_copied(1);
    let again = disks.promote().unwrap();
    assert!(again.was_there && again.sent_bytes == 0, "{again:?}");
    // A save there replaces it.
    let mut state = StateDict::new();
    state.bytes("other", Dtype::U8, &[3], &[1, 2, 3]).unwrap();
    save(&disks.runtime, &state, &disks.to(), &Job::of(&config())).unwrap();
    assert_eq!(ringstow::load(disks.to()).unwrap().tensor("other").unwrap().data(), [1, 2, 3]);
    assert_eq!(names_in(&disks.to()).len(), 2, "{:?}", names_in(&disks.to()));
}

#[test]
fn damaged_file_is_not_committed() {
    let disks = Disks::new();
    disks.save(1);
    let shard = names_in(&disks.from()).into_iter().find(|name| names::is_shard(name)).unwrap();
    let path = disks.from().join(shard);
    let mut bytes = fs::read(&path).unwrap();
    bytes[8 * MIB] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = disks.promote().unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(ringstow::load(disks.to()).is_err());
}

#[test]
fn another_checkpoint_is_replaced_only_if_it_is_older_and_that_is_wanted() {
    let disks = Disks::new();
    disks.save(1);
    disks.promote().unwrap();
    disks.save(2);
    let taken = disks.promote().unwrap_err();
    assert!(
        matches!(&taken, Error::Io { cause, .. } if cause.kind() == io::ErrorKind::AlreadyExists)
    );
    assert!(disks.has(1));
    disks.promote_as(Promotion { replace_older: true, ..small_parts() }).unwrap();
    disks.assert_copied(2);
}

#[test]
fn places_that_would_be_spoilt_are_refused() {
    let disks = Disks::new();
    disks.save(1);
    let from = disks.from();
    let how = small_parts();
    let link = disks.root.path().join("link");
    std::os::unix::fs::symlink(from.parent().unwrap(), &link).unwrap();
    let run = from.parent().unwrap().to_path_buf();
    for to in [from.clone(), from.join("copy"), run, link.join("step-1/copy")] {
        let refused = promote(&disks.runtime, &from, &to, how, &Job::of(&config())).unwrap_err();
        assert!(refused.to_string().contains("one is in the other"), "{refused}");
    }
    disks.promote().unwrap();
    let run = disks.to().parent().unwrap().to_path_buf();
    let refused = promote(&disks.runtime, &from, &run, how, &Job::of(&config())).unwrap_err();
    assert!(refused.to_string().contains("holds checkpoints, such as"), "{refused}");
    let model = disks.root.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::write(model.join("model.safetensors"), "").unwrap();
    let refused = promote(&disks.runtime, &from, &model, how, &Job::of(&config())).unwrap_err();
    assert!(refused.to_string().contains("holds model.safetensors"), "{refused}");
}

#[test]
fn neither_a_save_nor_a_clean_up_disturbs_a_copy_nor_it_them() {
    let disks = Disks::new();
    disks.save(1);
    let session = Store::found().unwrap().begin(disks.to(), 1).unwrap();
    assert!(matches!(disks.promote(), Err(Error::Busy { .. })));
    drop(session);
    // Ended in the middle, by a job that was stopped: what it has sent stays for the next one.
    let job = Job::of(&config());
    let how = Promotion { rate: 1 << 20, ..small_parts() };
    std::thread::scope(|scope| {
        let copying =
            scope.spawn(|| promote(&disks.runtime, &disks.from(), &disks.to(), how, &job));
        while !disks.to().exists() || names_in(&disks.to()).is_empty() {
            std::thread::yield_now();
        }
        let run = disks.to().parent().unwrap().to_path_buf();
        let swept = prune(&run, &config()).unwrap();
        assert!(swept.removed.is_empty() && swept.left.len() == 1, "{swept:?}");
        assert!(matches!(Store::found().unwrap().begin(disks.to(), 1), Err(Error::Busy { .. })));
        let found = list(&run, &config()).unwrap().remove(0);
        assert_ne!(found.status, Status::Committed);
        assert!(found.problem.unwrap().contains("is being copied here"));
        job.cancel();
        assert!(copying.join().unwrap().is_err());
    });
    disks.promote().unwrap();
    disks.assert_copied(1);
}

#[test]
fn copies_of_one_checkpoint_by_several_at_once_are_one_copy() {
    let disks = Disks::new();
    disks.save(1);
    let other = disks.second();
    fs::create_dir_all(&other).unwrap();
    for name in names_in(&disks.from()) {
        fs::copy(disks.from().join(&name), other.join(&name)).unwrap();
    }
    std::thread::scope(|scope| {
        let copies = [disks.from(), other].map(|from| {
            let disks = &disks;
            scope.spawn(move || {
                promote(&disks.runtime, &from, &disks.to(), small_parts(), &Job::of(&config()))
            })
        });
        for copy in copies {
            copy.join().unwrap().unwrap();
        }
    });
    disks.assert_copied(1);
}

#[cfg(debug_assertions)] // the seam exists in these builds only
mod each_call {
    use super::*;
    use nix::libc::{EINVAL, EIO, ENOSPC};
    use ringstow::internals::sys::seam::{Call, Watch, fail_if, in_process};

    /// Has the n-th call on the shared disk fail; returns whether there were so many.
    fn fail(disks: &Disks, n: u64, errno: i32, copy: impl FnOnce()) -> bool {
        let (shared, mut calls) = (disks.root.path().join("shared"), 0);
        let there = shared.clone();
        let watch = in_process(fail_if(errno, move |_, on| {
            calls += u64::from(on.starts_with(&shared));
            on.starts_with(&shared) && calls == n
        }));
        copy();
        watch.take().iter().filter(|(_, on)| on.starts_with(&there)).count() as u64 >= n
    }

    /// Has writes on the shared disk fail with a number, from the `from`-th to the `to`-th.
    fn fail_writes(disks: &Disks, (from, to): (u64, u64), errno: i32) -> Watch {
        let (shared, mut writes) = (disks.root.path().join("shared"), 0);
        in_process(fail_if(errno, move |call, on| {
            let is_write = call == Call::Write && on.starts_with(&shared);
            writes += u64::from(is_write);
            is_write && (from..=to).contains(&writes)
        }))
    }

    #[test]
    fn failure_of_any_call_leaves_no_half_copy_and_the_next_one_goes_on() {
        for errno in [EIO, ENOSPC] {
            for n in some_calls() {
                let disks = Disks::new();
                disks.save(1);
                let mut done = Ok(());
                let is_failed = fail(&disks, n, errno, || done = disks.promote().map(drop));
                match ringstow::load(disks.to()) {
                    Ok(_) => assert!(disks.has(1)),
                    Err(error) => assert!(done.is_err(), "call {n}: no error, but {error}"),
                }
                disks.promote().unwrap();
                disks.assert_copied(1);
                if !is_failed {
                    break;
                }
            }
        }
    }

    /// A replacement shows one checkpoint or the other.
    #[test]
    fn failure_of_any_call_of_a_replacement_leaves_one_checkpoint_or_the_other() {
        let how = Promotion { replace_older: true, ..small_parts() };
        for n in some_calls() {
            let disks = Disks::new();
            disks.save(1);
            disks.promote().unwrap();
            disks.save(2);
            let mut done = Ok(());
            let is_failed = fail(&disks, n, EIO, || done = disks.promote_as(how).map(drop));
            let is_new = disks.has(2);
            assert!(is_new || disks.has(1), "call {n}");
            assert!(is_new || done.is_err(), "call {n}: it said that it has committed");
            disks.promote_as(how).unwrap();
            disks.assert_copied(2); // no shard of the first one is left
            if !is_failed {
                break;
            }
        }
    }

    #[test]
    fn file_system_without_o_direct_takes_a_copy() {
        let disks = Disks::new();
        disks.save(1);
        let watch = fail_writes(&disks, (1, 1), EINVAL);
        disks.promote().unwrap();
        drop(watch);
        disks.assert_copied(1);
    }

    /// Copies one part of three or more, and fails.
    fn fail_in_the_middle() -> Disks {
        let disks = Disks::new();
        disks.save(1);
        let watch = fail_writes(&disks, (3, u64::MAX), EIO); // two blocks are a part
        disks.promote_as(Promotion { uploads: 1, ..small_parts() }).unwrap_err();
        drop(watch);
        disks
    }

    #[test]
    fn full_disk_says_that_what_was_sent_stays() {
        let disks = Disks::new();
        disks.save(1);
        let watch = fail_writes(&disks, (3, u64::MAX), ENOSPC);
        let full = disks.promote().unwrap_err().to_string();
        drop(watch);
        assert!(full.contains("free some space; promote again"), "{full}");
        assert!(!full.contains("removed"), "{full}");
    }

    #[test]
    fn what_was_sent_is_not_sent_again() {
        let disks = fail_in_the_middle();
        let report = disks.promote().unwrap();
        let again = report.file_bytes - report.sent_bytes;
        assert!((5 << 20..10 << 20).contains(&again), "{report:?}");
        disks.assert_copied(1);
    }

    /// A file that was not whole was not synced.
    #[test]
    fn parts_that_were_sent_before_the_machine_started_again_are_sent_again() {
        let disks = fail_in_the_middle();
        let journals = disks.from().parent().unwrap().join(names::JOURNALS);
        let journal = journals.join(&names_in(&journals)[0]).join(names::JOURNAL);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let text = fs::read_to_string(&journal).unwrap();
        assert!(text.contains(boot.trim()));
        fs::write(&journal, text.replace(boot.trim(), "before")).unwrap();
        let report = disks.promote().unwrap();
        assert_eq!(report.sent_bytes, report.file_bytes);
        disks.assert_copied(1);
    }

    #[test]
    fn clean_up_ends_the_copy_of_a_checkpoint_that_is_gone() {
        let disks = fail_in_the_middle();
        let run = disks.from().parent().unwrap().to_path_buf();
        let swept = prune(&run, &config()).unwrap();
        assert!(swept.removed.is_empty() && swept.left[0].reason.contains("goes on"), "{swept:?}");
        disks.save(2); // in its place
        assert!(!names_in(&disks.to()).is_empty());
        let swept = prune(&run, &config()).unwrap();
        assert!(swept.left.is_empty() && swept.removed.len() == 1, "{swept:?}");
        assert_eq!((names_in(&disks.to()).len(), names_in(&run).len()), (0, 1));
    }

    #[test]
    fn clean_up_ends_the_copy_of_a_checkpoint_that_left_a_user_s_file() {
        let disks = fail_in_the_middle();
        let (run, notes) =
            (disks.from().parent().unwrap().to_path_buf(), disks.from().join("notes"));
        fs::write(&notes, "a user's").unwrap();
        remove_checkpoint(&disks.from(), Disposal::Remove, &config()).unwrap();
        let swept = prune(&run, &config()).unwrap();
        assert!(swept.left.is_empty() && swept.removed.len() == 1, "{swept:?}");
        assert!(notes.exists() && names_in(&run) == ["step-1"] && names_in(&disks.to()).is_empty());
    }

    #[test]
    fn parts_that_a_clean_up_has_removed_are_sent_again() {
        let disks = fail_in_the_middle();
        let swept = prune(disks.to().parent().unwrap(), &config()).unwrap();
        assert!(swept.left.is_empty() && !disks.to().exists(), "{swept:?}");
        disks.promote().unwrap();
        disks.assert_copied(1);
    }
}
