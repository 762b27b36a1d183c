//! Checkpoints that another save replaces, or that are removed, while somebody reads them: what is read is
//! all of the one or all of the other, or nothing.

use crate::common::{
    State, assert_says, assert_undamaged, names_in, on, runtime, saved, scratch, small_config,
    step_at,
};
use ringstow::{Checkpoint, Disposal, Error, LoadOptions, Loaded, Result, Runtime, Target};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const SIZES: [usize; 3] = [5000, 12_288, 20_001];

fn state(step: i64) -> State {
    State::new(step, &SIZES)
}

fn at(root: &tempfile::TempDir) -> PathBuf {
    root.path().join("last")
}

/// Loads all of a checkpoint that was opened.
fn load(opened: &Checkpoint, verify: bool, runtime: &Runtime) -> Result<Loaded> {
    let names = opened.tensors().iter().map(|tensor| tensor.name.as_str());
    opened.load_names(
        names,
        LoadOptions { verify, ..LoadOptions::default() }.on(runtime, &Default::default()),
    )
}

#[track_caller]
fn assert_replaced<T>(outcome: Result<T>, path: &Path) {
    let Err(error) = outcome else { panic!("it was loaded") };
    assert!(matches!(&error, Error::Replaced { path: told } if told == path), "{error:?}");
    assert_says(&error, &["replaced by another save", "open it again"]);
}

#[test]
fn opened_checkpoint_says_when_it_was_replaced() {
    let (root, runtime) = (scratch(), runtime());
    let dir = at(&root);
    state(1).save(&runtime, &dir).unwrap();
    let opened = Checkpoint::open(&dir).unwrap();
    state(2).save(&runtime, &dir).unwrap();
    for verify in [true, false] {
        assert_replaced(load(&opened, verify, &runtime), &dir);
    }
    let mut memory = vec![7; SIZES[0]];
    let targets = [("layer.0.weight", Target::new(&mut memory))];
    let filled = opened.load_into(&targets, on(&runtime));
    assert_replaced(filled, &dir);
    assert_eq!(memory, vec![7; SIZES[0]], "nothing of another checkpoint came in");
    state(2).assert_at(&runtime, &dir);
}

#[test]
fn files_of_another_save_are_not_taken_for_its_own() {
    for verify in [true, false] {
        let (root, runtime) = (scratch(), runtime());
        let dir = at(&root);
        state(1).save(&runtime, &dir).unwrap();
        let (opened, names) = (Checkpoint::open(&dir).unwrap(), names_in(&dir));
        ringstow::remove(&dir, Disposal::Recycle).unwrap();
        state(2).save(&runtime, &dir).unwrap();
        assert_eq!(names_in(&dir), names, "the case to be tested");
        assert_replaced(load(&opened, verify, &runtime), &dir);
    }
}

#[test]
fn running_save_is_not_read_in_place_of_a_removed_one() {
    let (root, runtime) = (scratch(), runtime());
    let dir = at(&root);
    state(1).save(&runtime, &dir).unwrap();
    let opened = Checkpoint::open(&dir).unwrap();
    ringstow::remove(&dir, Disposal::Recycle).unwrap();
    // As it is just before the commit of the next one there.
    state(2).save(&runtime, &dir).unwrap();
    let shard = crate::common::shard_of(&dir);
    fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
    fs::rename(dir.join("manifest.json"), dir.join("manifest.json.part")).unwrap();
    let error = load(&opened, false, &runtime).unwrap_err();
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error:?}");
    assert_says(&error, &["removed after it was opened"]);
}

#[test]
fn checkpoint_being_removed_loads_while_files_last() {
    let (_root, dir) = saved();
    let opened = Checkpoint::open(&dir).unwrap();
    fs::rename(dir.join("manifest.json"), dir.join("manifest.json.retired")).unwrap();
    let loaded = load(&opened, true, &runtime()).unwrap();
    assert_eq!(loaded.tensors().count(), crate::common::SIZES.len());
    fs::remove_file(crate::common::shard_of(&dir)).unwrap();
    let error = load(&opened, true, &runtime()).unwrap_err();
    assert_says(&error, &["removed after it was opened"]);
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error:?}");
}

#[test]
fn missing_shard_of_a_committed_checkpoint_is_named() {
    let (_root, dir) = saved();
    let opened = Checkpoint::open(&dir).unwrap();
    fs::remove_file(crate::common::shard_of(&dir)).unwrap();
    let error = load(&opened, true, &runtime()).unwrap_err();
    assert!(matches!(error, Error::MissingFiles { .. }), "{error:?}");
    assert_says(&error, &["rank00000-0.safetensors was there when it was opened"]);
}

#[test]
fn replaced_checkpoint_still_gives_its_values() {
    let (root, runtime) = (scratch(), runtime());
    let dir = at(&root);
    state(1).save(&runtime, &dir).unwrap();
    let opened = Checkpoint::open(&dir).unwrap();
    state(2).save(&runtime, &dir).unwrap();
    let none: [&str; 0] = [];
    let loaded = opened.load_names(none, on(&runtime)).unwrap();
    assert_eq!(loaded.tensors().count(), 0);
    assert_eq!(opened.state().unwrap().get("step").unwrap().as_int(), Some(1));
    assert_eq!(step_at(&dir), 2);
}

/// The last one of a row of saves into the same directory, and a reader that goes on until it is there.
fn read_beside_saves(read: impl Fn(&Path) + Sync, saves: i64, recycle: bool) {
    let (root, done) = (scratch(), AtomicBool::new(false));
    let dir = at(&root);
    let config = ringstow::Config { recycle, shard_bytes: 20_000, ..small_config() };
    let runtime = Runtime::new(config).unwrap();
    state(0).save(&runtime, &dir).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                read(&dir);
            }
        });
        for step in 1..=saves {
            state(step).save(&runtime, &dir).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    state(saves).assert_at(&runtime, &dir);
}

/// Whose tensors these are, all of them.
#[track_caller]
fn assert_is_one_state(loaded: &Loaded) {
    let first = loaded.tensor("layer.0.weight").unwrap().data();
    let of = (0..=SAVES).map(state).find(|state| state.tensors[0].1 == first).unwrap();
    of.assert_equals(loaded);
}

const SAVES: i64 = 150;

#[test]
fn load_beside_saves_returns_one_of_them() {
    for recycle in [false, true] {
        read_beside_saves(|dir| assert_is_one_state(&ringstow::load(dir).unwrap()), SAVES, recycle);
    }
}

#[test]
fn a_check_beside_saves_over_its_path_finds_no_damage() {
    let reader = runtime();
    let check = |dir: &Path| {
        assert_undamaged(&reader, dir);
    };
    read_beside_saves(check, SAVES, true);
}

#[test]
fn opened_checkpoint_beside_saves_never_mixes() {
    let reader = runtime();
    let load = |dir: &Path| {
        let opened = Checkpoint::open(dir).unwrap();
        match load(&opened, false, &reader) {
            Ok(loaded) => {
                let step = opened.state().unwrap().get("step").unwrap().as_int().unwrap();
                state(step).assert_equals(&loaded);
            }
            Err(error) => assert!(matches!(error, Error::Replaced { .. }), "{error}"),
        }
    };
    read_beside_saves(load, SAVES, true);
}
