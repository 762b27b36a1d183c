//! Removing checkpoints: whole or not at all, as they came.
//!
//! The manifest is renamed first, and that made durable: from then on there is no checkpoint, and what
//! is left of it is cleared away like what a killed save leaves. Its shards are removed, or kept as
//! [spare files](super::spares) for a later save to write over. Of a whole that ranks saved each by itself,
//! every part's manifest is renamed before the first shard goes.

use super::dir::{self, remove};
use super::list::{Status, list_with};
use super::lock::DirLock;
use super::open::read_manifest;
use super::places::Places;
use super::ranks;
use super::spares::Spares;
use super::sweep::{Left, Swept, sweep, sweep_keeping};
use crate::config::Config;
use crate::engine::file::make_room_for;
use crate::error::{Error, Result};
use crate::format::names;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// What becomes of the shards of a checkpoint that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposal {
    /// They stay on the disk as spare files, in `.ringstow-spares` beside the checkpoint, and the next
    /// save into a directory there writes over them: that is faster than into new files. Where that
    /// cannot be (a file system that copies on write, or of another machine; a file with a hard link; a
    /// part of ranks that saved each by itself, whose next save looks elsewhere) they are removed.
    Recycle,
    /// They are removed.
    Remove,
}

/// A checkpoint that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Retired {
    /// Where it was. The directory is there still if others' files are in it.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Shards that are spare files now.
    pub recycled: usize,
    /// Files that are gone.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
}

/// What [`retain`] did, or would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Retained {
    /// Checkpoints that stay, by rising step.
    #[serde(with = "crate::path_text::list")]
    pub kept: Vec<PathBuf>,
    /// Checkpoints that were removed, by rising step.
    #[serde(with = "crate::path_text::list")]
    pub retired: Vec<PathBuf>,
    /// What was left alone, and why.
    pub left: Vec<Left>,
    /// Spare files of earlier calls that were removed, and their directory if nothing else was in it.
    #[serde(with = "crate::path_text::list")]
    pub spares: Vec<PathBuf>,
}

/// Removes the checkpoint at `dir`: after a crash it is there as it was, or not at all. A load that has
/// begun ends well. One whose ranks saved each by itself goes with all its parts: when the first of them has gone,
/// it is incomplete, and another call finishes it. Companions of a striped one are looked for in the `stripe` of the configuration that is
/// [found](Config::found).
///
/// # Errors
/// [`Error::Incomplete`] if there is none; [`Error::Busy`] if a save into the directory is under way;
/// those of [`Checkpoint::open`](super::Checkpoint::open) for one whose manifest cannot be read, so that
/// nobody can tell what belongs to it; [`Error::Io`]; what [`Config::found`] gives.
pub fn retire(dir: &Path, disposal: Disposal) -> Result<Retired> {
    retire_with(dir, disposal, &Config::found()?)
}

/// [`retire`] with a configuration of the caller's, of which `stripe` counts.
///
/// # Errors
/// As for [`retire`].
pub fn retire_with(dir: &Path, disposal: Disposal, config: &Config) -> Result<Retired> {
    match ranks::parts(dir)? {
        parts if parts.is_empty() => retire_one(dir, disposal, config),
        parts => retire_parts(dir, &parts, config),
    }
}

fn retire_one(dir: &Path, disposal: Disposal, config: &Config) -> Result<Retired> {
    let _lock = DirLock::take(dir)?;
    let places = Places::to_sweep(dir, &config.stripe);
    take_down(dir)?;
    let swept = match disposal {
        Disposal::Recycle => recycle(&places),
        Disposal::Remove => sweep(&places, None),
    }?;
    remove_if_empty(dir)?;
    Ok(Retired { path: dir.into(), recycled: swept.kept.len(), removed: swept.removed })
}

/// Removes a whole that ranks saved each by itself.
fn retire_parts(dir: &Path, parts: &[PathBuf], config: &Config) -> Result<Retired> {
    let _locks = lock_parts(parts)?;
    let removed = remove_parts(dir, parts, &config.stripe)?;
    Ok(Retired { path: dir.into(), recycled: 0, removed })
}

/// Locks all parts of a whole.
///
/// # Errors
/// [`Error::Busy`] if a rank is saving; [`Error::Io`].
pub(super) fn lock_parts(parts: &[PathBuf]) -> Result<Vec<DirLock>> {
    make_room_for(parts.len()); // a lock is an open file
    parts.iter().map(|part| DirLock::take(part)).collect()
}

/// Removes a whole, or what a removal that was killed left of it, and says which files. The caller holds the
/// locks of its parts.
///
/// # Errors
/// Those of [`ranks::committed`], before anything is done; [`Error::Io`].
pub(super) fn remove_parts(
    dir: &Path,
    parts: &[PathBuf],
    stripe: &[PathBuf],
) -> Result<Vec<PathBuf>> {
    let committed = ranks::committed(dir, parts)?;
    committed.into_iter().try_for_each(take_down)?;
    // Those of a rank that saved over its own part. While a part is there that says that all is to go: with
    // the last of them, nobody would find them again.
    let mut removed = Spares::under(dir).clear_but(std::iter::empty())?;
    for part in parts {
        removed.extend(sweep(&Places::to_sweep(part, stripe), None)?.removed);
        remove_if_empty(part)?;
    }
    for part in ranks::dirs(dir)? {
        // An earlier call was killed when it had emptied this one. Locked: somebody may be about to save.
        if let Ok(_lock) = DirLock::take(&part) {
            remove_if_empty(&part)?;
        }
    }
    remove_if_empty(dir)?;
    Ok(removed)
}

fn recycle(places: &Places) -> Result<Swept> {
    let spares: Vec<Spares> = places.there().map(Spares::beside).collect::<Result<_>>()?;
    let mut swept = sweep_keeping(places, None)?;
    // What an earlier checkpoint of more ranks or shards left would never be written over.
    for spares in spares {
        let kept = swept.kept.iter().filter_map(|path| path.file_name()?.to_str());
        swept.removed.extend(spares.clear_but(kept)?);
    }
    Ok(swept)
}

/// Takes the manifest away, durably: the end of the checkpoint.
fn take_down(dir: &Path) -> Result<()> {
    match read_manifest(dir) {
        // An earlier call was killed.
        Err(Error::Incomplete { .. }) if is_retired(dir) => return Ok(()),
        manifest => drop(manifest?),
    }
    remove_mark(dir)?;
    let manifest = dir.join(names::MANIFEST);
    fs::rename(&manifest, dir.join(names::RETIRED))
        .map_err(|e| Error::io("renaming", &manifest, e))?;
    dir::sync(dir)
}

/// Before the manifest: programs that go by the mark are to find no checkpoint that is none.
fn remove_mark(dir: &Path) -> Result<()> {
    let mark = dir.join(names::DCP_MARK);
    let is_ours = fs::read(&mark).is_ok_and(|bytes| {
        bytes.windows(names::DCP_MARK_WORDS.len()).any(|words| words == names::DCP_MARK_WORDS)
    });
    if is_ours { remove(&mark) } else { Ok(()) }
}

fn is_retired(dir: &Path) -> bool {
    fs::symlink_metadata(dir.join(names::RETIRED)).is_ok()
}

fn remove_if_empty(dir: &Path) -> Result<()> {
    let parent = fs::canonicalize(dir).ok().and_then(|dir| dir.parent().map(Path::to_path_buf));
    match (fs::remove_dir(dir), parent) {
        (Ok(()), Some(parent)) => dir::sync(&parent),
        // Others' files are in it.
        _ => Ok(()),
    }
}

/// Removes all checkpoints directly under `root` but the newest `keep` that can be loaded, in the order
/// of [`list`](super::list). What cannot be loaded is not counted, and is left alone, as are links. With
/// [`Disposal::Remove`], spare files of earlier calls go too.
///
/// # Errors
/// [`Error::Invalid`] for a `keep` of 0; [`Error::Io`] if a directory cannot be listed or a file not be
/// removed; what [`Config::found`] gives.
pub fn retain(root: &Path, keep: usize, disposal: Disposal) -> Result<Retained> {
    retain_with(root, keep, disposal, &Config::found()?)
}

/// [`retain`] with a configuration of the caller's, of which `stripe` counts.
///
/// # Errors
/// As for [`retain`].
pub fn retain_with(
    root: &Path,
    keep: usize,
    disposal: Disposal,
    config: &Config,
) -> Result<Retained> {
    let mut plan = retain_plan(root, keep, disposal, config)?;
    let mut retired = Vec::new();
    for path in std::mem::take(&mut plan.retired) {
        match retire_with(&path, disposal, config) {
            Err(error @ Error::Busy { .. }) => {
                plan.left.push(Left { path, reason: error.to_string() });
            }
            done => retired.push(done?.path),
        }
    }
    if disposal == Disposal::Remove {
        plan.spares = remove_spares(root, config)?;
    }
    Ok(Retained { retired, ..plan })
}

/// What [`retain_with`] would do now. Changes nothing.
///
/// # Errors
/// As for [`retain`].
pub fn retain_plan(
    root: &Path,
    keep: usize,
    disposal: Disposal,
    config: &Config,
) -> Result<Retained> {
    if keep == 0 {
        return Err(Error::invalid("keep = 0 would remove every checkpoint; keep at least 1"));
    }
    let mut plan = Retained::default();
    for found in list_with(root, config)? {
        let reason = match (none_of_the_row(&found.path), found.status) {
            (Some(reason), _) => reason.into(),
            (None, Status::Committed) => {
                plan.kept.push(found.path);
                continue;
            }
            _ if is_retired(&found.path) || ranks::removal_was_interrupted(&found.parts) => {
                plan.retired.push(found.path);
                continue;
            }
            _ => found.problem.unwrap_or_else(|| "it cannot be loaded".into()),
        };
        plan.left.push(Left { path: found.path, reason });
    }
    let old = plan.kept.len().saturating_sub(keep);
    plan.retired.extend(plan.kept.drain(..old));
    if disposal == Disposal::Remove {
        for root in roots(root, config) {
            plan.spares.extend(Spares::under(root).all_but(std::iter::empty())?);
        }
    }
    Ok(plan)
}

/// Why a directory is left alone, whatever lies in it; `None` if it may be one of a row of checkpoints.
fn none_of_the_row(path: &Path) -> Option<&'static str> {
    if fs::symlink_metadata(path).is_ok_and(|kind| kind.is_symlink()) {
        return Some("it is a link; what it leads to is looked at where that lies");
    }
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(names::is_rank_dir).then_some(
        "it is one rank's part of a checkpoint that ranks saved each by itself; remove that whole, \
         when a newer one is there",
    )
}

/// Removes the spare files beside the checkpoints in `root`, and in the configuration's `stripe`; says which.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_spares(root: &Path, config: &Config) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for root in roots(root, config) {
        removed.extend(Spares::under(root).clear_but(std::iter::empty())?);
    }
    Ok(removed)
}

/// The directories beside whose checkpoints, or parts of them, spare files may lie.
fn roots<'a>(root: &'a Path, config: &'a Config) -> impl Iterator<Item = &'a Path> {
    config.stripe.iter().map(PathBuf::as_path).chain([root])
}
