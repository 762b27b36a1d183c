//! What the system refuses to read, and what goes away meanwhile.

use crate::common::{assert_says, errno};
use crate::steps::{keep, latest_verified, newest, retain_as_planned, root};
use nix::libc::{EACCES, EIO, EMFILE};
use ringstow::internals::sys::seam::{Call, Outcome, fail_call, on_thread};
use ringstow::{Status, latest, steps};
use std::fs;
use std::path::{Path, PathBuf};

/// The newest step's manifest, its directory, and a directory whose name is not a step's.
fn calls(root: &Path) -> [(Call, PathBuf); 3] {
    let newest = root.join("step-2");
    [(Call::Open, newest.join("manifest.json")), (Call::List, newest.clone()), (Call::Look, newest)]
}

#[test]
fn unreadable_newest_step_is_an_error() {
    let root = root(&["step-1", "step-2"]);
    for (call, path) in calls(root.path()) {
        for number in [EACCES, EIO, EMFILE] {
            let _failing = fail_call(call, &path, number);
            for error in [latest(root.path()).unwrap_err(), steps(root.path()).unwrap_err()] {
                assert_eq!(errno(&error), Some(number), "{error}");
                assert_says(&error, &["step-2"]);
            }
            // A look at all of them shows it, and none is removed in its place.
            let found = ringstow::Store::found().unwrap().list(root.path()).unwrap();
            assert_eq!(found.last().unwrap().status, Status::Unreadable);
            assert!(retain_as_planned(root.path(), &keep(1)).removed.is_empty());
        }
    }
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
}

#[test]
fn unreadable_older_step_does_not_hide_the_newest() {
    let root = root(&["step-1", "step-2"]);
    let _failing = fail_call(Call::Open, &root.path().join("step-1/manifest.json"), EIO);
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    assert_eq!(errno(&steps(root.path()).unwrap_err()), Some(EIO));
}

#[test]
fn unreadable_sector_is_damage_where_bytes_are_verified() {
    let root = root(&["step-1", "step-2"]);
    let manifest = root.path().join("step-2/manifest.json");
    let bad_sector = fail_call(Call::Open, &manifest, EIO);
    assert_eq!(latest_verified(root.path()).unwrap(), Some(root.path().join("step-1")));
    drop(bad_sector);
    let _denied = fail_call(Call::Open, &manifest, EACCES);
    assert_eq!(errno(&latest_verified(root.path()).unwrap_err()), Some(EACCES));
}

#[test]
fn unreadable_checkpoint_among_unnumbered_names_is_an_error() {
    let root = root(&["a", "b"]);
    let _failing = fail_call(Call::Open, &root.path().join("a/manifest.json"), EACCES);
    assert_eq!(errno(&latest(root.path()).unwrap_err()), Some(EACCES));
}

#[test]
fn denied_directory_of_another_program_is_left_out() {
    let root = root(&["step-1"]);
    fs::create_dir(root.path().join("lost+found")).unwrap();
    let _failing = fail_call(Call::List, &root.path().join("lost+found"), EACCES);
    assert_eq!(newest(root.path()).as_deref(), Some("step-1"));
    assert_eq!(steps(root.path()).unwrap().len(), 1);
}

#[test]
fn checkpoint_that_is_removed_meanwhile_is_not_listed_as_damaged() {
    let root = root(&["step-1", "step-2"]);
    let (from, to) = (root.path().join("step-2"), root.path().join("elsewhere"));
    // Another process renames it once its files have been listed, before its manifest is read.
    let manifest = from.join("manifest.json");
    let moved = std::cell::Cell::new(false);
    let _moving = on_thread(move |_, call, path| {
        if call == Call::Open && path == &*manifest && !moved.replace(true) {
            fs::rename(&from, &to).unwrap();
        }
        Outcome::Pass
    });
    let found = ringstow::Store::found().unwrap().list(root.path()).unwrap();
    assert!(found.iter().all(|found| found.status != Status::Damaged), "{found:?}");
}
