//! The steps in their order, the newest, and the way back.

use crate::common::{SIZES, State, assert_says, flip, runtime, scratch, shard_of, small_config};
use crate::steps::{latest_verified, named, root};
use ringstow::{Before, Error, StateDict, Status, Wanted, latest, steps};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;

#[test]
fn steps_are_sorted_and_include_unloadable_ones() {
    let root = root(&["step-10", "step-9", "step-100", "best"]);
    let path = root.path();
    let cut = fs::OpenOptions::new().write(true).open(shard_of(&path.join("step-9"))).unwrap();
    cut.set_len(5).unwrap();
    fs::create_dir(path.join("step-200")).unwrap();
    fs::write(path.join("step-200/rank00000-0.safetensors.part"), "half").unwrap();
    let found = steps(path).unwrap();
    let seen: Vec<_> = found.iter().map(|f| (named(&f.path), f.step, f.status)).collect();
    use Status::{Committed, Damaged, Incomplete};
    let expected = [
        ("step-9".into(), Some(9), Damaged),
        ("step-10".into(), Some(10), Committed),
        ("step-100".into(), Some(100), Committed),
        ("step-200".into(), Some(200), Incomplete),
    ];
    assert_eq!(seen, expected);
    assert!(found[0].problem.is_some() && found[1].problem.is_none());
    // `ls` has them in this order, after what is no step.
    let listed: Vec<String> = ringstow::Store::found()
        .unwrap()
        .list(path)
        .unwrap()
        .iter()
        .map(|f| named(&f.path))
        .collect();
    assert_eq!(listed, ["best", "step-9", "step-10", "step-100", "step-200"]);
}

#[test]
fn missing_directory_has_no_steps_and_no_latest() {
    let root = scratch();
    assert_eq!(latest(root.path().join("run")).unwrap(), None);
    assert!(steps(root.path().join("run")).unwrap().is_empty());
    assert_eq!(latest(root.path()).unwrap(), None);
    // One that is no directory, or may not be listed, is another matter.
    fs::write(root.path().join("file"), "").unwrap();
    assert!(matches!(latest(root.path().join("file")), Err(Error::Io { .. })));
}

#[test]
fn the_newest_whose_bytes_verify_is_the_way_back() {
    let (root, runtime) = (scratch(), runtime());
    let at = |step: i64| root.path().join(format!("step-{step}"));
    for step in 1..4 {
        State::new(step, &SIZES).save(&runtime, &at(step)).unwrap();
    }
    flip(&shard_of(&at(3)), 4100);
    flip(&shard_of(&at(2)), 4100);
    assert_eq!(latest(root.path()).unwrap(), Some(at(3)));
    assert_eq!(latest_verified(root.path()).unwrap(), Some(at(1)));
    let error = ringstow::load(at(3)).unwrap_err();
    assert_says(&error, &["is damaged at offset", "latest(dir, verify=True)"]);
    // All are damaged.
    flip(&shard_of(&at(1)), 4100);
    let error = latest_verified(root.path()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert_says(&error, &["step-3", "on_corrupt=\"skip\"", "ringstow verify", "operations.md"]);
    assert!(!error.to_string().contains("latest(dir"), "it is what failed: {error}");
    // Files of all are missing.
    for step in 1..4 {
        fs::remove_file(shard_of(&at(step))).unwrap();
    }
    for error in [latest_verified(root.path()), latest(root.path())].map(Result::unwrap_err) {
        assert!(matches!(error, Error::MissingFiles { .. }), "{error}");
        assert_says(&error, &["step-3", "on_corrupt=\"skip\"", "ringstow verify"]);
        assert!(!error.to_string().contains("latest(dir"), "{error}");
    }
}

#[test]
fn the_newest_before_a_step_or_a_checkpoint() {
    let root = root(&["step-10", "step-20", "step-30"]);
    let before = |before: Before| {
        let wanted = Wanted { before: Some(before), ..Wanted::default() };
        ringstow::internals::store::latest(root.path(), &wanted, &small_config(), &Arc::default())
            .map(|newest| newest.map(|found| found.path))
    };
    let name = |found: ringstow::Result<Option<PathBuf>>| found.unwrap().map(|path| named(&path));
    assert_eq!(name(before(Before::Step(30))).as_deref(), Some("step-20"));
    assert_eq!(name(before(Before::Step(25))).as_deref(), Some("step-20"));
    assert_eq!(name(before(Before::Step(10))), None);
    let path = |name: &str| Before::Path(root.path().join(name));
    assert_eq!(name(before(path("step-30"))).as_deref(), Some("step-20"));
    assert_eq!(name(before(path("step-10"))), None);
    symlink("step-20", root.path().join("good")).unwrap();
    assert_eq!(name(before(path("good"))).as_deref(), Some("step-10"));
    let error = before(path("step-40")).unwrap_err();
    assert_says(&error, &["step-40 is none of the 3 steps in"]);
    fs::remove_file(root.path().join("good")).unwrap();
    for step in [10, 20, 30] {
        let (from, to) = (format!("step-{step}"), format!("of {step} epochs"));
        fs::rename(root.path().join(from), root.path().join(to)).unwrap();
    }
    assert_says(&before(Before::Step(30)).unwrap_err(), &["nothing in", "counts as a step"]);
    assert_eq!(name(before(path("of 30 epochs"))).as_deref(), Some("of 20 epochs"));
}

#[test]
fn empty_path_is_refused() {
    for error in [
        ringstow::load("").unwrap_err(),
        ringstow::Checkpoint::open("").unwrap_err(),
        ringstow::save(&StateDict::new(), "").unwrap_err(),
    ] {
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
}

/// Trainers' integrations save there, and rename at the end. A kill in between leaves a committed checkpoint.
#[test]
fn a_directory_that_waits_for_its_name_is_no_step() {
    for hidden in [".ringstow-checkpoint-4", ".ringstow_replaced-checkpoint-4"] {
        let (root, runtime) = (root(&["checkpoint-2", "checkpoint-3"]), runtime());
        State::new(4, &SIZES).save(&runtime, &root.path().join(hidden)).unwrap();
        crate::steps::save(&runtime, &root.path().join(".ringstow-checkpoint-5"), Some(5));
        let names: Vec<String> =
            steps(root.path()).unwrap().iter().map(|f| named(&f.path)).collect();
        assert_eq!(names, ["checkpoint-2", "checkpoint-3"]);
        assert_eq!(latest(root.path()).unwrap(), Some(root.path().join("checkpoint-3")));
        let done = crate::steps::retain_as_planned(root.path(), &ringstow::RetainOptions::new(1));
        assert_eq!(crate::steps::all_named(&done.removed), ["checkpoint-2"]);
        assert!(root.path().join(hidden).join("manifest.json").exists());
        assert_eq!(
            ringstow::Store::found().unwrap().list(root.path()).unwrap().len(),
            3,
            "`ls` still shows what takes room"
        );
    }
}
