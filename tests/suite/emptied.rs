//! A removal that is killed just before it removes a directory leaves it empty. The next clean-up removes it, and no empty
//! directory of the user's.
#![cfg(debug_assertions)] // the seam exists in these builds only

use crate::common::{SIZES, State, runtime, scratch, small_config};
use ringstow::internals::store;
use ringstow::internals::sys::seam::{Call, fail_if, on_thread};
use ringstow::{Config, Disposal, Error, Pruning, RetainOptions, Runtime};
use std::path::{Path, PathBuf};

/// Removes a checkpoint, and lets no call pass from the removal of a directory of it on, as if the process had been
/// killed.
fn remove_up_to(left: &Path, dir: &Path, config: &Config) {
    let (mut is_dead, last) = (false, left.to_path_buf());
    let watch = on_thread(fail_if(nix::libc::EIO, move |call, on| {
        is_dead |= call == Call::RemoveDir && on == last;
        is_dead
    }));
    let _ = store::remove_checkpoint(dir, Disposal::Remove, config);
    drop(watch);
    assert_eq!(std::fs::read_dir(left).unwrap().count(), 0);
}

/// A run with a removed checkpoint whose directory is left, and with an empty directory of the user's.
fn left(runtime: &Runtime) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let root = scratch();
    let [dir, own] = ["step-1", "step-2"].map(|name| root.path().join(name));
    State::new(1, &SIZES).save(runtime, &dir).unwrap();
    std::fs::create_dir(&own).unwrap();
    remove_up_to(&dir, &dir, runtime.config());
    (root, dir, own)
}

#[test]
fn prune_removes_it_and_leaves_the_users() {
    let (root, dir, own) = left(&runtime());
    let plan = Pruning { dry_run: true, ..Pruning::default() };
    assert_eq!(store::prune_with(root.path(), plan, &small_config()).unwrap().removed, [&*dir]);
    assert!(dir.exists());
    let swept = store::prune(root.path(), &small_config()).unwrap();
    assert_eq!((swept.removed, swept.left.len()), (vec![dir.clone()], 0));
    assert!(!dir.exists() && own.exists());
}

#[test]
fn retain_removes_it_and_leaves_the_users() {
    let runtime = runtime();
    let (root, dir, own) = left(&runtime);
    State::new(3, &SIZES).save(&runtime, &root.path().join("step-3")).unwrap();
    let retained = store::retain(root.path(), &RetainOptions::new(1), &small_config()).unwrap();
    assert_eq!(
        (&retained.cleared, retained.removed.len()),
        (&vec![dir.clone()], 0),
        "{retained:?}"
    );
    assert!(!dir.exists() && own.exists());
}

#[test]
fn another_removal_removes_it_and_refuses_the_users() {
    let (_root, dir, own) = left(&runtime());
    let remove = |dir| store::remove_checkpoint(dir, Disposal::Remove, &small_config());
    assert!(remove(&dir).unwrap().left.is_empty());
    assert!(!dir.exists());
    assert!(matches!(remove(&own), Err(Error::NoCheckpoint { .. })));
    assert!(own.exists());
}

#[test]
fn save_uses_it() {
    let runtime = runtime();
    let (root, dir, _) = left(&runtime);
    State::new(3, &SIZES).save(&runtime, &dir).unwrap();
    store::prune(root.path(), &small_config()).unwrap();
    State::new(3, &SIZES).assert_at(&runtime, &dir);
}

#[test]
fn directory_of_rank_checkpoints_goes_too() {
    let (root, runtime) = (scratch(), runtime());
    let dir = root.path().join("step-1");
    let state = State::new(1, &SIZES);
    (0..2).for_each(|rank| state.save_alone((rank, 2), "a", &runtime, &dir));
    remove_up_to(&dir, &dir, runtime.config());
    store::prune(root.path(), runtime.config()).unwrap();
    assert!(!dir.exists());
}

#[test]
fn stripe_directory_goes_too() {
    let (root, disk) = (scratch(), scratch());
    let config = Config { stripe: vec![disk.path().into()], ..small_config() };
    let dir = root.path().join("step-1");
    State::new(1, &SIZES).save(&Runtime::new(config.clone()).unwrap(), &dir).unwrap();
    let stripe = disk.path().join("step-1");
    remove_up_to(&stripe, &dir, &config);
    store::prune(root.path(), &config).unwrap();
    assert!(!stripe.exists() && !dir.exists());
}
