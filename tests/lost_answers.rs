//! A network file system may report the failure of a rename that took effect: the server's answer was lost, and the
//! request that repeats it finds nothing. A seam renames, and then reports a failure.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

mod common;

use common::place::{Place, SIZES, WAYS};
use common::{State, assert_says, names_in, scratch, small_config, step_with};
use ringstow::internals::format::names;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, on_thread};
use ringstow::{Checkpoint, Config, Dtype, StateDict, Store};
use std::fs;
use std::path::{Path, PathBuf};

const EIO: i32 = 5;
const ENOENT: i32 = 2;

/// What ringstow renames this file to; `None` for a recycled file.
fn renamed(from: &Path) -> Option<PathBuf> {
    let name = from.file_name()?.to_str()?;
    let to = match name.strip_suffix(".part") {
        Some(rest) if rest.starts_with("manifest.json") => "manifest.json".into(),
        // Of one write of a rank: the coordinator adopts it.
        Some(rest) if names::split_write(name).is_some() => {
            format!("{}.part", rest.rsplit_once('.')?.0)
        }
        Some(rest) => rest.into(),
        None if name == "manifest.json" => "manifest.json.retired".into(),
        None => return None,
    };
    Some(from.with_file_name(to))
}

/// Loses the answers to renames of files that `loses` picks, by their number and path.
fn lose(errno: i32, mut loses: impl FnMut(usize, &Path) -> bool + Send + 'static) -> Watch {
    let mut count = 0;
    on_thread(move |_, call, from| {
        let Some(to) = renamed(from).filter(|_| call == Call::Rename) else { return Outcome::Pass };
        count += 1;
        if !loses(count, from) {
            return Outcome::Pass;
        }
        fs::rename(from, to).unwrap();
        Outcome::Fail(errno)
    })
}

fn is_manifest(from: &Path) -> bool {
    from.file_name().unwrap().to_str().unwrap().starts_with("manifest.json")
}

#[test]
fn save_whose_commit_was_not_answered_is_committed() {
    for way in WAYS {
        for errno in [EIO, ENOENT] {
            let root = scratch();
            let place = Place::with_step_1(way, root.path());
            let losing = lose(errno, |_, from| is_manifest(from));
            place.save(2).unwrap();
            drop(losing);
            place.assert_whole(2);
        }
    }
}

#[test]
fn save_with_any_unanswered_rename_leaves_old_or_new() {
    for way in WAYS {
        for n in 1.. {
            let root = scratch();
            let place = Place::with_step_1(way, root.path());
            let (lost, has_lost) = std::sync::mpsc::channel();
            let losing = lose(EIO, move |number, _| number == n && lost.send(()).is_ok());
            let done = place.save(2);
            drop(losing);
            let found = step_with(place.config(), &place.dir());
            assert_eq!(found, if done.is_ok() { 2 } else { 1 }, "{way:?}, rename {n}: {done:?}");
            place.assert_whole(found);
            if has_lost.recv().is_err() {
                assert!(n > 2, "{way:?}: {n} renames");
                break;
            }
        }
    }
}

/// The rename fails, with effect or without, and then no manifest can be read.
#[test]
fn save_that_cannot_know_whether_it_is_committed_keeps_the_files_of_both() {
    for way in WAYS {
        for takes_effect in [true, false] {
            let root = scratch();
            let place = Place::with_step_1(way, root.path());
            let mut failed = false;
            let blind = on_thread(move |_, call, on| {
                match (call, failed) {
                    (Call::Rename, _) if is_manifest(on) => failed = true,
                    (Call::Read | Call::Open | Call::Look, true) => return Outcome::Fail(EIO),
                    _ => return Outcome::Pass,
                }
                if takes_effect {
                    fs::rename(on, renamed(on).unwrap()).unwrap();
                }
                Outcome::Fail(EIO)
            });
            let error = place.save(2).unwrap_err();
            drop(blind);
            assert_says(
                &error,
                &["manifest.json", "either checkpoint may be committed", "save again"],
            );
            let found = step_with(place.config(), &place.dir());
            assert_eq!(found, if takes_effect { 2 } else { 1 }, "{way:?}");
            place.assert_whole(found);
        }
    }
}

#[test]
fn removal_that_was_not_answered_is_carried_out() {
    for way in WAYS {
        let root = scratch();
        let place = Place::with_step_1(way, root.path());
        let losing = lose(ENOENT, |_, from| is_manifest(from));
        place.remove().unwrap();
        drop(losing);
        place.assert_nothing_left(&[place.dir()], "a lost answer");
    }
}

#[test]
fn export_with_any_unanswered_rename_is_whole() {
    let store = Store::new(Config { shard_bytes: 20_000, ..small_config() }).unwrap();
    let state = State::new(1, &SIZES);
    let mut model = StateDict::new();
    for (name, data) in &state.tensors {
        model.bytes(name, Dtype::U8, &[data.len() as u64], data).unwrap();
    }
    let root = scratch();
    let (whole, lost) = (root.path().join("whole"), root.path().join("lost"));
    store.export(&model, &whole).unwrap();
    let losing = lose(ENOENT, |_, _| true);
    store.export(&model, &lost).unwrap();
    assert_eq!(losing.take_paths(Call::Rename).len(), names_in(&whole).len());
    assert_eq!(names_in(&lost), names_in(&whole));
    assert_eq!(Checkpoint::open_foreign(&lost).unwrap().tensors().len(), SIZES.len());
}
