//! Removing checkpoints: whole or not at all, as they came.
//!
//! The manifest is renamed first, and that made durable: from then on there is no checkpoint, and what
//! is left of it is cleared away like what a killed save leaves. Its shards are removed, or kept as
//! [spare files](crate::store::layout::recycled) for a later save to write over. Of a whole that ranks saved each by itself,
//! every part's manifest is renamed before the first shard goes.

use crate::config::Config;
use crate::error::{Error, Result, some_of};
use crate::format::{Manifest, names};
use crate::store::cleanup::sweep::{Swept, sweep, sweep_keeping};
use crate::store::layout::recycled::Spares;
use crate::store::layout::stripes::Places;
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::{dcp_mark, diagnose};
use crate::sys::dir;
use crate::sys::dir::remove;
use crate::sys::file::make_room_for;
use crate::sys::lock::DirLock;
use serde::Serialize;
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

impl Disposal {
    /// What [`Config::recycle`] asks for: by default, that they are removed.
    pub fn of(config: &Config) -> Self {
        if config.recycle { Self::Recycle } else { Self::Remove }
    }
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

/// Removes the checkpoint at `dir`: after a crash it is there as it was, or not at all. A load that has
/// begun ends well. One whose ranks saved each by itself goes with all its parts: when the first of them has gone,
/// it is incomplete, and another call finishes it. Companions of a striped one are looked for in the configuration's
/// `stripe`.
///
/// # Errors
/// [`Error::NoCheckpoint`] or [`Error::NotCommitted`] if there is none; [`Error::MissingFiles`] if files of a striped one are not found, or may not be, which would
/// stay when it goes; [`Error::Busy`] if a save into the directory is under way; [`Error::Invalid`] for a link;
/// those of [`Checkpoint::open`](crate::store::Checkpoint::open) for one whose manifest cannot be read, so that
/// nobody can tell what belongs to it; [`Error::Io`].
pub fn retire(dir: &Path, disposal: Disposal, config: &Config) -> Result<Retired> {
    refuse_link(dir)?;
    match rank_dirs::parts(dir)? {
        parts if parts.is_empty() => retire_one(dir, disposal, config),
        parts => retire_parts(dir, &parts, config),
    }
}

/// A link may be what another program goes by: it would lead to a directory that is no checkpoint any more.
fn refuse_link(dir: &Path) -> Result<()> {
    let itself: PathBuf = dir.components().collect(); // `latest/` would be where it leads to
    if !dir::is_link(&itself) {
        return Ok(());
    }
    let to = dir::try_real(&itself).map_err(|e| Error::io("following the link", &itself, e))?;
    Err(Error::invalid(format!(
        "{} is a link to {}: name that, to remove that checkpoint; the link is yours to change or remove",
        itself.display(),
        to.display()
    )))
}

fn retire_one(dir: &Path, disposal: Disposal, config: &Config) -> Result<Retired> {
    let _lock = DirLock::take(dir)?;
    let places = Places::to_sweep(dir, &config.stripe);
    check_found(&places)?;
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
pub(in crate::store) fn lock_parts(parts: &[PathBuf]) -> Result<Vec<DirLock>> {
    make_room_for(parts.len()); // a lock is an open file
    parts.iter().map(|part| DirLock::take(part)).collect()
}

/// Removes a whole, or what a removal that was killed left of it, and says which files. The caller holds the
/// locks of its parts.
///
/// # Errors
/// Those of [`check_parts`], before anything is done; [`Error::Io`].
pub(in crate::store) fn remove_parts(
    dir: &Path,
    parts: &[PathBuf],
    stripe: &[PathBuf],
) -> Result<Vec<PathBuf>> {
    check_parts(dir, parts, stripe)?.into_iter().try_for_each(take_down)?;
    // Of those that an earlier call took down, perhaps before that was durable.
    parts.iter().filter(|part| is_retired(part)).try_for_each(|part| dir::sync(part))?;
    // Those of a rank that saved over its own part. While a part is there that says that all is to go: with
    // the last of them, nobody would find them again.
    let mut removed = Spares::under(dir).clear_but(std::iter::empty())?;
    for part in parts {
        removed.extend(sweep(&Places::to_sweep(part, stripe), None)?.removed);
        remove_if_empty(part)?;
    }
    for part in rank_dirs::dirs(dir)? {
        // An earlier call was killed when it had emptied this one. Locked: somebody may be about to save.
        if let Ok(_lock) = DirLock::take(&part) {
            remove_if_empty(&part)?;
        }
    }
    // Not if somebody is about to save into it.
    if let Ok(_lock) = DirLock::take(dir) {
        remove_if_empty(dir)?;
    }
    Ok(removed)
}

/// Whether a checkpoint, or a whole of these parts, would go with all its files.
///
/// # Errors
/// As for [`retire`], before anything is done.
pub(in crate::store) fn check(dir: &Path, parts: &[PathBuf], stripe: &[PathBuf]) -> Result<()> {
    match parts {
        [] => check_found(&Places::to_sweep(dir, stripe)),
        parts => check_parts(dir, parts, stripe).map(drop),
    }
}

/// Whether nobody saves to a checkpoint, or to a whole of these parts, or removes it.
///
/// # Errors
/// [`Error::Busy`]; [`Error::Io`].
pub(in crate::store) fn check_free(dir: &Path, parts: &[PathBuf]) -> Result<()> {
    match parts {
        [] => DirLock::take(dir).map(drop),
        parts => lock_parts(parts).map(drop),
    }
}

/// [`check`] of a whole; gives those of its parts that are committed.
///
/// # Errors
/// Those of [`rank_dirs::committed`]; [`Error::MissingFiles`] if files are not found.
pub(in crate::store) fn check_parts<'a>(
    dir: &Path,
    parts: &'a [PathBuf],
    stripe: &[PathBuf],
) -> Result<Vec<&'a Path>> {
    let committed = rank_dirs::committed(dir, parts)?;
    parts.iter().try_for_each(|part| check_found(&Places::to_sweep(part, stripe)))?;
    Ok(committed)
}

/// Whether all files of a striped checkpoint are found: without its manifest, nobody would know whose those
/// are that stay on other disks. Of any other checkpoint, what is not here is nowhere.
fn check_found(places: &Places) -> Result<()> {
    let Some(manifest) = manifest::read(places.own())? else { return check_remains(places) };
    let is_found = |name: &str| places.find(name).or_else(|| places.find(&names::part(name)));
    let files = manifest.files.iter().map(|file| &file.name);
    let missing: Vec<String> = files.filter(|name| is_found(name).is_none()).cloned().collect();
    if missing.is_empty() || manifest.stripes.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "{} of {} files that its manifest lists are not found, and would stay on their disks if it were \
         removed: {}; {}",
        missing.len(),
        manifest.files.len(),
        some_of(&missing),
        how_to_find(places, &manifest)
    );
    Err(Error::MissingFiles { path: places.own().into(), reason })
}

/// Whether all directories are known over which a checkpoint was striped whose removal was killed. Which files are
/// gone already, nobody knows; when its last trace goes, nobody finds those on other disks any more. Of anything
/// else, there is nothing to say.
pub(in crate::store) fn check_remains(places: &Places) -> Result<()> {
    // One that is damaged leads nowhere.
    let Some(Some(manifest)) = manifest::read_retired(places.own()) else { return Ok(()) };
    let unseen = places.unseen(&manifest.stripes);
    if unseen.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "its removal was killed, and files of it may still lie in {}, where they would stay for ever: {}",
        some_of(&unseen),
        how_to_find(places, &manifest)
    );
    Err(Error::MissingFiles { path: places.own().into(), reason })
}

/// What to do about files on other disks.
fn how_to_find(places: &Places, manifest: &Manifest) -> String {
    let here = match places.left_out() {
        [] => String::new(),
        why => format!(" (here, {})", why.join("; ")),
    };
    format!(
        "it was striped over {}{here}: set `stripe` (Config.stripe, RINGSTOW_STRIPE or ringstow.toml) to where \
         these directories are now or, if those files are lost, remove the directory yourself",
        some_of(&manifest.stripes)
    )
}

fn recycle(places: &Places) -> Result<Swept> {
    let spares: Vec<Spares> =
        places.there()?.into_iter().map(Spares::beside).collect::<Result<_>>()?;
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
    match manifest::read(dir)? {
        Some(_) => {}
        // An earlier call was killed, perhaps before this was durable.
        None if is_retired(dir) => return dir::sync(dir),
        None => return Err(diagnose::no_manifest(dir)),
    }
    remove_mark(dir)?;
    dir::rename(&dir.join(names::MANIFEST), &dir.join(names::RETIRED))?;
    dir::sync(dir)
}

/// Before the manifest: programs that go by the mark are to find no checkpoint that is none.
fn remove_mark(dir: &Path) -> Result<()> {
    if dcp_mark::is_ours(dir) { remove(&dir.join(names::DCP_MARK)) } else { Ok(()) }
}

pub(in crate::store) fn is_retired(dir: &Path) -> bool {
    dir::has(&dir.join(names::RETIRED))
}

/// Whether nothing is left of a checkpoint, but others' files.
pub(in crate::store) fn is_gone(dir: &Path) -> bool {
    let is_there = |name| dir::has(&dir.join(name));
    let parts = || rank_dirs::parts(dir).is_ok_and(|parts| !parts.is_empty());
    !is_there(names::MANIFEST) && !is_there(names::RETIRED) && !parts()
}

fn remove_if_empty(dir: &Path) -> Result<()> {
    let parent = dir::real(dir).ok().and_then(|dir| dir.parent().map(Path::to_path_buf));
    match (dir::remove_if_empty(dir), parent) {
        (true, Some(parent)) => dir::sync(&parent),
        // Others' files are in it.
        _ => Ok(()),
    }
}
