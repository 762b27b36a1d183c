//! Which checkpoints go and which stay, whatever their names, and whoever else removes some at the same time.

mod common;

use common::{State, names_in, runtime, small_config};
use ringstow::store::{Retained, retain_plan};
use ringstow::{Disposal, retain};
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

/// Retains so many, after looking whether it says beforehand what it will do.
fn retain_as_planned(root: &Path, keep: usize) -> Retained {
    let plan = retain_plan(root, keep, Disposal::Remove, &small_config()).unwrap();
    let done = retain(root, keep, Disposal::Remove).unwrap();
    assert_eq!(plan, done);
    done
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

#[test]
fn what_has_no_number_at_the_end_of_its_name_is_neither_counted_nor_removed() {
    let named = ["best", "final", "step-1000.bak", "v2.pt"];
    let root = root(&["step-1", "step-2", "step-3", "best", "final", "step-1000.bak", "v2.pt"]);
    let done = retain_as_planned(root.path(), 2);
    assert_eq!(names(&done.kept), ["step-2", "step-3"]);
    assert_eq!(names(&done.retired), ["step-1"]);
    let left = left(&done);
    assert_eq!(left.iter().map(|(name, _)| name).collect::<Vec<_>>(), named);
    for (name, reason) in left {
        assert!(reason.contains("does not end in a number"), "{name}: {reason}");
        assert!(root.path().join(name).join("manifest.json").exists());
    }
}

#[test]
fn a_directory_without_any_step_stays_as_it_is() {
    let root = root(&["last", "best"]);
    let done = retain_as_planned(root.path(), 1);
    assert_eq!((done.kept.len(), done.retired.len(), done.left.len()), (0, 0, 2));
    // Nor does one that is itself a checkpoint go.
    let done = retain_as_planned(&root.path().join("last"), 1);
    assert_eq!((done.kept.len(), done.retired.len(), done.left.len()), (0, 0, 1));
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
}

#[test]
fn several_that_retain_at_the_same_time_all_succeed() {
    const STEPS: usize = 24;
    let all: Vec<String> = (0..STEPS).map(|step| format!("step-{step}")).collect();
    for disposal in [Disposal::Remove, Disposal::Recycle] {
        let root = root(&all.iter().map(String::as_str).collect::<Vec<_>>());
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
        let steps: Vec<&String> = there.iter().filter(|name| name.starts_with("step")).collect();
        assert_eq!(steps, ["step-22", "step-23"], "{there:?}");
        for done in done {
            assert_eq!(names(&done.kept), ["step-22", "step-23"], "{done:?}");
            assert!(done.left.iter().all(|left| left.reason.contains("under way")), "{done:?}");
        }
    }
}
