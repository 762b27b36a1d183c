//! A network file system may report the failure of a rename that took effect: the server's answer was lost, and the
//! request that repeats it finds nothing. A seam renames, and then reports a failure. `tests/each_call` loses the answer to
//! every call in turn; here are the outcomes that a lost rename must have.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

use crate::common::place::{Place, SIZES, WAYS};
use crate::common::{State, assert_says, names_in, scratch, small_config, step_with, store};
use nix::libc::{EIO, ENOENT, ETIMEDOUT};
use ringstow::internals::store;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, on_thread};
use ringstow::{Config, Disposal, Dtype, OpenOptions, StateDict, Store};
use std::path::Path;

/// Loses the answers to renames that `loses` picks, by their number and path.
fn lose(errno: i32, mut loses: impl FnMut(usize, &Path) -> bool + Send + 'static) -> Watch {
    let mut count = 0;
    on_thread(move |_, call, from| {
        count += usize::from(call == Call::Rename);
        match call == Call::Rename && loses(count, from) {
            true => Outcome::FailLate(errno),
            false => Outcome::Pass,
        }
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
            place.assert_holds(2);
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
                if takes_effect { Outcome::FailLate(EIO) } else { Outcome::Fail(EIO) }
            });
            let error = place.save(2).unwrap_err();
            drop(blind);
            assert_says(
                &error,
                &["manifest.json", "either checkpoint may be committed", "save again"],
            );
            let found = step_with(place.config(), &place.dir());
            assert_eq!(found, if takes_effect { 2 } else { 1 }, "{way:?}");
            place.assert_holds(found);
        }
    }
}

/// Another program commits at the same moment, with the same generation, and removes the manifest that was to be renamed.
#[test]
fn save_does_not_take_a_manifest_of_another_program_for_its_own() {
    for only_new in [false, true] {
        let root = scratch();
        let [dir, other] = ["mine", "theirs"].map(|name| root.path().join(name));
        let save = |step: i64, to: &Path, only_new: bool| {
            let (bytes, mut state) = ([step as u8; 4], StateDict::new());
            state.value("step", step).bytes("t", Dtype::U8, &[4], &bytes).unwrap();
            if only_new {
                state.only_new();
            }
            store().save(&state, to)
        };
        save(1, &other, false).unwrap();
        let theirs = other.join("manifest.json");
        let interfering = on_thread(move |_, call, from| {
            if call == Call::Rename && is_manifest(from) {
                std::fs::rename(&theirs, from.with_file_name("manifest.json")).unwrap();
                std::fs::remove_file(from).unwrap();
                return Outcome::Fail(ENOENT);
            }
            Outcome::Pass
        });
        let error = save(2, &dir, only_new).unwrap_err();
        drop(interfering);
        assert_says(&error, &["manifest.json", "not this save's", "either checkpoint may be"]);
        // Without interference, an answer that is lost makes no difference.
        let losing = lose(EIO, |_, from| is_manifest(from));
        save(3, &root.path().join("new"), only_new).unwrap();
        drop(losing);
        assert_eq!(crate::common::step_at(&root.path().join("new")), 3);
    }
}

/// The server gets to a rename that its client has given up when the save clears up.
#[test]
fn save_whose_rename_is_made_later_keeps_the_files_of_both() {
    for way in WAYS {
        let root = scratch();
        let place = Place::with_step_1(way, root.path());
        let mut failed = false;
        let late = on_thread(move |_, call, on| match call {
            Call::Rename if is_manifest(on) => {
                failed = true;
                Outcome::Fail(ETIMEDOUT)
            }
            Call::Remove if failed && is_manifest(on) => {
                failed = false;
                std::fs::rename(on, on.with_file_name("manifest.json")).unwrap();
                Outcome::Pass
            }
            _ => Outcome::Pass,
        });
        let error = place.save(2).unwrap_err();
        drop(late);
        assert_says(&error, &["either checkpoint may be committed"]);
        place.assert_holds(2);
    }
}

#[test]
fn removal_that_was_not_answered_is_carried_out() {
    for way in WAYS {
        let root = scratch();
        let place = Place::with_step_1(way, root.path());
        let losing = lose(ENOENT, |_, from| is_manifest(from));
        let disposal = Disposal::of(place.config());
        store::remove_checkpoint(&place.dir(), disposal, place.config()).unwrap();
        drop(losing);
        assert!(!place.dir().exists(), "{way:?}");
    }
}

#[test]
fn export_with_any_unanswered_rename_is_whole() {
    let store = Store::new(Config { shard_bytes: 20_000, ..small_config() }).unwrap();
    let state = State::new(1, &SIZES);
    let model = state.model().unwrap();
    let root = scratch();
    let (whole, lost) = (root.path().join("whole"), root.path().join("lost"));
    store.export(&model, &whole).unwrap();
    let losing = lose(ENOENT, |_, _| true);
    store.export(&model, &lost).unwrap();
    assert_eq!(losing.take_paths(Call::Rename).len(), names_in(&whole).len());
    assert_eq!(names_in(&lost), names_in(&whole));
    assert_eq!(OpenOptions::new().foreign(true).open(&lost).unwrap().tensors().len(), SIZES.len());
}
