//! Removes a checkpoint, entirely or not at all.
//!
//! The removal first renames the manifest and syncs the directory. From then on there is no checkpoint, and its files
//! are cleared up like those of a killed save. Its shards are removed, or [recycled](crate::store::layout::recycled)
//! for a later save to write over. If the checkpoint consists of rank checkpoints, all their manifests are renamed
//! before the first shard is removed.

use crate::config::Config;
use crate::error::{Error, Result, some_of};
use crate::format::manifest::Listed;
use crate::format::names;
use crate::object::is_url;
use crate::store::cleanup::objects::remove_object;
use crate::store::layout::recycled::RecycledFiles;
use crate::store::layout::stripes::Stripes;
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::{dcp_mark, diagnose};
use crate::store::write::leftovers::Leftovers;
use crate::store::write::scope::Scope;
use crate::store::write::swept::{Left, Swept};
use crate::sys::dir::{self, remove};
use crate::sys::lock::{self, DirLock};
use crate::sys::open_dir::{Dir, refuse_link};
use crate::sys::removal_note;
use crate::sys::rlimit::make_room_for;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What happens to the shards of a removed checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposal {
    /// Keep them as recycled files in `.ringstow-spares` beside the checkpoint. The next save into a directory there
    /// writes over them, which is faster than new files. Shards with hard links, on copy-on-write or network file
    /// systems, or in rank checkpoints are removed instead.
    Recycle,
    /// Remove them.
    Remove,
}

impl Disposal {
    /// The choice of [`Config::recycle`].
    pub fn of(config: &Config) -> Self {
        if config.recycle { Self::Recycle } else { Self::Remove }
    }
}

/// A checkpoint that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Its directory, which stays if other programs' files are in it.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// How many shards became recycled files.
    pub recycled: usize,
    /// Files that were removed.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// What stays although nothing else is in it, and why: the directory if the system refuses to remove it, and stripe
    /// directories that a save from elsewhere may be about to use.
    pub left: Vec<Left>,
}

impl Removed {
    fn of(dir: &Path, swept: Swept) -> Self {
        let Swept { removed, kept, left, .. } = swept;
        Self { path: dir.into(), recycled: kept.len(), removed, left }
    }
}

/// See [`remove`](crate::remove()).
pub fn remove_checkpoint(dir: &Path, disposal: Disposal, config: &Config) -> Result<Removed> {
    if is_url(dir) {
        return Ok(Removed::of(dir, remove_object(dir)?));
    }
    refuse_link(dir)?;
    let removed = Dir::open_real(dir).and_then(|dir| remove_all(&dir, disposal, config));
    removed.map_err(|error| explained(dir, error))
}

/// Says why a checkpoint whose manifest cannot be read is not removed, and what to do.
fn explained(dir: &Path, error: Error) -> Error {
    let path = match &error {
        Error::Corrupt { path, .. } => path,
        Error::Io { path, .. } if error.is_damage() => path,
        _ => return error,
    };
    if let Some(not_ringstows) = diagnose::not_ringstows(dir) {
        return not_ringstows;
    }
    // Of a rank checkpoint, it is that one's.
    let holder = path.parent().filter(|_| path.ends_with(names::MANIFEST));
    match holder.map(manifest::refuse_foreign) {
        Some(Ok(())) => error.removed_by_hand(),
        _ => error, // another program's: nobody knows what else in the directory is
    }
}

fn remove_all(open: &Arc<Dir>, disposal: Disposal, config: &Config) -> Result<Removed> {
    let dir = open.path();
    if removal_note::is_left_empty(dir) {
        let left = remove_if_empty(open, None).into_iter().collect();
        return Ok(Removed::of(dir, Swept { left, ..Swept::default() }));
    }
    match rank_dirs::parts(dir)? {
        parts if parts.is_empty() => remove_one(open, disposal, config),
        parts => {
            let locks = lock_parts(open, &parts, DirLock::take_open)?;
            let mut swept = Swept::default();
            remove_parts(open, &parts, (locks, false), &config.stripe, &mut swept)?;
            Ok(Removed::of(dir, swept))
        }
    }
}

fn remove_one(open: &Arc<Dir>, disposal: Disposal, config: &Config) -> Result<Removed> {
    let (dir, lock) = (open.path(), DirLock::take_open(open)?);
    let begun = found(dir, &config.stripe).and_then(|stripes| {
        let scope = Scope::of_removal(&lock, &stripes)?;
        uncommit(open).map(|()| (stripes, scope))
    });
    let (stripes, scope) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            lock.withdraw(); // it may be no checkpoint, but another program's directory
            return Err(error);
        }
    };
    let leftovers = retired(&stripes, open, scope)?;
    let mut swept = match disposal {
        Disposal::Recycle => recycle(&stripes.opened(open)?, leftovers),
        Disposal::Remove => leftovers.clear(),
    }?;
    swept.left.extend(remove_if_empty(open, Some(lock)));
    Ok(Removed::of(dir, swept))
}

/// Locks all rank checkpoints of a checkpoint: with [`DirLock::take_open`], or [`DirLock::take_to_look`] for a process that
/// will change nothing.
///
/// # Errors
/// [`Error::Busy`] if a rank is saving; [`Error::Io`].
pub(in crate::store) fn lock_parts(
    dir: &Arc<Dir>,
    parts: &[PathBuf],
    take: impl Fn(&Arc<Dir>) -> Result<DirLock>,
) -> Result<Vec<DirLock>> {
    make_room_for(2 * parts.len()); // a lock is an open directory, and a file where hosts share
    parts.iter().map(|part| dir.open_in(part).and_then(|part| take(&part))).collect()
}

/// Removes a checkpoint that consists of rank checkpoints, or what a killed removal left of it. `locks` are
/// those of `parts`. If the caller knows that it is `alone`, what killed saves left there goes too, whomever the locks
/// keep out. Adds to `done` each thing that is done.
///
/// # Errors
/// Those of [`check_parts`], before any change; [`Error::Io`].
pub(in crate::store) fn remove_parts(
    open: &Arc<Dir>,
    parts: &[PathBuf],
    (locks, alone): (Vec<DirLock>, bool),
    stripe: &[PathBuf],
    done: &mut Swept,
) -> Result<()> {
    let dir = open.path();
    let stripes = parts.iter().map(|part| Stripes::to_clear(part, stripe));
    let stripes: Vec<Stripes> = stripes.collect::<Result<_>>()?;
    let scope = |(lock, stripes)| match alone {
        true => Ok(Scope::Everything),
        false => Scope::of_removal(lock, stripes),
    };
    let scopes: Vec<Scope> = locks.iter().zip(&stripes).map(scope).collect::<Result<_>>()?;
    let committed = check_parts(dir, parts, stripe)?;
    let open_parts: Vec<Arc<Dir>> = locks.iter().map(|lock| Arc::clone(lock.dir())).collect();
    let is_committed = |part: &&Arc<Dir>| committed.contains(&part.path());
    open_parts.iter().filter(is_committed).try_for_each(|part| uncommit(part))?;
    // An earlier call may have been killed before its rename was durable.
    let going = open_parts.iter().filter(|part| is_being_removed(part.path()));
    going.into_iter().try_for_each(|part| part.sync())?;
    // Remove the recycled files of ranks that saved over their own checkpoints first: once the last rank checkpoint
    // is gone, nothing marks them for removal.
    RecycledFiles::inside(open).clear_but(std::iter::empty(), &mut done.removed)?;
    removal_note::note(open);
    for (((part, lock), stripes), scope) in open_parts.iter().zip(locks).zip(stripes).zip(scopes) {
        retired(&stripes, part, scope)?.carry_out(done)?;
        done.left.extend(remove_if_empty(part, Some(lock)));
    }
    for part in rank_dirs::dirs(dir)? {
        // A killed call may have emptied this one.
        if !parts.contains(&part) {
            match open.open_in(&part) {
                Err(error) if error.is_not_found() => {}
                part => done.left.extend(remove_if_empty(&part?, None)),
            }
        }
    }
    done.left.extend(remove_if_empty(open, None));
    Ok(())
}

/// Checks that removing a checkpoint, or these rank checkpoints, would remove all its files.
///
/// # Errors
/// As for [`remove_checkpoint`].
pub(in crate::store) fn check(dir: &Path, parts: &[PathBuf], stripe: &[PathBuf]) -> Result<()> {
    match parts {
        [] => found(dir, stripe).map(drop),
        parts => check_parts(dir, parts, stripe).map(drop),
    }
}

/// Checks that no process is saving to a checkpoint, or to these rank checkpoints, or removing it. Changes nothing.
///
/// # Errors
/// [`Error::Busy`]; [`Error::Io`].
pub(in crate::store) fn check_free(dir: &Path, parts: &[PathBuf]) -> Result<()> {
    let dir = Dir::open_real(dir)?;
    match parts {
        [] => DirLock::take_to_look(&dir).map(drop),
        parts => lock_parts(&dir, parts, DirLock::take_to_look).map(drop),
    }
}

/// Like [`check`], for rank checkpoints. Returns the committed ones.
///
/// # Errors
/// Those of [`rank_dirs::committed`]; [`Error::MissingFiles`] if files are not found.
pub(in crate::store) fn check_parts<'a>(
    dir: &Path,
    parts: &'a [PathBuf],
    stripe: &[PathBuf],
) -> Result<Vec<&'a Path>> {
    let committed = rank_dirs::committed(dir, parts)?;
    parts.iter().try_for_each(|part| found(part, stripe).map(drop))?;
    Ok(committed)
}

/// The directories of a checkpoint, in which all its files are found.
fn found(dir: &Path, stripe: &[PathBuf]) -> Result<Stripes> {
    let stripes = Stripes::to_clear(dir, stripe)?;
    check_found(&stripes)?;
    Ok(stripes)
}

/// Checks that all files of a striped checkpoint are found: without its manifest, nothing would identify the files that
/// stay on other disks. A checkpoint that is not striped has all its files in its directory.
fn check_found(stripes: &Stripes) -> Result<()> {
    let Some(listed) = manifest::read_names(stripes.own())? else { return check_remains(stripes) };
    if listed.stripes.is_empty() {
        return Ok(());
    }
    let mut missing = Vec::new();
    for file in &listed.files {
        let is_found = stripes.find(&file.name)?.is_some()
            || stripes.find(&names::uncommitted(&file.name))?.is_some();
        missing.extend((!is_found).then(|| file.name.clone()));
    }
    if missing.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "{} of {} files that its manifest lists are not found, so a removal would leave them on their disks: \
         {}; {}",
        missing.len(),
        listed.files.len(),
        some_of(&missing),
        how_to_find(stripes, &listed)
    );
    Err(Error::MissingFiles { path: stripes.own().into(), reason })
}

/// Checks, for a checkpoint whose removal was killed, that all its stripe directories are configured. After its last
/// trace is removed, nothing would find its files on other disks. Accepts everything else.
pub(in crate::store) fn check_remains(stripes: &Stripes) -> Result<()> {
    // A damaged manifest names no directories.
    let Some(Some(listed)) = manifest::read_half_removed(stripes.own()) else { return Ok(()) };
    let unseen = stripes.unseen(&listed.stripes);
    if unseen.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "its removal was killed, and some of its files may still be in {}: {}",
        some_of(&unseen),
        how_to_find(stripes, &listed)
    );
    Err(Error::MissingFiles { path: stripes.own().into(), reason })
}

/// Says how to make files on other disks visible.
fn how_to_find(stripes: &Stripes, listed: &Listed) -> String {
    let here = match stripes.left_out() {
        [] => String::new(),
        why => format!(" (here, {})", why.join("; ")),
    };
    format!(
        "it was striped over {}{here}: set `stripe` (Config.stripe, RINGSTOW_STRIPE or ringstow.toml) to where \
         these directories are now or, if those files are lost, remove the directory yourself",
        some_of(&listed.stripes)
    )
}

/// What is left of a checkpoint whose manifest was renamed. If another host has committed since this process read the
/// manifest, that is the checkpoint that was removed: its files are those that the renamed manifest lists.
fn retired(stripes: &Stripes, own: &Arc<Dir>, mut scope: Scope) -> Result<Leftovers> {
    let listed = manifest::read_half_removed(stripes.own()).flatten();
    scope.retires(listed.as_ref().map(|listed| &*listed.files));
    let mut found = Leftovers::find(stripes, own, None, &scope)?;
    let mark = stripes.own().join(names::REMOVAL_MARK);
    if !scope.covers(&mark) && dir::has(&mark) {
        found.leave(mark, UNKNOWN_FILES);
    }
    Ok(found)
}

const UNKNOWN_FILES: &str = "it cannot be read, so nobody knows which files this removed checkpoint had, and no lock \
                             keeps out other hosts: if none saves there, run `ringstow prune --no-other-writers`";

fn recycle(dirs: &[Arc<Dir>], leftovers: Leftovers) -> Result<Swept> {
    // Find them first: clearing up may remove the directories beside them.
    let recycled: Vec<RecycledFiles> =
        dirs.iter().map(|dir| RecycledFiles::beside(dir)).collect::<Result<_>>()?;
    let mut swept = leftovers.recycle()?.clear()?;
    // No save would write over the recycled files of an earlier checkpoint with more ranks or shards.
    for files in recycled {
        let kept = swept.kept.iter().filter_map(|path| path.file_name()?.to_str());
        files.clear_but(kept, &mut swept.removed)?;
    }
    Ok(swept)
}

/// Renames the manifest and syncs the directory: from then on there is no checkpoint.
fn uncommit(open: &Dir) -> Result<()> {
    let dir = open.path();
    let [manifest, removed] = [names::MANIFEST, names::REMOVAL_MARK].map(|name| dir.join(name));
    match manifest::read_names(dir)? {
        Some(_) => {}
        // An earlier call may have been killed before its rename was durable.
        None if is_being_removed(dir) => return open.sync(),
        None => return Err(diagnose::no_manifest(dir)),
    }
    let is_marked = dcp_mark::is_ours(dir)?;
    open.check()?;
    if is_marked {
        remove_mark(open)?;
    }
    match dir::rename(open.at(&manifest), open.at(&removed)) {
        Err(error) if dir::has(open.at(&manifest)) || !dir::has(open.at(&removed)) => Err(error),
        // Done, even if the server of a network file system did it and its answer was lost.
        _ => open.sync(),
    }
}

/// Removes the DCP mark, for good, before the manifest is renamed: programs that take the mark for a checkpoint must not
/// find it without one, and a crash may undo a removal that was not synced, but keep the rename. If the rename fails after
/// that, ringstow still loads the checkpoint, and those programs pass over it.
fn remove_mark(dir: &Dir) -> Result<()> {
    remove(dir.at(&dir.path().join(names::DCP_MARK)))?;
    dir.sync()
}

pub(in crate::store) fn is_being_removed(dir: &Path) -> bool {
    dir::has(&dir.join(names::REMOVAL_MARK))
}

/// Whether no file of a checkpoint is left; false if the system does not say.
pub(in crate::store) fn is_gone(dir: &Path) -> bool {
    let is_gone = |name| dir::is_gone(&dir.join(name));
    let parts = || rank_dirs::parts(dir).map_or_else(|e| e.is_not_found(), |all| all.is_empty());
    is_gone(names::MANIFEST) && is_gone(names::REMOVAL_MARK) && parts()
}

/// Removes a directory if it is empty. Takes its lock, unless this process holds it: a save may be about to begin.
/// Returns it if it is empty and the system refuses to remove it. Does not sync: a directory that a crash brings back is
/// empty or has the removal mark, and `tests/image` finds nothing that breaks.
fn remove_if_empty(dir: &Arc<Dir>, held: Option<DirLock>) -> Option<Left> {
    // False: other programs' files are in it.
    let removed = held.map_or_else(|| lock::remove_if_empty(dir), DirLock::remove_dir);
    removed.err().map(|error| Left::emptied(dir.path(), &error))
}
