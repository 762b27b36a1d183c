//! Which checkpoints retention removes, whatever their names are, and while other processes remove some, too.

use crate::common::{State, names_in, runtime, small_config};
use ringstow::{Disposal, RetainOptions, Retained, Store, retain};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;

const SIZES: [usize; 2] = [3_000, 5];

/// A directory of checkpoints of these names, saved in this order.
fn root(names: &[&str]) -> tempfile::TempDir {
    let (root, runtime) = (tempfile::tempdir().unwrap(), runtime());
    for (step, name) in names.iter().enumerate() {
        State::new(step as i64, &SIZES).save(&runtime, &root.path().join(name)).unwrap();
    }
    root
}

fn retain_as_planned(root: &Path, keep: usize) -> Retained {
    crate::common::retain_as_planned(root, &RetainOptions::new(keep), &small_config())
}

/// The last parts of paths.
fn names(paths: &[PathBuf]) -> Vec<&str> {
    paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect()
}

/// What was left alone, by the last part of its path, and why.
fn left(done: &Retained) -> Vec<(String, String)> {
    let name = |path: &PathBuf| names(std::slice::from_ref(path))[0].to_owned();
    done.left.iter().map(|left| (name(&left.path), left.reason.clone())).collect()
}

/// What a save into a directory of this name leaves that was killed before its commit.
fn killed(root: &Path, name: &str) -> PathBuf {
    let dir = root.join(name);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("rank00000-0.safetensors.part"), "half").unwrap();
    fs::write(dir.join("manifest.json.part"), "half").unwrap();
    dir
}

#[test]
fn retain_clears_killed_saves_in_earlier_steps() {
    let root = root(&["step-8", "step-9"]);
    let path = root.path();
    for step in 1..6 {
        killed(path, &format!("step-{step}"));
    }
    // A whole of ranks that saved each by itself, none of which committed.
    killed(path, "step-6/rank00000");
    killed(path, "step-6/rank00001");
    fs::write(path.join("step-2/notes.txt"), "mine").unwrap();
    // One may become the newest, one is no step.
    killed(path, "step-10");
    killed(path, "best");
    let done = retain_as_planned(path, 2);
    let cleared = ["step-1", "step-2", "step-3", "step-4", "step-5", "step-6"];
    assert_eq!(names(&done.cleared), cleared);
    assert_eq!(left(&done).iter().map(|(name, _)| name).collect::<Vec<_>>(), ["best", "step-10"]);
    assert_eq!(names_in(path), ["best", "step-10", "step-2", "step-8", "step-9"]);
    assert_eq!(names_in(&path.join("step-2")), ["notes.txt"], "what others put into it stays");
}

#[test]
fn what_is_being_saved_is_not_cleared_away() {
    let root = root(&["step-9"]);
    let dir = killed(root.path(), "step-5");
    let saving = Store::found().unwrap().begin(&dir, 1).unwrap();
    let before = names_in(&killed(root.path(), "step-5"));
    let done = retain_as_planned(root.path(), 1);
    assert!(done.cleared.is_empty(), "{done:?}");
    assert_eq!(left(&done), [("step-5".into(), "a save into it is in progress".into())]);
    assert_eq!(names_in(&dir), before);
    drop(saving);
}

#[test]
fn what_was_once_committed_is_not_cleared_away() {
    let root = root(&["step-1", "step-2", "step-3", "step-9"]);
    let path = root.path();
    // A shard is lost, the manifest is damaged, the manifest is lost.
    fs::remove_file(path.join("step-1/rank00000-0.safetensors")).unwrap();
    fs::write(path.join("step-2/manifest.json"), "rubbish").unwrap();
    fs::remove_file(path.join("step-3/manifest.json")).unwrap();
    for step in ["step-1", "step-2"] {
        killed(path, step);
    }
    let before: Vec<_> = (1..4).map(|step| names_in(&path.join(format!("step-{step}")))).collect();
    let done = retain_as_planned(path, 1);
    assert_eq!((done.cleared.len(), done.left.len()), (0, 3), "{done:?}");
    let after: Vec<_> = (1..4).map(|step| names_in(&path.join(format!("step-{step}")))).collect();
    assert_eq!(after, before);
}

#[test]
fn several_that_retain_at_the_same_time_all_succeed() {
    const STEPS: usize = 24;
    let all: Vec<String> = (8..8 + STEPS).map(|step| format!("step-{step}")).collect();
    for disposal in [Disposal::Remove, Disposal::Recycle] {
        let root = root(&all.iter().map(String::as_str).collect::<Vec<_>>());
        (0..8).for_each(|step| drop(killed(root.path(), &format!("step-{step}"))));
        let barrier = Barrier::new(4);
        let retain = || {
            barrier.wait();
            retain(root.path(), 2, disposal).unwrap()
        };
        let done: Vec<Retained> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(retain)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let there = names_in(root.path());
        let dirs: Vec<&String> = there.iter().filter(|name| !name.starts_with('.')).collect();
        assert_eq!(dirs, ["step-30", "step-31"], "{there:?}");
        for done in done {
            assert_eq!(names(&done.kept), ["step-30", "step-31"], "{done:?}");
            assert!(done.left.iter().all(|left| left.reason.contains("in progress")), "{done:?}");
        }
    }
}

/// A later call tries again: the removal has noted on the directory that it goes.
#[cfg(debug_assertions)] // the seam exists in these builds only
#[test]
fn step_whose_directory_the_system_refuses_to_remove_is_reported() {
    use ringstow::internals::sys::seam::{Call, fail_call};
    let root = root(&["step-1", "step-2"]);
    let refused = fail_call(Call::RemoveDir, &root.path().join("step-1"), nix::libc::EROFS);
    let done = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!((names(&done.kept), names(&done.removed)), (vec!["step-2"], vec!["step-1"]));
    let [(name, reason)] = &left(&done)[..] else { panic!("{done:?}") };
    assert_eq!(name, "step-1");
    assert!(reason.contains("Read-only") && reason.contains("remove it yourself"), "{reason}");
    assert!(names_in(&root.path().join("step-1")).is_empty());
    drop(refused);
    let again = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!((names(&again.cleared), again.removed.len()), (vec!["step-1"], 0), "{again:?}");
    assert!(!root.path().join("step-1").exists());
}
