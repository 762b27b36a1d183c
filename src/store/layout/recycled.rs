//! Files of checkpoints that are no more, kept to be written over: their blocks on the disk are there,
//! which spares a file system the allocation and its journal, and a disk of its own the like.
//!
//! They lie in one directory beside the checkpoints, `.ringstow-spares`, under the rank and number of
//! the shard that they were. A shard of the same rank and number is written over them, so there are
//! never more than one checkpoint has, and ranks do not have to agree on anything.
//!
//! Nobody's data is written over, because
//! - the checkpoint that listed the file is gone from the disk, durably, before the file is moved here;
//! - the move out of here is durable before the first byte is written ([`claim`] syncs the directory,
//!   and with it, on file systems with a journal, all moves before);
//! - the file has this one name (a hard link is somebody's copy), and nobody has it open, mapped or not, as
//!   the kernel says. Other hosts it does not know of, so only local file systems are taken.
//!
//! Nor may anybody read a checkpoint who could only read the one before: owner, mode and ACL of the file are those
//! that a new one gets.

use crate::config::Config;
use crate::engine::fallback::Fallback;
use crate::error::{Error, Result};
use crate::format::{FileEntry, names};
use crate::plan::save::Shard;
use crate::store::layout::stripes::Places;
use crate::sys::dir;
use crate::sys::dir::{directories, entries, file_names, remove, remove_if_empty};
use crate::sys::file;
use crate::sys::lease::is_sole_opener;
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The spare files beside a checkpoint.
#[derive(Debug)]
pub(in crate::store) struct Spares {
    dir: PathBuf,
}

/// What of a save is written over spare files.
#[derive(Debug, Default)]
pub(in crate::store) struct Claimed {
    /// The spare files that were moved, under the paths of the shards.
    pub files: HashSet<PathBuf>,
    /// Their bytes, as far as the shards go.
    pub bytes: u64,
    /// Why a spare file was not taken.
    pub refused: Option<Fallback>,
}

impl Spares {
    /// Those beside the checkpoint in `dir`, which exists.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn beside(dir: &Path) -> Result<Self> {
        // Its true parent: `dir` may be a link, or end in `..`.
        let dir = dir::real(dir)?;
        Ok(Self::under(dir.parent().unwrap_or(&dir)))
    }

    /// Those beside the checkpoints in `root`.
    pub fn under(root: &Path) -> Self {
        Self { dir: root.join(names::SPARES) }
    }

    /// Moves a shard here, in the place of an older spare file of its rank and number. Its checkpoint
    /// is gone from the disk. `false` if it is not fit for it, or not ringstow's, and stays where it is.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep(&self, shard: &Path) -> Result<bool> {
        let Some(spare) = shard.file_name().and_then(|name| names::spare(name.to_str()?)) else {
            return Ok(false);
        };
        let found = dir::look_at(shard).map_err(|e| Error::io("opening", shard, e))?;
        if !found.is_file() || found.nlink() != 1 || !dir::overwrites_in_place(shard) {
            return Ok(false);
        }
        dir::make(&self.dir)?;
        match dir::rename(shard, &self.dir.join(spare)) {
            // The checkpoint is a file system of its own.
            Err(Error::Io { cause, .. }) if cause.kind() == io::ErrorKind::CrossesDevices => {
                Ok(false)
            }
            // Another removal has just cleared the directory away.
            Err(error) if error.is_not_found() && dir::has(shard) => Ok(false),
            renamed => renamed.map(|()| true),
        }
    }

    /// Makes the moves to and from here durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        match dir::sync(&self.dir) {
            // Another retirement has cleared it away, since it was empty.
            Err(error) if error.is_not_found() => self.dir.parent().map_or(Ok(()), dir::sync),
            synced => synced,
        }
    }

    /// Moves the spare file for a shard to where that is about to be written.
    ///
    /// # Errors
    /// [`Error::Io`] if one that is not to be written over cannot be removed again.
    fn take(&self, name: &str, part: &Path) -> Result<Taken> {
        let Some(spare) = names::spare(name).map(|spare| self.dir.join(spare)) else {
            return Ok(Taken::Nothing);
        };
        if !dir::has(&spare) {
            return Ok(Taken::Nothing);
        }
        let new = file::create(part, false).and_then(|file| Access::of(&file));
        let new = new.map_err(|e| Error::io("creating", part, e))?;
        // Whoever moves it first has it. If it is missing or cannot be moved, the save creates a new file.
        if dir::rename(&spare, part).is_err() {
            return Ok(Taken::Nothing);
        }
        match check(part, &new) {
            Ok(bytes) => Ok(Taken::File { bytes }),
            Err(reason) => {
                remove(part)?;
                Ok(Taken::Refused(not_taken(&spare, &reason)))
            }
        }
    }

    /// All but those named after `shards`, and after them the directory if it holds nothing else.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn all_but<'a>(&self, shards: impl Iterator<Item = &'a str>) -> Result<Vec<PathBuf>> {
        // A link leads to something of somebody else's.
        if !dir::look_at(&self.dir).is_ok_and(|found| found.is_dir()) {
            return Ok(Vec::new());
        }
        let present = match file_names(&self.dir) {
            // Another retirement has cleared it away.
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            present => present?,
        };
        let stay: HashSet<String> = shards.filter_map(names::spare).collect();
        let goes = |name: &String| names::is_spare(name) && !stay.contains(name);
        let mut found: Vec<PathBuf> =
            present.iter().filter(|name| goes(name)).map(|name| self.dir.join(name)).collect();
        if entries(&self.dir).is_ok_and(|all| all.len() == found.len()) {
            found.push(self.dir.clone());
        }
        Ok(found)
    }

    /// Removes what [`Spares::all_but`] gives; says what went.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn clear_but<'a>(&self, shards: impl Iterator<Item = &'a str>) -> Result<Vec<PathBuf>> {
        let mut removed = self.all_but(shards)?;
        for path in removed.iter().filter(|path| **path != self.dir) {
            remove(path)?;
        }
        // Another retirement may have kept a file there in the meantime.
        if removed.last() == Some(&self.dir) && !remove_if_empty(&self.dir) {
            removed.pop();
        }
        Ok(removed)
    }
}

/// What there was for a shard.
enum Taken {
    Nothing,
    /// A file of so many bytes, now under the shard's name.
    File {
        bytes: u64,
    },
    /// One that is not to be written over, and was removed.
    Refused(Fallback),
}

/// Moves spare files to where shards are about to be written, each to its path of `parts` in the same
/// order. Where there is none, nothing is done.
///
/// # Errors
/// [`Error::Io`] where what was moved cannot be made durable, or be removed again.
pub(in crate::store) fn claim(
    places: &Places,
    shards: &[Shard],
    parts: &[PathBuf],
) -> Result<Claimed> {
    let mut claimed = Claimed::default();
    for dir in places.there()? {
        let (spares, mut any) = (Spares::beside(dir)?, false);
        let here = shards.iter().zip(parts).filter(|(_, part)| part.parent() == Some(dir));
        for (shard, part) in here {
            match spares.take(&shard.name, part)? {
                Taken::Nothing => continue,
                Taken::File { bytes } => {
                    claimed.bytes += bytes.min(shard.bytes);
                    claimed.files.insert(part.clone());
                }
                Taken::Refused(why) => drop(claimed.refused.get_or_insert(why)),
            }
            any = true;
        }
        if any {
            spares.sync()?;
        }
    }
    Ok(claimed)
}

/// The recycled files of a directory of checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Recycled {
    /// The files, and their directories that hold nothing else.
    #[serde(with = "crate::path_text::list")]
    pub paths: Vec<PathBuf>,
    /// What they take of their disks, in bytes.
    pub bytes: u64,
}

/// The recycled files in `root`, in the directories directly under it, and in the configuration's `stripe`: those
/// of removed checkpoints that wait to be written over.
///
/// # Errors
/// [`Error::Io`].
pub fn recycled(root: impl AsRef<Path>, config: &Config) -> Result<Recycled> {
    let paths = all_but_none(&everywhere(root.as_ref(), config)?)?;
    let bytes = paths.iter().map(|path| allocated(path)).sum();
    Ok(Recycled { paths, bytes })
}

/// Removes the [`recycled`] files; says which, and which of their directories went with them.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_recycled(root: impl AsRef<Path>, config: &Config) -> Result<Vec<PathBuf>> {
    clear(&everywhere(root.as_ref(), config)?)
}

/// Bytes that a file takes of its disk; none if a save has just taken it.
fn allocated(path: &Path) -> u64 {
    let file = dir::look_at(path).ok().filter(Metadata::is_file);
    file.map_or(0, |file| file.blocks() * 512)
}

/// Those beside the checkpoints in `root` themselves.
pub(in crate::store) fn beside_all(root: &Path, config: &Config) -> Vec<Spares> {
    config.stripe.iter().map(PathBuf::as_path).chain([root]).map(Spares::under).collect()
}

/// Also those beside the parts of checkpoints that ranks saved each by itself.
fn everywhere(root: &Path, config: &Config) -> Result<Vec<Spares>> {
    let below = match directories(root) {
        // It has just been cleared away.
        Err(error) if error.is_not_found() => Vec::new(),
        below => below?,
    };
    let mut all = beside_all(root, config);
    all.extend(below.iter().map(|dir| Spares::under(dir)));
    Ok(all)
}

/// All of these files, and their directories where nothing else is in them.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn all_but_none(all: &[Spares]) -> Result<Vec<PathBuf>> {
    let found: Result<Vec<_>> =
        all.iter().map(|spares| spares.all_but(std::iter::empty())).collect();
    Ok(found?.concat())
}

/// Removes what [`all_but_none`] gives; says what went.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn clear(all: &[Spares]) -> Result<Vec<PathBuf>> {
    let removed: Result<Vec<_>> =
        all.iter().map(|spares| spares.clear_but(std::iter::empty())).collect();
    Ok(removed?.concat())
}

/// Removes the recycled files that a save could still write over, for its disk is full. Says how many bytes they
/// took.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn give_up(places: &Places) -> Result<u64> {
    let mut bytes = 0;
    for dir in places.there()? {
        let spares = Spares::beside(dir)?;
        bytes +=
            spares.all_but(std::iter::empty())?.iter().map(|path| allocated(path)).sum::<u64>();
        spares.clear_but(std::iter::empty())?;
    }
    Ok(bytes)
}

/// Removes what no shard of a save that has just committed these files could have written over: what checkpoints of
/// more ranks or shards left would stay for ever.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn drop_unfit(places: &Places, files: &[FileEntry]) -> Result<()> {
    for dir in places.there()? {
        let spares = Spares::beside(dir)?;
        for path in spares.all_but(files.iter().map(|file| file.name.as_str()))? {
            if path != spares.dir {
                remove(&path)?;
            }
        }
    }
    Ok(())
}

/// What is to be said where a full disk took the recycled files.
pub(in crate::store) fn gave_up(bytes: u64, error: &Error) -> Fallback {
    Fallback {
        wanted: "recycled files for later saves to write over".into(),
        got: format!("their room on the disk, {bytes} bytes, for this save"),
        reason: error.to_string(),
        remedy:
            "free some space, or keep fewer checkpoints: a disk with room for one more saves faster"
                .into(),
    }
}

/// The length of a file that may be written over, or why it may not. `new` is what a new file would have.
fn check(part: &Path, new: &Access) -> std::result::Result<u64, String> {
    let file = file::open_write(part, false).map_err(|error| error.to_string())?;
    let found = file::look(&file).map_err(|error| error.to_string())?;
    if found.nlink() != 1 {
        return Err("it has another name, a hard link".into());
    }
    if Access::of(&file).map_err(|error| error.to_string())? != *new {
        return Err("its owner, group, mode or ACL is not that of a new file".into());
    }
    match is_sole_opener(&file) {
        Ok(true) => Ok(found.len()),
        Ok(false) => Err("a program has it open".into()),
        Err(error) => Err(format!("whether a program has it open cannot be asked: {error}")),
    }
}

/// Who may do what with a file. Another umask, directory or user may have been in force when an old one was made,
/// and whoever could read that checkpoint is not asked to read the next.
#[derive(Debug, PartialEq, Eq)]
struct Access {
    owner: (u32, u32),
    mode: u32,
    acl: Option<Vec<u8>>,
}

impl Access {
    fn of(file: &File) -> io::Result<Self> {
        let found = file::look(file)?;
        let (owner, mode) = ((found.uid(), found.gid()), found.mode());
        Ok(Self { owner, mode, acl: file::acl(file)? })
    }
}

fn not_taken(spare: &Path, reason: &str) -> Fallback {
    Fallback {
        wanted: "the files of a retired checkpoint, to write over".into(),
        got: "new files".into(),
        reason: format!("{} cannot be written over: {reason}", spare.display()),
        remedy: "none needed: a new file is as safe, and takes the disk a little longer".into(),
    }
}
