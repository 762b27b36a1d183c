//! What stays, and the files that are recycled.

use crate::common::{SIZES, State, names_in, runtime, scratch, small_config};
use crate::steps::{all_named, keep, newest, retain_as_planned, root, save, why_left};
use ringstow::internals::store::recycled;
use ringstow::{Config, RetainOptions, Runtime, Store, steps};
use std::fs;

#[test]
fn a_dry_run_knows_what_is_being_saved() {
    let root = root(&["step-1", "step-2", "step-3"]);
    let saving = Store::found().unwrap().begin(root.path().join("step-1"), 1).unwrap();
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.removed), ["step-2"]);
    assert!(why_left(&done, "step-1").contains("in progress"), "{done:?}");
    drop(saving);
}

#[test]
#[cfg(target_os = "linux")]
fn recycled_files_without_a_matching_shard_go() {
    let root = scratch();
    let (dir, many) = (root.path().join("last"), Config { shard_bytes: 5_000, ..small_config() });
    let waiting = || recycled(root.path(), &small_config()).unwrap();
    assert_eq!(waiting().bytes, 0);
    let recycling = |config: Config| Runtime::new(Config { recycle: true, ..config }).unwrap();
    for step in 0..2 {
        State::new(step, &SIZES).save(&recycling(many.clone()), &dir).unwrap();
    }
    assert!(waiting().paths.len() >= 3 && waiting().bytes >= 3 * 4096, "{:?}", waiting());
    // One shard from now on: one file is all that the next save can write over.
    State::new(3, &SIZES).save(&recycling(small_config()), &dir).unwrap();
    assert_eq!(names_in(&root.path().join(".ringstow-spares")), ["rank00000-0.spare"]);
    let state = State::new(4, &SIZES);
    assert!(state.save(&recycling(small_config()), &dir).unwrap().recycled_bytes > 0);
    state.assert_at(&recycling(small_config()), &dir);
}

#[test]
fn a_save_into_the_run_itself_hides_no_step() {
    let root = root(&["step-1", "step-2"]);
    fs::write(root.path().join("rank00000-0.safetensors.part"), "half").unwrap();
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    assert_eq!(steps(root.path()).unwrap().len(), 2);
    save(&runtime(), root.path(), None);
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    let done = retain_as_planned(root.path(), &RetainOptions::new(1));
    assert_eq!(
        (all_named(&done.kept), all_named(&done.removed)),
        (vec!["step-2".into()], vec!["step-1".into()])
    );
}

#[test]
fn what_was_saved_last_stays_though_its_step_is_lower() {
    let root = root(&["step-10", "step-20", "step-30", "step-11"]);
    let done = retain_as_planned(root.path(), &RetainOptions::new(1));
    assert_eq!(all_named(&done.kept), ["step-30"]);
    assert_eq!(all_named(&done.removed), ["step-10", "step-20"]);
    assert!(done.warnings[0].contains("step-11 stays: it was saved last"), "{done:?}");
    assert_eq!(names_in(root.path()), ["step-11", "step-30"]);
}
