//! What holds after an operation, however it ended.

use crate::common::place::{Place, SIZES, Way};
use crate::common::{State, assert_no_litter_in, is_extra, load_opened, names_in};
use crate::operations::{MODEL, Operation, step_dir};
use ringstow::internals::format::names;
use ringstow::internals::store;
use ringstow::{Checkpoint, Error, LoadOptions, OpenOptions, Store, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How an operation ended.
#[derive(Debug)]
pub enum End {
    Done,
    Failed(Error),
    Died,
}

/// Committed checkpoints, each with the state that it holds.
type Found = BTreeMap<u32, i64>;

/// A reader that opened the checkpoints before the operation, and loads after it.
pub struct Reader(Vec<(i64, u32, Checkpoint)>);

impl Reader {
    pub fn open(place: &Place, operation: &Operation) -> Self {
        let open = |(number, state): &(u32, i64)| {
            (
                *state,
                *number,
                OpenOptions::of(place.config()).open(step_dir(place, *number)).unwrap(),
            )
        };
        Self(operation.before.iter().map(open).collect())
    }

    /// It gets what it opened, or an error if that is gone.
    fn check(&self, place: &Place, found: &Found, changes: bool) {
        for (state, number, checkpoint) in &self.0 {
            match load_opened(&place.runtime, checkpoint) {
                Ok(loaded) => State::new(*state, &SIZES).assert_equals(&loaded),
                Err(Error::Slimmed { .. }) if changes => {
                    let rest = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
                    let job = Default::default();
                    let options = LoadOptions::default().on(&place.runtime, &job);
                    let rest = rest.filter(|name| !is_extra(name));
                    let loaded = checkpoint.load_names(rest, options).unwrap();
                    State::new(*state, &SIZES).assert_equals(&loaded);
                }
                Err(error) => assert!(found.get(number) != Some(state), "open before: {error}"),
            }
        }
    }
}

/// Checks all promises. `is_alone` says that nothing else failed, and `prunes` that a clean-up comes before the next save.
pub fn check(
    place: &Place,
    operation: &Operation,
    end: &End,
    reader: &Reader,
    is_alone: bool,
    prunes: bool,
) {
    let found = committed(place);
    check_contents(operation, end, &found);
    check_latest(place, &found);
    reader.check(place, &found, operation.changes);
    let has_failed =
        matches!(end, End::Failed(error) if !matches!(error, Error::NotDurable { .. }));
    if is_alone && has_failed && !operation.partial {
        assert_eq!(
            strangers(place, &found),
            [] as [PathBuf; 0],
            "a failed operation leaves nothing"
        );
    }
    check_model(place, operation, end);
    if prunes {
        prune(place, &found);
    }
    let next = step_dir(place, operation.next);
    place.save_to(9, &next).unwrap();
    assert_no_litter_in(place.config(), &next);
    let mut then = found;
    then.insert(operation.next, 9);
    prune(place, &then);
    check_latest(place, &then);
    // A call that failed may be the one that notes which directories go once they are empty.
    if matches!(end, End::Died) {
        assert_eq!(empty_dirs(place), [] as [PathBuf; 0], "prune leaves no empty directory");
    }
}

/// A checkpoint that opens is whole, and is what was saved.
fn committed(place: &Place) -> Found {
    let state_at = |number: u32| {
        let dir = step_dir(place, number);
        match OpenOptions::of(place.config()).open(&dir) {
            Ok(checkpoint) => {
                let state = checkpoint
                    .state()
                    .unwrap()
                    .get("step")
                    .and_then(ringstow::Value::as_int)
                    .unwrap();
                State::new(state, &SIZES).assert_at(&place.runtime, &dir);
                Some((number, state))
            }
            Err(Error::NotCommitted { .. } | Error::NoCheckpoint { .. }) => None,
            Err(_) if !dir.exists() => None,
            Err(error) => panic!("half a checkpoint: {error}"),
        }
    };
    (1..=9).filter_map(state_at).collect()
}

fn check_contents(operation: &Operation, end: &End, found: &Found) {
    let [before, after] =
        [operation.before, operation.after].map(|all| all.iter().copied().collect::<Found>());
    for number in before.keys().chain(after.keys()) {
        let [found, before, after] = [found, &before, &after].map(|all| all.get(number));
        let is_right = match end {
            End::Done | End::Failed(Error::NotDurable { .. }) => found == after,
            End::Failed(_) if !operation.partial => found == before,
            _ => found == before || found == after,
        };
        assert!(
            is_right,
            "step-{number} holds {found:?}, before {before:?}, after {after:?}: {end:?}"
        );
    }
    let known = |number: &&u32| before.contains_key(number) || after.contains_key(number);
    assert!(found.keys().all(|number| known(&number)), "{found:?}");
}

fn check_latest(place: &Place, found: &Found) {
    let latest =
        Store::new(place.config().clone()).unwrap().latest(place.run(), &Wanted::default());
    let newest = found.keys().max().map(|number| step_dir(place, *number));
    assert_eq!(latest.unwrap(), newest);
}

fn prune(place: &Place, found: &Found) {
    let swept = store::prune(&place.run(), place.config()).unwrap();
    assert_eq!(&committed(place), found);
    assert_eq!(strangers(place, found), [] as [PathBuf; 0], "prune leaves nothing: {swept:?}");
}

/// Files that belong neither to these checkpoints nor to the recycled files.
fn strangers(place: &Place, found: &Found) -> Vec<PathBuf> {
    let mut known = BTreeSet::new();
    if place.way == Way::Recycled {
        known.extend(store::recycled(place.run(), place.config()).unwrap().paths);
    }
    for number in found.keys() {
        let dir = step_dir(place, *number);
        let stripe_dir = place.root.join("disk").join(dir.file_name().unwrap());
        let checkpoint = OpenOptions::of(place.config()).open(&dir).unwrap();
        for file in &checkpoint.manifest().files {
            known.extend([&dir, &stripe_dir].map(|dir| dir.join(&file.name)));
        }
        known.extend([dir.join(names::MANIFEST), stripe_dir.join(names::STRIPE_MARKER)]);
    }
    let mut all = Vec::new();
    ["run", "disk"].iter().for_each(|dir| files_below(&place.root.join(dir), &mut all));
    all.retain(|path| !known.contains(path));
    all
}

/// Directories that hold nothing, besides that of the recycled files.
fn empty_dirs(place: &Place) -> Vec<PathBuf> {
    let dirs = ["run", "disk"].map(|dir| place.root.join(dir));
    let below = dirs.iter().flat_map(|dir| names_in(dir).into_iter().map(|name| dir.join(name)));
    let is_empty = |path: &PathBuf| path.is_dir() && names_in(path).is_empty();
    below.filter(|path| is_empty(path) && !path.ends_with(names::RECYCLED_DIR)).collect()
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for name in names_in(dir) {
        let path = dir.join(name);
        if path.is_dir() { files_below(&path, found) } else { found.push(path) }
    }
}

/// A model is complete or refused; an export that failed leaves nothing, and the next one works.
fn check_model(place: &Place, operation: &Operation, end: &End) {
    if operation.name != "export" {
        return;
    }
    let to = place.root.join(MODEL);
    let is_whole = || {
        let checkpoint = OpenOptions::new().foreign(true).open(&to).ok()?;
        State::new(1, &SIZES).assert_equals(&load_opened(&place.runtime, &checkpoint).unwrap());
        Some(())
    };
    let whole = is_whole().is_some();
    match end {
        End::Done | End::Failed(Error::NotDurable { .. }) => assert!(whole),
        End::Failed(error) => assert!(!whole, "a failed export leaves a model: {error}"),
        End::Died => {}
    }
    if !whole {
        place.export_to(1, &to).unwrap();
    }
    is_whole().unwrap();
    assert!(!names_in(&to).iter().any(|name| name.ends_with(".part")), "{:?}", names_in(&to));
}
