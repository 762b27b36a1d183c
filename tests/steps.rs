//! Which checkpoints of a directory count as steps, and what that spares: the examples of a stranger's first
//! twenty minutes among them.

mod common;

use common::{
    SIZES, State, assert_says, errno, flip, names_in, runtime, scratch, shard_of, small_config,
};
use ringstow::internals::store::{Retained, Status, recycled};
use ringstow::{
    Before, Config, Disposal, Dtype, Error, Retention, Runtime, Session, StateDict, Wanted, latest,
    latest_verified, retain, steps,
};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves checkpoints of these names in this order.
fn root(names: &[&str]) -> tempfile::TempDir {
    let (root, runtime) = (scratch(), runtime());
    names.iter().for_each(|name| save(&runtime, &root.path().join(name), None));
    root
}

fn save(runtime: &Runtime, path: &Path, step: Option<u64>) {
    let mut state = StateDict::new();
    state.bytes("w", Dtype::U8, &[4], &[7; 4]).unwrap();
    if let Some(step) = step {
        state.step(step);
    }
    ringstow::internals::store::save(runtime, &state, path, &Arc::default()).unwrap();
    wait_for_the_next_millisecond();
}

/// Commits are dated in milliseconds, and these tests ask which came last.
fn wait_for_the_next_millisecond() {
    let now = || std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let before = now();
    while now() == before {
        std::hint::spin_loop();
    }
}

fn named(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

fn all_named(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| named(path)).collect()
}

fn newest(root: &Path) -> Option<String> {
    latest(root).unwrap().map(|path| named(&path))
}

/// Retains so many, after checking that the plan says the same.
fn retain_as_planned(root: &Path, retention: &Retention) -> Retained {
    let plan = ringstow::internals::store::retain_plan(root, retention, &small_config()).unwrap();
    let done = ringstow::internals::store::retain(root, retention, &small_config()).unwrap();
    assert_eq!(plan, done);
    done
}

fn keep(keep: usize) -> Retention {
    Retention::new(keep)
}

fn with_pattern(keep: usize, pattern: &str) -> Retention {
    Retention { pattern: Some(pattern.parse().unwrap()), ..Retention::new(keep) }
}

/// Why a directory was left alone.
#[track_caller]
fn why_left<'a>(done: &'a Retained, name: &str) -> &'a str {
    &done.left.iter().find(|left| named(&left.path) == name).unwrap().reason
}

// What a user did not mean.

#[test]
fn names_with_numbers_of_their_own_are_no_steps() {
    let all = ["step-900", "step-1000", "best-7", "gpt2", "swa_v3", "ema-1000"];
    // Whatever was saved last.
    for first in 0..all.len() {
        let mut order = all;
        order.rotate_left(first);
        let at = |name| order.iter().position(|one| *one == name).unwrap();
        let (older, newer) = (at("step-900"), at("step-1000"));
        if older > newer {
            order.swap(older, newer);
        }
        let root = root(&order);
        assert_eq!(newest(root.path()).as_deref(), Some("step-1000"), "{order:?}");
        let done = retain_as_planned(root.path(), &keep(1));
        assert_eq!(all_named(&done.kept), ["step-1000"], "{order:?}");
        assert_eq!(all_named(&done.removed), ["step-900"]);
        assert_eq!(done.counted.as_deref(), Some("step-*"));
        assert_eq!(names_in(root.path()), ["best-7", "ema-1000", "gpt2", "step-1000", "swa_v3"]);
        assert!(why_left(&done, "gpt2").contains("the steps here are step-*"));
        assert!(done.warnings.is_empty(), "{done:?}");
    }
}

#[test]
fn a_loss_at_the_end_of_a_name_is_no_step() {
    let all = ["epoch=1-loss=0.25", "epoch=2-loss=0.3", "epoch=10-loss=0.2"];
    let root = root(&all);
    // Nothing is a step: the time of the commit decides.
    assert_eq!(newest(root.path()).as_deref(), Some("epoch=10-loss=0.2"));
    let done = retain_as_planned(root.path(), &keep(1));
    assert!(done.kept.is_empty() && done.removed.is_empty(), "{done:?}");
    assert_eq!(done.left.len(), 3);
    assert!(done.left[0].reason.contains("a fraction"), "{done:?}");
    assert_eq!((done.counted, done.warnings.len()), (None, 1));
    assert!(done.warnings[0].contains("none of the 3 checkpoints"), "{:?}", done.warnings);
    // A pattern says where the step is.
    let done = retain_as_planned(root.path(), &with_pattern(1, "epoch={step}-loss=*"));
    assert_eq!(all_named(&done.kept), ["epoch=10-loss=0.2"]);
    assert_eq!(names_in(root.path()), ["epoch=10-loss=0.2"]);
}

#[test]
fn losses_and_dates_in_names_are_not_steps() {
    for all in [
        ["epoch=1-acc=95", "epoch=2-acc=97", "epoch=3-acc=96"],
        ["loss=3", "loss=2", "loss=1"],
        ["lr=1e-05", "lr=1e-04", "lr=1e-03"],
        ["2026-10-31", "2026-11-01", "2026-11-02"],
        ["v1.9", "v1.10", "v2.0"],
        ["seed=3", "seed=1", "seed=2"],
    ] {
        let root = root(&all);
        assert_eq!(newest(root.path()).as_deref(), Some(all[2]));
        let done = retain_as_planned(root.path(), &keep(1));
        assert_eq!((done.removed.len(), done.left.len()), (0, 3), "{done:?}");
        assert_eq!(done.warnings.len(), 1);
    }
}

#[test]
fn known_suffixes_may_follow_the_step() {
    for suffix in [".pt", ".ckpt", ".safetensors", ".distcp", ".dir", ".pth"] {
        let all = [900, 1000, 1100].map(|step| format!("ckpt_{step}{suffix}"));
        let root = root(&all.each_ref().map(String::as_str));
        let done = retain_as_planned(root.path(), &keep(1));
        assert_eq!(all_named(&done.kept), [all[2].as_str()]);
        assert_eq!(names_in(root.path()), [all[2].as_str()]);
    }
}

#[test]
fn a_directory_in_which_nothing_counts_is_warned_of() {
    let root = root(&["a.bak", "b.bak"]);
    let done = retain_as_planned(root.path(), &keep(1));
    let [warning] = &done.warnings[..] else { panic!("{done:?}") };
    assert!(warning.contains("Save with step=") && warning.contains("pattern="), "{warning}");
    let done = retain_as_planned(root.path(), &with_pattern(1, "step-*"));
    assert!(done.warnings[0].contains("fits the pattern step-*"), "{:?}", done.warnings);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    // Nothing to say of an empty one.
    assert!(retain_as_planned(scratch().path(), &keep(1)).warnings.is_empty());
}

#[test]
fn what_a_link_leads_to_is_not_removed() {
    let root = root(&["step-1", "step-2", "step-3", "step-4"]);
    let path = root.path();
    // A link to a link, and one to a file within.
    symlink("step-1", path.join("good")).unwrap();
    symlink(path.join("good"), path.join("best")).unwrap();
    symlink("step-2/rank00000-0.safetensors", path.join("model.safetensors")).unwrap();
    symlink("nowhere", path.join("broken")).unwrap();
    let done = retain_as_planned(path, &keep(1));
    assert_eq!(all_named(&done.kept), ["step-4"]);
    assert_eq!(all_named(&done.removed), ["step-3"]);
    assert!(why_left(&done, "step-1").contains("best leads to it"), "{done:?}");
    assert!(why_left(&done, "step-2").contains("model.safetensors leads to it"), "{done:?}");
    assert!(path.join("best/manifest.json").exists() && path.join("model.safetensors").exists());
    // The link gone, it counts as any other.
    fs::remove_file(path.join("best")).unwrap();
    fs::remove_file(path.join("good")).unwrap();
    assert_eq!(all_named(&retain_as_planned(path, &keep(1)).removed), ["step-1"]);
}

#[test]
fn a_link_is_no_step_of_its_own() {
    let root = root(&["step-1", "step-2"]);
    symlink("step-1", root.path().join("step-3")).unwrap();
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    assert_eq!(steps(root.path()).unwrap().len(), 2);
    // But one to a checkpoint on another disk is where that is.
    let other = self::root(&["step-4"]);
    symlink(other.path().join("step-4"), root.path().join("step-4")).unwrap();
    assert_eq!(newest(root.path()).as_deref(), Some("step-4"));
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.kept), ["step-2"]);
    assert!(other.path().join("step-4/manifest.json").exists());
    assert!(root.path().join("step-4/manifest.json").exists());
}

#[test]
fn newest_saves_row_of_steps_wins_with_a_warning() {
    let names = ["step-10", "step-20", "step-30", "epoch-1", "epoch-2"];
    let root = root(&names);
    assert_eq!(newest(root.path()).as_deref(), Some("epoch-2"));
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.removed), ["epoch-1"]);
    let [warning] = &done.warnings[..] else { panic!("{done:?}") };
    assert!(warning.contains("epoch-*, the newest save's, is taken, step-* left"), "{warning}");
    assert!(why_left(&done, "step-10").contains("the steps here are epoch-*"));
    let done = retain_as_planned(root.path(), &with_pattern(2, "step-*"));
    assert_eq!(all_named(&done.removed), ["step-10"]);
    assert!(done.warnings.is_empty());
}

#[test]
fn rows_beside_the_steps_are_left_alone() {
    let names = ["best-3", "best-5", "best-9", "ema-step-1", "ema-step-2"];
    let steps = ["step-1", "step-2", "step-3"];
    for all in [[&names[..], &steps[..]].concat(), [&steps[..], &names[..]].concat()] {
        let root = root(&all);
        // To the last step: what is taken for a step does not change with what is removed.
        for keep in [2, 1] {
            let done = retain_as_planned(root.path(), &self::keep(keep));
            assert_eq!(done.counted.as_deref(), Some("step-*"), "{done:?}");
            assert_eq!((done.kept.len(), done.left.len()), (keep, names.len()));
            assert!(done.warnings.is_empty(), "{done:?}");
            assert_eq!(newest(root.path()).as_deref(), Some("step-3"));
        }
    }
}

#[test]
fn an_epoch_before_the_step_does_not_part_a_row() {
    let root = root(&["epoch=0-step=500.ckpt", "epoch=1-step=1000.ckpt", "epoch=1-step=1500.ckpt"]);
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.kept), ["epoch=1-step=1500.ckpt"]);
    assert_eq!(done.counted.as_deref(), Some("epoch=*-step={step}.ckpt"));
    assert_eq!(names_in(root.path()).len(), 1);
    // Another number does.
    let root = self::root(&["run1-100", "run1-200", "run2-100", "run2-200"]);
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.removed), ["run2-100"]);
}

// Steps that were saved as such.

#[test]
fn what_was_saved_as_a_step_is_one_whatever_its_name() {
    let (root, runtime) = (root(&["gpt2", "step-1", "step-2"]), runtime());
    let path = root.path();
    for (name, step) in [("epoch=1-loss=0.25", 100), ("epoch=2-loss=0.3", 200), ("final", 300)] {
        save(&runtime, &path.join(name), Some(step));
    }
    let found = steps(path).unwrap();
    assert_eq!(found.iter().map(|f| f.step).collect::<Vec<_>>(), [100, 200, 300].map(Some));
    save(&runtime, &path.join("best-9"), None);
    assert_eq!(newest(path).as_deref(), Some("final"));
    let done = retain_as_planned(path, &keep(1));
    assert_eq!(all_named(&done.removed), ["epoch=1-loss=0.25", "epoch=2-loss=0.3"]);
    assert_eq!(names_in(path), ["best-9", "final", "gpt2", "step-1", "step-2"]);
    assert!(why_left(&done, "step-1").contains("was not saved with step="), "{done:?}");
    assert!(done.warnings.is_empty());
}

#[test]
fn steps_of_before_step_was_given_count_by_their_name() {
    let (root, runtime) = (root(&["step-1", "step-2", "ema-2"]), runtime());
    for step in [3, 4] {
        save(&runtime, &root.path().join(format!("step-{step}")), Some(step));
    }
    let done = retain_as_planned(root.path(), &keep(2));
    assert_eq!(all_named(&done.removed), ["step-1", "step-2"]);
    assert_eq!(done.counted.as_deref(), Some("saved with step=, and step-*"));
    assert_eq!(names_in(root.path()), ["ema-2", "step-3", "step-4"]);
}

#[test]
fn several_ranks_save_a_step() {
    let root = scratch();
    for (name, step) in [("a", 2), ("b", 1)] {
        let dir = root.path().join(name);
        let session = Session::begin(&dir, 1).unwrap().step(step);
        let (receipt, _) = ringstow::write_rank(&StateDict::new(), 0, &dir).unwrap();
        let state = ringstow::Value::Dict(Vec::new()).to_json().unwrap();
        session.commit(vec![receipt], state).unwrap();
    }
    assert_eq!(newest(root.path()).as_deref(), Some("a"));
}

// Listing, and the way back.

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
    let listed: Vec<String> =
        ringstow::list(path).unwrap().iter().map(|f| named(&f.path)).collect();
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
    assert_says(
        &error,
        &["step-3", "on_corrupt=\"skip\"", "ringstow verify", "troubleshooting.md"],
    );
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
fn a_dry_run_knows_what_is_being_saved() {
    let root = root(&["step-1", "step-2", "step-3"]);
    let saving = Session::begin(root.path().join("step-1"), 1).unwrap();
    let done = retain_as_planned(root.path(), &keep(1));
    assert_eq!(all_named(&done.removed), ["step-2"]);
    assert!(why_left(&done, "step-1").contains("in progress"), "{done:?}");
    drop(saving);
}

// Recycled files.

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
#[cfg(target_os = "linux")]
fn removal_follows_the_configuration_by_default() {
    assert_eq!(Disposal::of(&Config::default()), Disposal::Remove);
    assert_eq!(Disposal::of(&Config { recycle: true, ..Config::default() }), Disposal::Recycle);
    let root = root(&["step-1", "step-2"]);
    retain(root.path(), 1, Disposal::of(&Config::default())).unwrap();
    assert_eq!(names_in(root.path()), ["step-2"]);
}

#[test]
fn a_save_into_the_run_itself_hides_no_step() {
    let root = root(&["step-1", "step-2"]);
    fs::write(root.path().join("rank00000-0.safetensors.part"), "half").unwrap();
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    assert_eq!(steps(root.path()).unwrap().len(), 2);
    save(&runtime(), root.path(), None);
    assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
    let done = retain_as_planned(root.path(), &Retention::new(1));
    assert_eq!(
        (all_named(&done.kept), all_named(&done.removed)),
        (vec!["step-2".into()], vec!["step-1".into()])
    );
}

#[test]
fn what_was_saved_last_stays_though_its_step_is_lower() {
    let root = root(&["step-10", "step-20", "step-30", "step-11"]);
    let done = retain_as_planned(root.path(), &Retention::new(1));
    assert_eq!(all_named(&done.kept), ["step-30"]);
    assert_eq!(all_named(&done.removed), ["step-10", "step-20"]);
    assert!(done.warnings[0].contains("step-11 stays: it was saved last"), "{done:?}");
    assert_eq!(names_in(root.path()), ["step-11", "step-30"]);
}

// What the system refuses to read.

#[cfg(debug_assertions)] // the seam exists in these builds only
mod refused {
    use super::*;
    use nix::libc::{EACCES, EIO, EMFILE};
    use ringstow::internals::sys::seam::{Call, fail_call};

    /// The newest step's manifest, its directory, and a directory whose name is not a step's.
    fn calls(root: &Path) -> [(Call, PathBuf); 3] {
        let newest = root.join("step-2");
        [
            (Call::Open, newest.join("manifest.json")),
            (Call::List, newest.clone()),
            (Call::Look, newest),
        ]
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
                let found = ringstow::list(root.path()).unwrap();
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
}

mod links_and_races {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn link_that_leads_in_a_circle_or_nowhere_is_ignored() {
        let root = root(&["step-1", "step-2"]);
        symlink("latest", root.path().join("latest")).unwrap();
        symlink("step-3", root.path().join("step-3")).unwrap();
        symlink("x".repeat(300), root.path().join("long")).unwrap();
        assert_eq!(newest(root.path()).as_deref(), Some("step-2"));
        assert_eq!(steps(root.path()).unwrap().len(), 2);
        let error = ringstow::load(root.path().join("latest")).unwrap_err();
        assert_eq!(errno(&error), Some(nix::libc::ELOOP), "{error}");
    }

    #[test]
    fn checkpoint_that_is_removed_meanwhile_is_not_listed_as_damaged() {
        use ringstow::internals::sys::seam::{Call, Outcome, on_thread};
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
        let found = ringstow::list(root.path()).unwrap();
        assert!(found.iter().all(|found| found.status != Status::Damaged), "{found:?}");
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
}
