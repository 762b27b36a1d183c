//! Removals and clean-ups.

use crate::common::held::HeldUp;
use crate::common::{below, names_in};
use crate::{ALONE, Hosts, LOCK, assert_holds, assert_nothing_else, save_each_rank, state, store};
use ringstow::internals::sys::seam::{Call, Outcome, fail_if, on_thread};
use ringstow::{Disposal, Error, RetainOptions};
use std::fs;
use std::path::Path;

#[test]
fn clean_up_leaves_what_another_host_may_be_writing() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let saving = HeldUp::save(1, &dir);
    store().save(&state(2), hosts.root.path().join("step-2")).unwrap();
    let before = names_in(&dir);
    let swept = store().prune(hosts.root.path()).unwrap();
    let retained = store().retain(hosts.root.path(), &RetainOptions::new(1)).unwrap();
    for (removed, left) in [(swept.removed, swept.left), (retained.cleared, retained.left)] {
        assert!(removed.is_empty() && left.len() == 1, "{removed:?} {left:?}");
        assert_eq!(left[0].path, dir);
        for words in ["`nolock`", "--no-other-writers"] {
            assert!(left[0].reason.contains(words), "{}", left[0].reason);
        }
    }
    assert_eq!(names_in(&dir), before);
    saving.end().unwrap();
    assert_holds(&dir, 1);
}

#[test]
fn removal_removes_listed_files_alone() {
    let hosts = Hosts::without_locks();
    let root = hosts.root.path();
    for step in 1..=3 {
        store().save(&state(step), root.join(format!("step-{step}"))).unwrap();
    }
    // What another host is writing into the oldest.
    let others = "rank00000-0.g6.safetensors.part";
    fs::write(root.join("step-1").join(others), "theirs").unwrap();
    let retained = store().retain(root, &RetainOptions::new(1)).unwrap();
    assert_eq!((retained.removed.len(), retained.left.len()), (2, 0), "{retained:?}");
    assert_eq!(names_in(root), ["step-1", "step-3"]);
    assert_eq!(names_in(&root.join("step-1")), [others]);
    store().remove(root.join("step-3"), Disposal::Remove).unwrap();
    assert_eq!(names_in(root), ["step-1"]);
}

#[test]
fn killed_removal_is_finished_on_request() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    fs::rename(dir.join("manifest.json"), dir.join("manifest.json.retired")).unwrap();
    let swept = store().prune(hosts.root.path()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    store().remove(&dir, Disposal::Remove).unwrap();
    assert!(!dir.exists());
}

#[test]
fn removal_that_does_not_know_its_files_says_so_unless_a_lock_keeps_out_other_hosts() {
    const EIO: i32 = 5;
    let unread = || {
        let is_meant =
            |call, on: &Path| call == Call::Read && on.ends_with("manifest.json.retired");
        on_thread(fail_if(EIO, is_meant))
    };
    let hosts = Hosts::without_locks();
    store().save(&state(1), hosts.dir()).unwrap();
    let before = names_in(&hosts.dir());
    let unreadable = unread();
    let removed = store().remove(hosts.dir(), Disposal::Remove).unwrap();
    drop(unreadable);
    assert_eq!((removed.removed.len(), removed.left.len()), (0, 1), "{removed:?}");
    assert!(removed.left[0].reason.contains("--no-other-writers"), "{removed:?}");
    assert_eq!(names_in(&hosts.dir()).len(), before.len());
    // Once it can be read, they are known.
    store().remove(hosts.dir(), Disposal::Remove).unwrap();
    assert!(!hosts.dir().exists());
    drop(hosts);
    let hosts = Hosts::with_locks();
    store().save(&state(1), hosts.dir()).unwrap();
    let _unreadable = unread();
    store().remove(hosts.dir(), Disposal::Remove).unwrap();
    assert!(!hosts.dir().exists());
}

#[test]
fn lock_file_keeps_out_other_hosts_and_lets_the_next_save_clear_up() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    let saving = HeldUp::save(1, &dir);
    let busy = store().save(&state(2), &dir).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    let swept = store().prune(hosts.root.path()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    saving.end().unwrap();
    assert_holds(&dir, 1);
    fs::write(dir.join("rank00000-0.g6.safetensors.part"), "killed").unwrap();
    store().save(&state(2), &dir).unwrap();
    assert_holds(&dir, 2);
    assert_nothing_else(&dir);
    assert!(dir.join(LOCK).exists());
    store().remove(&dir, Disposal::Remove).unwrap();
    assert!(!dir.exists());
}

#[test]
fn removal_that_lost_its_lock_removes_nothing_of_another_host() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    // Of saves that were killed before; and what another host writes once this one has lost its lock.
    for name in ["rank00000-0.g6.safetensors.part", "manifest.json.00ff00ff00ff00ff.part"] {
        fs::write(dir.join(name), "killed").unwrap();
    }
    let others = ["manifest.json.part", "rank00000-0.g9000000.safetensors.part"];
    let written = others.map(|name| dir.join(name));
    let _loses_lock = on_thread(move |_, call, on| {
        if call == Call::Rename && on.ends_with("manifest.json") {
            written.iter().for_each(|path| fs::write(path, "theirs").unwrap());
        }
        Outcome::Pass
    });
    let removed = store().remove(&dir, Disposal::Remove).unwrap();
    assert_eq!(names_in(&dir), [LOCK, others[0], others[1]], "{removed:?}");
}

#[test]
fn refused_removal_leaves_no_lock_file_in_a_directory_that_is_no_checkpoint() {
    let hosts = Hosts::with_locks();
    let theirs = hosts.root.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("notes.txt"), "theirs").unwrap();
    store().save(&state(1), hosts.dir()).unwrap();
    for dir in [&theirs, hosts.root.path()] {
        let before = names_in(dir);
        let error = store().remove(dir, Disposal::Remove).unwrap_err();
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
        assert_eq!(names_in(dir), before);
    }
    // A save has relied on this one.
    fs::remove_file(hosts.dir().join("manifest.json")).unwrap();
    store().remove(hosts.dir(), Disposal::Remove).unwrap_err();
    assert!(hosts.dir().join(LOCK).exists());
}

#[test]
fn dry_runs_create_nothing() {
    let hosts = Hosts::with_locks();
    let root = hosts.root.path();
    store().save(&state(1), root.join("step-1")).unwrap();
    save_each_rank(&root.join("step-2"));
    save_each_rank(&root.join("step-3"));
    store().save(&state(4), root.join("step-4")).unwrap();
    // The removal of step 3 was killed.
    let manifest = root.join("step-3/rank00000/manifest.json");
    fs::rename(&manifest, manifest.with_extension("json.retired")).unwrap();
    // A host on whose own disk they are has saved them.
    let locks = below(root).into_iter().filter(|path| path.ends_with(LOCK));
    locks.for_each(|path| fs::remove_file(path).unwrap());
    let before = below(root);
    let plan = store().retain_plan(root, &RetainOptions::new(1)).unwrap();
    assert_eq!((plan.removed.len(), plan.left.len()), (3, 0), "{plan:?}");
    assert_eq!(below(root), before);
    let plan = store().prune_plan(root).unwrap();
    assert_eq!(plan.removed, [root.join("step-3")]);
    assert_eq!(below(root), before);
}

#[test]
fn prune_alone_finishes_the_removal_of_rank_checkpoints_in_one_run() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    save_each_rank(&dir);
    let part = dir.join("rank00000");
    fs::rename(part.join("manifest.json"), part.join("manifest.json.retired")).unwrap();
    fs::write(part.join("rank00000-0.g6.safetensors.part"), "killed").unwrap();
    let swept = store().prune_with(hosts.root.path(), ALONE).unwrap();
    assert_eq!((&swept.removed, swept.left.len()), (&vec![dir.clone()], 0), "{swept:?}");
    assert!(!dir.exists());
}

#[test]
fn removal_of_rank_checkpoints_reports_a_directory_that_stays() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    save_each_rank(&dir);
    let part = dir.join("rank00001");
    fs::rename(part.join("manifest.json"), part.join("manifest.json.retired")).unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    let swept = store().prune(hosts.root.path()).unwrap();
    assert!(!swept.removed.contains(&dir) && !swept.removed.is_empty(), "{swept:?}");
    assert_eq!(names_in(&dir), ["notes.txt"]);
}
