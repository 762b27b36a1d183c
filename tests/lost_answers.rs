//! A network file system may report the failure of a rename that took effect: the server's answer was lost, and the
//! request that repeats it finds nothing. A seam renames, and then reports a failure. `tests/each_call` loses the answer to
//! every call in turn; here are the outcomes that a lost rename must have.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

mod common;

use common::place::{Place, SIZES, WAYS};
use common::{State, assert_says, names_in, scratch, small_config, step_with};
use ringstow::internals::store;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, on_thread};
use ringstow::{Checkpoint, Config, Disposal, Store};
use std::path::Path;

const EIO: i32 = 5;
const ENOENT: i32 = 2;

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
                Outcome::Fail(nix::libc::ETIMEDOUT)
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
    assert_eq!(Checkpoint::open_foreign(&lost).unwrap().tensors().len(), SIZES.len());
}
