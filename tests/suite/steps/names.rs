//! Which names are steps, in which rows, and which links lead to them.

use crate::common::{errno, names_in, no_values, runtime, scratch};
use crate::steps::{
    all_named, keep, newest, retain_as_planned, root, save, why_left, with_pattern,
};
use ringstow::{StateDict, Store, steps};
use std::fs;
use std::os::unix::fs::symlink;

#[test]
fn names_with_numbers_of_their_own_are_no_steps() {
    let all =
        ["step-900", "step-1000", "best-7", "final", "gpt2", "swa_v3", "ema-1000", "step-1000.bak"];
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
        assert_eq!(
            names_in(root.path()),
            ["best-7", "ema-1000", "final", "gpt2", "step-1000", "step-1000.bak", "swa_v3"]
        );
        assert!(why_left(&done, "gpt2").contains("the steps here are step-*"));
        for name in ["final", "step-1000.bak"] {
            assert!(why_left(&done, name).contains("does not end in a number"), "{done:?}");
        }
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
    // Nor does one that is itself a checkpoint go.
    let done = retain_as_planned(&root.path().join("a.bak"), &keep(1));
    assert_eq!((done.removed.len(), done.left.len()), (0, 1), "{done:?}");
    assert_eq!(names_in(root.path()), ["a.bak", "b.bak"]);
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
    assert!(why_left(&done, "step-4").contains("it is a link"), "{done:?}");
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
        let session = Store::found().unwrap().begin(&dir, 1).unwrap().step(step);
        let (receipt, _) =
            ringstow::Store::found().unwrap().write_rank(&StateDict::new(), 0, &dir).unwrap();
        let state = no_values();
        session.commit(vec![receipt], state).unwrap();
    }
    assert_eq!(newest(root.path()).as_deref(), Some("a"));
}

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
