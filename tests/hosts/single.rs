//! One thing at a time: what a network file system does that a disk does not.

use crate::common::{SIZES, State, assert_says, errno, load_all, names_in, runtime, small_config};
use crate::job::is_none;
use crate::rig::{STALE, both};
use crate::with_hosts;
use nix::libc;
use ringstow::internals::doctor::{Status, diagnose};
use ringstow::internals::store::remove_checkpoint;
use ringstow::internals::sys::file_system::play;
use ringstow::internals::sys::run_lock::{Pace, RunLock};
use ringstow::internals::sys::seam::{Call, Outcome, in_process};
use ringstow::{Checkpoint, Config, Disposal, Error, Runtime, Switch};
use std::fs::File;
use std::path::Path;
use std::time::Duration;
use two_hosts::Rules;

#[test]
fn host_loads_what_another_has_saved() {
    for direct in [true, false] {
        with_hosts(Rules { direct, ..Rules::default() }, 1, |share| {
            let [a, b] = both(share, "ckpt");
            for step in 1..3 {
                let state = State::new(step, &SIZES);
                let report = state.save(&runtime(), [&a, &b][step as usize % 2]).unwrap();
                assert_eq!(report.moved.direct, direct);
                state.assert_at(&runtime(), &a);
                state.assert_at(&runtime(), &b);
            }
            let insists = Runtime::new(Config { direct: Switch::On, ..small_config() }).unwrap();
            let insisted = State::new(3, &SIZES).save(&insists, &a);
            assert_eq!(insisted.is_ok(), direct);
        });
    }
}

#[test]
fn lost_write_fails_the_save_and_keeps_the_earlier_checkpoint() {
    with_hosts(Rules::default(), 1, |share| {
        let [a, b] = both(share, "ckpt");
        let before = State::new(1, &SIZES);
        before.save(&runtime(), &a).unwrap();
        // Whichever write it is: of a shard, of the manifest.
        let mut lost = 0;
        for lose_every in 1.. {
            share.host(0).set_rules(Rules { lose_every, ..Rules::default() });
            match State::new(2, &SIZES).save(&runtime(), &a) {
                Ok(_) => break,
                Err(error) => assert_eq!(errno(&error), Some(libc::EIO), "{error}"),
            }
            before.assert_at(&runtime(), &b);
            lost += 1;
        }
        assert!(lost > 3, "{lost}");
        State::new(2, &SIZES).assert_at(&runtime(), &b);
    });
}

#[test]
fn load_of_a_checkpoint_that_another_host_removed_is_an_error() {
    with_hosts(STALE, 1, |share| {
        let [a, b] = both(share, "ckpt");
        State::new(1, &SIZES).save(&runtime(), &a).unwrap();
        let checkpoint = Checkpoint::open(&b).unwrap();
        remove_checkpoint(&a, Disposal::Remove, &small_config()).unwrap();
        let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
        let error = checkpoint.load_names(names, Default::default()).unwrap_err();
        assert_says(&error, &["ckpt"]);
        assert!(!matches!(error, Error::Corrupt { .. }), "{error}");
        let error = load_all(&runtime(), &b).unwrap_err();
        assert!(is_none(&error), "{error}");
    });
}

#[test]
fn checkpoint_that_is_being_read_is_removed_and_saved_again() {
    with_hosts(Rules::default(), 1, |share| {
        let [a, b] = both(share, "ckpt");
        State::new(1, &SIZES).save(&runtime(), &a).unwrap();
        let shard = Checkpoint::open(&a).unwrap().shard_paths().next().unwrap().to_path_buf();
        let reader = File::open(shard).unwrap();
        remove_checkpoint(&a, Disposal::Remove, &small_config()).unwrap();
        assert!(names_in(&b)[0].starts_with(".nfs"));
        let state = State::new(2, &SIZES);
        state.save(&runtime(), &a).unwrap();
        state.assert_at(&runtime(), &b);
        drop(reader);
        remove_checkpoint(&b, Disposal::Remove, &small_config()).unwrap();
        assert!(!a.exists());
    });
}

#[test]
fn length_that_a_host_saw_during_the_save_is_not_taken_for_damage() {
    with_hosts(STALE, 1, |share| {
        let [a, b] = both(share, "ckpt");
        let state = State::new(1, &SIZES);
        // The other host lists the directory, with lengths, when the file is there and still empty.
        let (listed, saved) = (b.clone(), a.clone());
        let watch = in_process(move |_, call, path| {
            if call == Call::Allocate && path.starts_with(&saved) {
                for entry in std::fs::read_dir(&listed).unwrap() {
                    assert!(entry.unwrap().metadata().is_ok());
                }
            }
            Outcome::Pass
        });
        state.save(&runtime(), &a).unwrap();
        drop(watch);
        state.assert_at(&runtime(), &b);
    });
}

#[test]
fn doctor_says_whether_locks_reach_other_hosts_and_why() {
    let locks = |dir: &Path| {
        let checks = diagnose(dir, &Config::default()).checks;
        checks.into_iter().find(|check| check.name == "locks").unwrap()
    };
    with_hosts(Rules::default(), 1, |share| {
        let found = locks(share.host(0).path());
        assert_eq!(found.status, Status::Warn);
        assert!(found.found.contains("cannot know whether fuse"), "{found:?}");
        assert!(found.remedy.unwrap().contains("--no-other-writers"));
    });
    let dir = tempfile::tempdir().unwrap();
    let found = locks(dir.path());
    assert!(found.status == Status::Ok && found.found.contains("this host alone"), "{found:?}");
    for (name, options, status, says) in [
        ("nfs4", "rw,local_lock=none", Status::Ok, "nfs4 passes locks on"),
        ("lustre", "rw,localflock", Status::Warn, "mount it without `localflock`"),
    ] {
        let _played = play(dir.path(), name, options);
        let found = locks(dir.path());
        assert!(found.status == status && found.found.contains(says), "{found:?}");
    }
}

#[test]
fn manager_of_another_host_is_refused_while_the_first_gives_signs_of_life_and_takes_over_once_it_is_silent()
 {
    const HOUR: Duration = Duration::from_secs(3600);
    let silent = Pace { beat: HOUR, silence: HOUR, lease: HOUR };
    let alive = Pace { beat: Duration::from_millis(1), ..silent };
    let impatient = Pace { silence: Duration::ZERO, ..silent };
    with_hosts(STALE, 1, |share| {
        let [a, b] = both(share, "run");
        let first = RunLock::take_at(&a, alive, || Ok(())).unwrap();
        let refused = RunLock::take_at(&b, silent, || Ok(())).unwrap_err();
        assert!(matches!(refused, Error::RunBusy { .. }), "{refused}");
        first.check().unwrap();
        drop(first);
        share.refresh();
        let first = RunLock::take_at(&a, silent, || Ok(())).unwrap();
        let second = RunLock::take_at(&b, impatient, || Ok(())).unwrap();
        assert!(matches!(first.check().unwrap_err(), Error::RunBusy { .. }));
        second.check().unwrap();
        drop(first);
        second.check().unwrap();
    });
}
