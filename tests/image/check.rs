//! What must be there after a loss of power.

use crate::common::place::{Place, SIZES, Way};
use crate::common::{State, below, load_all, load_opened};
use crate::scenario::{World, path, roots};
use ringstow::internals::format::names;
use ringstow::{Checkpoint, Error, OpenOptions, Status, Store, Value, Wanted};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A promise that was broken.
pub type Outcome = Result<(), String>;

fn said<T>(what: &str, result: ringstow::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

fn ensure(holds: bool, broken: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(broken()) }
}

/// The disk holds what was promised; afterwards everything works, and nothing is left over. `is_smooth`: no operation
/// had trouble, so that what is reported as saved has its final names.
pub fn check(place: &Place, world: &World, is_smooth: bool, prune_first: bool) -> Outcome {
    for (name, steps) in world {
        let found = found(place, name, steps)?;
        let is_marked = path(place, name).join(names::DCP_MARK).exists();
        ensure(found.is_some() || !is_marked, || format!("{name} has a mark and no checkpoint"))?;
        let as_promised = || format!("{name} holds step {found:?}, and should one of {steps:?}");
        ensure(steps.contains(&found), as_promised)?;
        if is_smooth && steps.len() == 1 && found.is_some() && !is_model(name) {
            let checkpoint = said(name, OpenOptions::of(place.config()).open(path(place, name)))?;
            let parts = files(place, name, &checkpoint).into_iter();
            let missing: Vec<PathBuf> =
                parts.filter(|shard| !shard.iter().any(|path| path.exists())).flatten().collect();
            ensure(missing.is_empty(), || {
                format!("{name} is saved, and lacks one of {missing:?}")
            })?;
        }
    }
    check_latest(place, world)?;
    if prune_first {
        check_pruned(place, world)?;
    }
    let next = BTreeSet::from([Some(NEXT)]);
    for name in world.keys() {
        said("the next save", save_again(place, name))?;
        let found = found(place, name, &next)?;
        ensure(found == Some(NEXT), || format!("{name} holds step {found:?} after the next save"))?;
    }
    check_pruned(place, world)
}

/// A step that no scenario saves.
const NEXT: i64 = 99;

fn is_model(name: &str) -> bool {
    name.starts_with("model")
}

fn save_again(place: &Place, name: &str) -> ringstow::Result<()> {
    let to = path(place, name);
    if !is_model(name) {
        return place.save_to(NEXT, &to);
    }
    // An export never replaces a model.
    if OpenOptions::new().foreign(true).open(&to).is_ok() {
        fs::remove_dir_all(&to).unwrap();
    }
    place.export_to(NEXT, &to)
}

/// The step that is committed under a name, of which every byte is right. A model does not say which it is: it must be
/// one of `steps`.
fn found(place: &Place, name: &str, steps: &BTreeSet<Option<i64>>) -> Result<Option<i64>, String> {
    let path = path(place, name);
    let opened = match is_model(name) {
        true => OpenOptions::new().foreign(true).open(&path),
        false => OpenOptions::of(place.config()).open(&path),
    };
    let checkpoint = match opened {
        Ok(checkpoint) => checkpoint,
        Err(
            Error::NoCheckpoint { .. } | Error::NotCommitted { .. } | Error::MissingShare { .. },
        ) => {
            return Ok(None);
        }
        // What an export writes has no manifest: without one of its files it is as if it were not there.
        Err(Error::MissingFiles { .. }) if is_model(name) => return Ok(None),
        Err(Error::Io { cause, .. }) if cause.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(error) => return Err(format!("{name}: {error}")),
    };
    if is_model(name) {
        let loaded = said(name, load_opened(&place.runtime, &checkpoint))?;
        let is_this = |step: &i64| State::new(*step, &SIZES).difference(&loaded).is_none();
        let step = steps.iter().copied().find(|step| step.as_ref().is_some_and(is_this));
        return step.ok_or_else(|| format!("{name} holds none of the steps {steps:?} whole"));
    }
    let state = said(name, checkpoint.state())?;
    let step = state.get("step").and_then(Value::as_int).ok_or("there is no step")?;
    let loaded = said(name, load_all(&place.runtime, &path))?;
    match State::new(step, &SIZES).difference(&loaded) {
        None => Ok(Some(step)),
        Some(difference) => Err(format!("{name}: {difference}")),
    }
}

/// The directories that hold checkpoints.
fn parents(place: &Place, world: &World) -> BTreeSet<PathBuf> {
    let checkpoints = world.keys().filter(|name| !is_model(name));
    let parents = checkpoints.filter_map(|name| Some(path(place, name).parent()?.to_path_buf()));
    parents.filter(|parent| parent.exists()).collect()
}

/// `latest` finds a checkpoint where there is one, and nothing is committed that nobody saved.
fn check_latest(place: &Place, world: &World) -> Outcome {
    let store = said("the store", Store::new(place.config().clone()))?;
    for parent in parents(place, world) {
        let listed = said("list", store.list(&parent))?;
        let committed: Vec<PathBuf> = listed
            .into_iter()
            .filter(|found| found.status == Status::Committed)
            .map(|found| found.path)
            .collect();
        let known = |found: &PathBuf| world.keys().any(|name| path(place, name) == *found);
        ensure(committed.iter().all(known), || format!("{committed:?} are committed"))?;
        let latest = said("latest", store.latest(&parent, &Wanted::default()))?;
        let right = match &latest {
            Some(latest) => committed.contains(latest),
            None => committed.is_empty(),
        };
        ensure(right, || format!("latest is {latest:?} of {committed:?}"))?;
    }
    Ok(())
}

/// A clean-up leaves only what belongs to a checkpoint that is there.
fn check_pruned(place: &Place, world: &World) -> Outcome {
    let store = said("the store", Store::new(place.config().clone()))?;
    let mut known = BTreeSet::new();
    for parent in parents(place, world) {
        let swept = said("prune", store.prune(&parent))?;
        ensure(swept.left.is_empty(), || format!("prune left {:?}", swept.left))?;
    }
    for name in world.keys() {
        let path = path(place, name);
        if is_model(name) {
            // An export that was killed leaves files for the next.
            known.extend(files_in(&path));
        } else if let Ok(checkpoint) = OpenOptions::of(place.config()).open(&path) {
            known.extend(files(place, name, &checkpoint).concat());
            known.extend([names::MANIFEST, names::DCP_MARK].map(|name| path.join(name)));
            known.insert(stripe(place, name).join(names::STRIPE_MARKER));
        }
    }
    let there: BTreeSet<PathBuf> = roots(place).iter().flat_map(|root| files_in(root)).collect();
    let recycled = |path: &&PathBuf| {
        place.way == Way::Recycled
            && path.components().any(|part| part.as_os_str() == ".ringstow-spares")
    };
    let left: Vec<_> = there.difference(&known).filter(|path| !recycled(path)).collect();
    ensure(left.is_empty(), || format!("after a clean-up {left:?} are left"))
}

/// Where each shard of a checkpoint may be.
fn files(place: &Place, name: &str, checkpoint: &Checkpoint) -> Vec<Vec<PathBuf>> {
    let dirs = [path(place, name), stripe(place, name)];
    let files = checkpoint.manifest().files.iter();
    files.map(|file| dirs.iter().map(|dir| dir.join(&file.name)).collect()).collect()
}

/// A checkpoint's directory on the second disk.
fn stripe(place: &Place, name: &str) -> PathBuf {
    roots(place)[1].join(Path::new(name).file_name().expect("a checkpoint has a name"))
}

/// The files below a directory, if there is one.
fn files_in(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let all = if dir.exists() { below(dir) } else { BTreeSet::new() };
    all.into_iter().filter(|path| !path.is_dir())
}
