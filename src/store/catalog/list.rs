//! Finding checkpoints in a directory.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{Manifest, StepPattern, names};
use crate::object::{Bucket, is_url};
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::gone::{has_gone, may_lack_newest};
use crate::store::catalog::row::{Row, may_be_step};
use crate::store::catalog::shares;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::store::layout::summary::{self, Summary};
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::again::again;
use crate::store::read::checkpoint::{Checkpoint, OpenOptions};
use crate::store::read::dcp_mark;
use crate::store::read::diagnose::explain;
use crate::store::read::object::read_manifest;
use crate::store::read::shards::find_shards;
use crate::sys::dir::{entries, file_names, has, is_gone, is_link, is_there};
use std::collections::BTreeSet;
use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};

/// See [`Store::list`](crate::Store::list).
pub fn list(dir: &Path, config: &Config) -> Result<Vec<Found>> {
    Ok(survey(dir, None, config)?.1)
}

/// [`list`], and the row that numbers the steps.
pub(in crate::store) fn survey(
    dir: &Path,
    pattern: Option<&StepPattern>,
    config: &Config,
) -> Result<(Row, Vec<Found>)> {
    // A file in its place is said to be one; a missing directory is no checkpoint that was not saved.
    let mut all = look_again(dir, pattern, config).map_err(|error| match error.is_not_found() {
        true => error,
        false => explain(dir, error),
    })?;
    if let Some(own) = look(dir, config)? {
        // A save into the run's own directory must not hide the run's checkpoints.
        let may_be_step = |found: &Found| !names::is_never_a_step(&found.path);
        if all.iter().any(|found| found.status == Status::Committed && may_be_step(found)) {
            tracing::warn!("{}", why_ignored(dir, &own));
        } else {
            all = vec![own];
        }
    }
    let row = Row::of(&all, pattern);
    for found in &mut all {
        found.step = row.step(found);
        if found.path == dir {
            found.step = found.step.or(found.saved_step); // `dir` may be a link
        }
        found.order.step = found.step;
    }
    // What is no step comes first.
    all.sort_by(|a, b| {
        (a.step.is_some(), a.order, &a.path).cmp(&(b.step.is_some(), b.order, &b.path))
    });
    Ok((row, all))
}

/// What to do about a checkpoint, or what is left of one, in the directory that holds a run's.
fn why_ignored(dir: &Path, own: &Found) -> String {
    let (what, remedy) = match (own.status, own.created_unix_ms) {
        (Status::Committed, _) => {
            ("one", "`remove` it, which keeps those in it, or move its files")
        }
        (Status::Incomplete, None) => {
            ("what a save or removal left", "`prune` it, or move its files")
        }
        _ => ("what is left of one", "move its files"),
    };
    let dir = dir.display();
    format!("{dir} holds checkpoints and is {what} itself, which ringstow ignores: {remedy}")
}

/// The checkpoints in a directory, of one moment: another process may save and remove there. If one that may be the
/// newest goes before it is opened, looks again, until that changes nothing.
fn look_again(dir: &Path, pattern: Option<&StepPattern>, config: &Config) -> Result<Vec<Found>> {
    let mut before = None;
    let is_final = |looked: &Result<Looked>| {
        let looked = match looked {
            Ok(looked) => looked,
            // The first save has made the directory meanwhile.
            Err(error) => return !error.is_not_found() || is_url(dir) || !has(dir),
        };
        // What a killed removal left looks the same each time.
        let seen = looked.seen();
        !may_lack_newest(&looked.all, &looked.gone) || before.replace(seen.clone()) == Some(seen)
    };
    Ok(again(|| look_below(dir, pattern, config), is_final)?.all)
}

/// What one look into a directory has found.
#[derive(Default)]
struct Looked {
    all: Vec<Found>,
    /// Directories that were listed, and gone or about to go when they were looked into.
    gone: Vec<PathBuf>,
}

impl Looked {
    fn seen(&self) -> BTreeSet<(PathBuf, Option<u64>)> {
        let found = self.all.iter().map(|found| (found.path.clone(), found.created_unix_ms));
        found.chain(self.gone.iter().map(|path| (path.clone(), None))).collect()
    }
}

fn look_below(dir: &Path, pattern: Option<&StepPattern>, config: &Config) -> Result<Looked> {
    if is_url(dir) {
        return look_below_url(dir, config);
    }
    let Looked { mut all, mut gone } = Looked::default();
    for entry in entries(dir)? {
        let path = entry.path();
        // A manager's own links: the steps that they lead to are listed.
        if is_own_link(&path) {
            continue;
        }
        let looked = match is_there(&path) {
            Ok(true) => look(&path, config),
            Ok(false) => {
                gone.extend(Some(path).filter(|path| may_have_been_dir(&entry) && is_gone(path)));
                continue;
            }
            Err(error) if is_broken_link(&error) => continue,
            Err(error) => Err(error),
        };
        let is_whole =
            |found: &Option<Found>| found.as_ref().is_some_and(|f| f.status == Status::Committed);
        if !looked.as_ref().is_ok_and(is_whole) && has_gone(&path) {
            gone.push(path.clone());
            if is_gone(&path) {
                continue;
            }
        }
        match looked {
            Ok(found) => all.extend(found),
            // Another process removed it.
            Err(error) if error.is_not_found() => {}
            // Not ringstow's (`lost+found`).
            Err(error) if is_denied(&error) && !may_be_step(&path, pattern) => {
                tracing::warn!("skipping {}: {error}", path.display());
            }
            Err(error) => all.push(Found::unreadable(path, error)),
        }
    }
    Ok(Looked { all, gone })
}

fn may_have_been_dir(entry: &DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir())
}

fn is_own_link(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.starts_with(b".ringstow-") && is_link(path)
}

/// The checkpoints in a directory of an object store.
fn look_below_url(url: &Path, config: &Config) -> Result<Looked> {
    let mut looked = Looked::default();
    let dirs = Bucket::at(url)?.list().map_err(|error| Error::io("listing", url, error))?.dirs;
    for path in dirs.into_iter().map(|name| url.join(name)) {
        match look_at_url(&path, config)? {
            Some(found) => looked.all.push(found),
            // Nothing tells what is being copied there from what is being removed.
            None => looked.gone.push(path),
        }
    }
    Ok(looked)
}

/// The checkpoint of a URL. One whose manifest cannot be read for lack of a permission is an error, as for a directory.
fn look_at_url(url: &Path, config: &Config) -> Result<Option<Found>> {
    match OpenOptions::of(config).open(url) {
        Err(Error::NoCheckpoint { .. }) => Ok(None),
        Err(error) if error.io_error().is_some() => Err(error),
        opened => {
            let readable = match &opened {
                Ok(_) => None,
                Err(_) => read_manifest(&Bucket::at(url)?)?
                    .and_then(|bytes| Manifest::decode(bytes, &url.join(names::MANIFEST)).ok()),
            };
            Ok(Some(found(url, opened, readable)))
        }
    }
}

/// Whether a link leads in a circle, or to a name that no file system takes: it leads nowhere.
fn is_broken_link(error: &Error) -> bool {
    use nix::libc::{ELOOP, ENAMETOOLONG};
    let number = error.io_error().and_then(io::Error::raw_os_error);
    [Some(ELOOP), Some(ENAMETOOLONG)].contains(&number)
}

fn is_denied(error: &Error) -> bool {
    error.io_error().is_some_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
}

fn look(dir: &Path, config: &Config) -> Result<Option<Found>> {
    if is_url(dir) {
        return look_at_url(dir, config);
    }
    let parts = rank_dirs::parts(dir)?;
    if parts.is_empty() {
        look_at_one(dir, config)
    } else {
        look_at_parts(dir, parts, config).map(Some)
    }
}

/// The checkpoint that these rank checkpoints form.
fn look_at_parts(dir: &Path, parts: Vec<PathBuf>, config: &Config) -> Result<Found> {
    let mut found = Vec::with_capacity(parts.len());
    for part in &parts {
        found.extend(look_at_one(part, config)?);
    }
    if let Some(refusal) = found.iter_mut().find_map(|part| part.refusal.take()) {
        return Err(refusal);
    }
    let (status, problem) = shares::judge(dir, &found);
    let metrics = found.first().map(|part| part.metrics.clone()).unwrap_or_default();
    Ok(Found {
        path: dir.into(),
        status,
        problem,
        step: None,
        saved_step: found.iter().filter_map(|part| part.saved_step).max(),
        metrics,
        dropped: Vec::new(), // such a checkpoint cannot be slimmed
        saved_as: found.iter().find_map(|part| part.saved_as.clone()),
        created_unix_ms: found.iter().filter_map(|part| part.created_unix_ms).max(),
        order: found.iter().map(|part| part.order).max().unwrap_or_default(),
        tensors: found.iter().filter_map(|part| part.tensors).reduce(|sum, n| sum + n),
        file_bytes: found.iter().filter_map(|part| part.file_bytes).reduce(|sum, n| sum + n),
        part_of: None,
        parts,
        refusal: None,
    })
}

/// The checkpoint in a directory, ignoring rank checkpoints below it.
fn look_at_one(dir: &Path, config: &Config) -> Result<Option<Found>> {
    // A stripe directory belongs to a checkpoint elsewhere.
    if !file_names(dir)?.iter().any(|name| names::is_trace(name)) || stripe_owner(dir)?.is_some() {
        return Ok(None);
    }
    if let Some(found) = look_at_known(dir, config) {
        return Ok(Some(found));
    }
    let opened = match OpenOptions::of(config).open(dir) {
        // Another process removed or renamed it meanwhile. On NFS the error is ESTALE.
        Err(_) if matches!(is_there(dir), Ok(false)) => return Ok(None),
        Err(_) if manifest::is_another_programs(dir) => return Ok(None),
        Err(error) if is_refusal(&error) => {
            return Ok(Some(Found::unreadable(dir.into(), error)));
        }
        opened => opened,
    };
    // The manifest of a checkpoint that cannot be loaded may still be readable.
    let readable = if opened.is_err() { manifest::read(dir).ok().flatten() } else { None };
    if let Ok(checkpoint) = &opened {
        checkpoint.remember();
    }
    Ok(Some(found(dir, opened, readable)))
}

/// What [`look_at_one`] finds of a checkpoint that this process has read before, if nothing has changed.
fn look_at_known(dir: &Path, config: &Config) -> Option<Found> {
    let Summary { manifest, tensors } = &*summary::read_before(dir)?;
    dcp_mark::refuse_newer(dir).ok()?;
    let shards = find_shards(dir, &config.stripe, manifest).ok()?;
    shards
        .faults
        .is_empty()
        .then(|| found_with(dir, (Status::Committed, None), Some(manifest), Some(*tensors)))
}

/// What was found, opened or not; `readable` is the manifest of one that cannot be opened, if it can be read.
fn found(dir: &Path, opened: Result<Checkpoint>, readable: Option<Manifest>) -> Found {
    let manifest = opened.as_ref().map(Checkpoint::manifest).ok().or(readable.as_ref());
    let (status, problem) = match &opened {
        Ok(_) => (Status::Committed, None),
        Err(error) if error.is_incomplete() => (Status::Incomplete, Some(error.to_string())),
        Err(error) => (Status::Damaged, Some(error.to_string())),
    };
    found_with(dir, (status, problem), manifest, manifest.map(|m| m.tensors.len()))
}

fn found_with<T, S>(
    dir: &Path,
    (status, problem): (Status, Option<String>),
    manifest: Option<&Manifest<T, S>>,
    tensors: Option<usize>,
) -> Found {
    let of = |part: fn(&Manifest<T, S>) -> u64| manifest.map(part);
    let place = manifest.and_then(|m| m.place.as_ref());
    // A rank's share is in the directory that has the name.
    let named = if names::rank_of_dir(dir).is_some() { dir.parent().unwrap_or(dir) } else { dir };
    Found {
        path: dir.into(),
        status,
        problem,
        step: None,
        saved_step: manifest.and_then(|m| m.step),
        metrics: manifest.map(|m| m.metrics.clone()).unwrap_or_default(),
        dropped: manifest.map(|m| m.dropped.clone()).unwrap_or_default(),
        saved_as: place.filter(|place| !place.is_of(named)).map(|place| place.name.clone()),
        created_unix_ms: of(|m| m.created_unix_ms),
        order: manifest.map(|m| m.order(None)).unwrap_or_default(),
        tensors,
        file_bytes: of(|m| m.files.iter().map(|file| file.bytes).sum()),
        part_of: manifest.and_then(|m| m.part_of.clone()),
        parts: Vec::new(),
        refusal: None,
    }
}

/// Whether the system refused to read what is there: no permission, a failing disk, too many open files.
fn is_refusal(error: &Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    error.io_error().is_some_and(|cause| {
        cause.raw_os_error().is_some() && ![NotFound, NotADirectory].contains(&cause.kind())
    })
}
