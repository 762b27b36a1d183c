//! The directories of ranks that saved each by itself, without communication: a checkpoint in which each rank has a
//! directory such as `rank00003` with its share. No single rename commits such a checkpoint. It is complete if
//! every rank's share is committed and all are of the same save.

use crate::error::{Error, Result};
use crate::format::manifest::Listed;
use crate::format::names;
use crate::store::layout::manifest;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::sys::dir::{directories, entries, file_names, has, is_dir, is_same};
use std::path::{Path, PathBuf};

/// The directories in `dir` that have ranks' names, whatever they hold. Does not follow links.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub(in crate::store) fn dirs(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = directories(dir)?;
    found.retain(|path| names::rank_of_dir(path).is_some());
    Ok(found)
}

/// The directories in `dir` that hold a rank's share or what is left of one, by rank. Empty if `dir` is a checkpoint
/// itself or also holds others.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub(in crate::store) fn parts(dir: &Path) -> Result<Vec<PathBuf>> {
    let itself = [names::MANIFEST, names::REMOVAL_MARK, names::STRIPE_MARKER];
    if itself.iter().any(|name| has(&dir.join(name))) {
        return Ok(Vec::new());
    }
    let paths = entries(dir)?.into_iter().map(|entry| entry.path());
    let (mut parts, others): (Vec<PathBuf>, Vec<PathBuf>) =
        paths.filter(|path| is_dir(path)).partition(|path| names::rank_of_dir(path).is_some());
    // One that cannot be listed stays, so that whoever reads it gets the error; one that is gone does not.
    parts.retain(|path| holds_trace(path).unwrap_or_else(|error| !error.is_not_found()));
    // A directory of checkpoints, into which somebody saved by ranks once, stays one.
    if !parts.is_empty() && others.iter().any(|path| is_checkpoint(path, dir)) {
        return Ok(Vec::new());
    }
    parts.sort_by_key(|path| names::rank_of_dir(path));
    Ok(parts)
}

/// Whether a directory holds a checkpoint or ranks' shares. Looks no deeper, and not at a link back to `within`: links
/// may form circles.
fn is_checkpoint(path: &Path, within: &Path) -> bool {
    let holds_parts = || dirs(path).is_ok_and(|parts| parts.iter().any(|part| found_trace(part)));
    !is_same(path, within) && (found_trace(path) || holds_parts())
}

/// Whether a directory holds files of a checkpoint or of an unfinished save or removal.
fn holds_trace(dir: &Path) -> Result<bool> {
    let has_trace = file_names(dir)?.iter().any(|name| names::is_trace(name));
    Ok(has_trace && stripe_owner(dir)?.is_none())
}

/// [`holds_trace`], false for a directory that cannot be read.
fn found_trace(dir: &Path) -> bool {
    holds_trace(dir).unwrap_or(false)
}

/// Whether these shares are what a killed removal left. Shares of another save than those being removed are
/// somebody's data.
pub(in crate::store) fn removal_was_interrupted(parts: &[PathBuf]) -> bool {
    if !parts.iter().any(|part| has(&part.join(names::REMOVAL_MARK))) {
        return false;
    }
    let (mut removed, mut stay) = (Vec::new(), Vec::new());
    for part in parts {
        match manifest::read_files(part) {
            Ok(Some(listed)) => stay.push(save_of(&listed)),
            Ok(None) => {
                let read = manifest::read_half_removed(part);
                removed.extend(read.map(|listed| listed.as_ref().and_then(save_of)));
            }
            // Which save it belongs to is unknown.
            Err(_) => return false,
        }
    }
    let first = removed.first();
    first.is_some_and(|first| {
        stay.is_empty()
            || (first.is_some() && removed.iter().chain(&stay).all(|save| save == first))
    })
}

/// The committed ones of these shares.
///
/// # Errors
/// [`Error::NotCommitted`] if none is, nor being removed; those of [`manifest::read_files`] for a manifest that cannot
/// be read, so that its files are unknown.
pub(in crate::store) fn committed<'a>(dir: &Path, parts: &'a [PathBuf]) -> Result<Vec<&'a Path>> {
    let mut committed = Vec::new();
    for part in parts {
        if manifest::read_files(part)?.is_some() {
            committed.push(part.as_path());
        }
    }
    if committed.is_empty() && !removal_was_interrupted(parts) {
        let reason =
            "no rank's share is committed; `ringstow prune` on this directory removes what killed \
                      saves left"
                .into();
        return Err(Error::NotCommitted { path: dir.into(), reason });
    }
    Ok(committed)
}

fn save_of(listed: &Listed) -> Option<(u32, String)> {
    listed.part_of.as_ref().map(|of| (of.ranks, of.save.clone()))
}
