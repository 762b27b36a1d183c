//! Recycled files: files of removed checkpoints that a save writes over. The file system has allocated their
//! blocks already, which saves it the allocation and the journal entries.
//!
//! They are in the directory `.ringstow-spares` beside the checkpoints, each under the rank and number of the
//! shard that it was. A shard of the same rank and number is written over it. So there are never more than
//! one checkpoint has, and ranks need no agreement.
//!
//! A save overwrites nobody's data, because
//! - the removal of the checkpoint that listed the file is durable before the file moves to this directory;
//! - the move out of it is durable before the first byte is written ([`claim`] syncs the directory, and on a
//!   file system with a journal that makes all earlier moves durable);
//! - the file has one name (a hard link is somebody's copy), and the kernel says that nobody has it open or
//!   mapped. The kernel does not know about other hosts, so only files on local file systems are recycled.
//!
//! Nor does a save let a user read it who could only read the checkpoint before: the file's owner, mode and ACL
//! must be those of a new file.

use crate::config::Config;
use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::{Error, Result};
use crate::format::{FileEntry, names};
use crate::plan::save::Shard;
use crate::sys::dir::{self, directories, remove, remove_if_empty};
use crate::sys::file;
use crate::sys::inodes;
use crate::sys::lease::is_sole_opener;
use crate::sys::open_dir::Dir;
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The recycled files in one directory.
#[derive(Debug)]
pub(in crate::store) struct RecycledFiles {
    dir: PathBuf,
    holder: Holder,
}

/// What the directory of recycled files is in.
#[derive(Debug)]
enum Holder {
    /// It is opened when it is needed.
    Named {
        path: PathBuf,
        is_real: bool,
    },
    Open(Arc<Dir>),
}

/// The part of a save that is written over recycled files.
#[derive(Debug, Default)]
pub(in crate::store) struct Claimed {
    /// The paths of shards to which recycled files were moved.
    pub files: HashSet<PathBuf>,
    /// How many bytes of the shards these files have.
    pub bytes: u64,
    /// Why a recycled file was refused.
    pub refused: Option<Fallback>,
}

impl RecycledFiles {
    /// Those beside the checkpoint in `dir`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn beside(dir: &Dir) -> Result<Self> {
        dir.holder().map(|holder| Self::inside(&holder))
    }

    /// Those in an open directory.
    pub fn inside(dir: &Arc<Dir>) -> Self {
        let (at, holder) = (dir.path(), Holder::Open(Arc::clone(dir)));
        Self { dir: at.join(names::RECYCLED_DIR), holder }
    }

    /// Those beside the checkpoints in `root`; `is_real` if that must not be a link.
    fn under(root: &Path, is_real: bool) -> Self {
        let holder = Holder::Named { path: root.into(), is_real };
        Self { dir: root.join(names::RECYCLED_DIR), holder }
    }

    /// What their directory is in.
    fn holder(&self) -> Result<Arc<Dir>> {
        match &self.holder {
            Holder::Named { path, is_real: true } => Dir::open_real(path),
            Holder::Named { path, is_real: false } => Dir::open(path),
            Holder::Open(holder) => Ok(Arc::clone(holder)),
        }
    }

    /// Their directory; `None` if it is gone. A link leads to a directory of somebody else.
    fn open(&self) -> Result<Option<Arc<Dir>>> {
        let opened = self.holder().and_then(|holder| holder.open_in(&self.dir));
        match opened {
            Err(error) if error.is_not_found() || matches!(error, Error::Invalid { .. }) => {
                Ok(None)
            }
            Err(Error::Io { cause, .. }) if cause.kind() == io::ErrorKind::NotADirectory => {
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    /// Moves a shard of a removed checkpoint, in `from`, to the recycled files, where it replaces an older one of its rank
    /// and number. Leaves a file that is unfit or not ringstow's.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep(&self, from: &Dir, shard: &Path) -> Result<Kept> {
        let Some(recycled) = shard.file_name().and_then(|name| names::recycled(name.to_str()?))
        else {
            return Ok(Kept::No);
        };
        let found = dir::look_at(shard).map_err(|e| Error::io("opening", shard, e))?;
        if !found.is_file() {
            return Ok(Kept::No);
        }
        let unfit = match dir::overwrites_in_place(shard) {
            true if found.nlink() == 1 => None,
            true => Some(HARD_LINK),
            false => Some("its file system copies on write, or other hosts may have the file open"),
        };
        if let Some(why) = unfit {
            return Ok(Kept::Refused(not_taken(shard, why)));
        }
        dir::make(self.holder()?.at(&self.dir))?;
        let Some(dir) = self.open()? else { return Ok(Kept::No) };
        match dir::rename(from.at(shard), dir.at(&self.dir.join(recycled))) {
            // The checkpoint is a file system of its own.
            Err(Error::Io { cause, .. }) if cause.kind() == io::ErrorKind::CrossesDevices => {
                Ok(Kept::No)
            }
            // Another removal has just cleared the directory away.
            Err(error) if error.is_not_found() && dir::has(from.at(shard)) => Ok(Kept::No),
            renamed => renamed.map(|()| Kept::Yes),
        }
    }

    /// Makes moves to and from the recycled files durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        match self.open()? {
            Some(dir) => dir.sync(),
            // Another removal has cleared the directory away, since it was empty.
            None => self.holder()?.sync(),
        }
    }

    /// Moves the recycled file for a shard to the path, in `to`, at which the shard is about to be written.
    ///
    /// # Errors
    /// [`Error::Io`] if a refused file cannot be removed.
    fn take(&self, name: &str, to: &Dir, part: &Path) -> Result<Taken> {
        let Some(recycled) = names::recycled(name).map(|name| self.dir.join(name)) else {
            return Ok(Taken::Nothing);
        };
        let Some(from) = self.open()?.filter(|from| dir::has(from.at(&recycled))) else {
            return Ok(Taken::Nothing);
        };
        // The rename replaces this new file. Until then it shows the access that a new file gets here.
        let new = file::create_at(to.at(part), false).and_then(|file| Access::of(&file));
        let new = new.map_err(|e| inodes::creating(part, e))?;
        // The process that moves it first has it. If it is missing or cannot be moved, the save creates a new file.
        if dir::rename(from.at(&recycled), to.at(part)).is_err() {
            remove(to.at(part))?;
            return Ok(Taken::Nothing);
        }
        match check(part, &new) {
            Ok(bytes) => Ok(Taken::File { bytes }),
            Err(reason) => {
                remove(to.at(part))?;
                Ok(Taken::Refused(not_taken(&recycled, &reason)))
            }
        }
    }

    /// All except those for `shards`; the directory comes last, if it holds nothing else.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn all_but<'a>(&self, shards: impl Iterator<Item = &'a str>) -> Result<Vec<PathBuf>> {
        self.open()?.map_or_else(|| Ok(Vec::new()), |dir| all_but(&dir, shards))
    }

    /// Removes what [`RecycledFiles::all_but`] returns, and adds to `removed` what is removed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn clear_but<'a>(
        &self,
        shards: impl Iterator<Item = &'a str>,
        removed: &mut Vec<PathBuf>,
    ) -> Result<()> {
        let Some(dir) = self.open()? else { return Ok(()) };
        for path in all_but(&dir, shards)? {
            let is_removed = match path == self.dir {
                // Another removal may have moved a file there in the meantime.
                true => matches!(remove_if_empty(dir.itself()), Ok(true)),
                false => remove(dir.at(&path)).map(|()| true)?,
            };
            removed.extend(is_removed.then_some(path));
        }
        Ok(())
    }

    /// Their directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// See [`RecycledFiles::all_but`].
fn all_but<'a>(dir: &Dir, shards: impl Iterator<Item = &'a str>) -> Result<Vec<PathBuf>> {
    let stay: HashSet<String> = shards.filter_map(names::recycled).collect();
    let goes = |name: &String| names::is_recycled(name) && !stay.contains(name);
    let present = dir.file_names()?;
    let mut found: Vec<PathBuf> =
        present.iter().filter(|name| goes(name)).map(|name| dir.path().join(name)).collect();
    if dir.names().is_ok_and(|all| all.len() == found.len()) {
        found.push(dir.path().into());
    }
    Ok(found)
}

/// Whether a file was recycled.
pub(in crate::store) enum Kept {
    Yes,
    No,
    /// It must not be written over.
    Refused(Fallback),
}

/// The recycled file for a shard.
enum Taken {
    /// There is none.
    Nothing,
    /// It has this many bytes and is now at the shard's path.
    File { bytes: u64 },
    /// It must not be overwritten, and was removed.
    Refused(Fallback),
}

/// Moves the recycled file for each shard, if there is one, to the path at which the shard is about to be written:
/// the path at its index in `paths`, in one of `dirs`.
///
/// # Errors
/// [`Error::Io`] if a move cannot be made durable, or a refused file not be removed.
pub(in crate::store) fn claim(
    dirs: &[Arc<Dir>],
    shards: &[Shard],
    paths: &[PathBuf],
) -> Result<Claimed> {
    assert_eq!(shards.len(), paths.len(), "each shard has a path");
    let mut claimed = Claimed::default();
    for dir in dirs {
        let (recycled, mut moved) = (RecycledFiles::beside(dir)?, false);
        let here = shards.iter().zip(paths).filter(|(_, path)| path.parent() == Some(dir.path()));
        for (shard, path) in here {
            match recycled.take(&shard.name, dir, path)? {
                Taken::Nothing => continue,
                Taken::File { bytes } => {
                    claimed.bytes += bytes.min(shard.bytes);
                    claimed.files.insert(path.clone());
                }
                Taken::Refused(why) => drop(claimed.refused.get_or_insert(why)),
            }
            moved = true;
        }
        if moved {
            recycled.sync()?;
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

/// Returns the recycled files in `root`, in the directories directly under it, and in the configuration's `stripe`.
///
/// # Errors
/// [`Error::Io`].
pub fn recycled(root: impl AsRef<Path>, config: &Config) -> Result<Recycled> {
    let paths = all_but_none(&everywhere(root.as_ref(), config)?)?;
    let bytes = paths.iter().map(|path| allocated(path)).sum();
    Ok(Recycled { paths, bytes })
}

/// Bytes of disk that a file has; none if a save has just claimed it.
fn allocated(path: &Path) -> u64 {
    let file = dir::look_at(path).ok().filter(Metadata::is_file);
    file.map_or(0, |file| file.blocks() * 512)
}

/// Those of the checkpoints in `root`, on all disks.
pub(in crate::store) fn beside_all(root: &Path, config: &Config) -> Vec<RecycledFiles> {
    let roots = config.stripe.iter().map(PathBuf::as_path).chain([root]);
    roots.map(|root| RecycledFiles::under(root, false)).collect()
}

/// Also those of rank checkpoints.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn everywhere(root: &Path, config: &Config) -> Result<Vec<RecycledFiles>> {
    let below = match directories(root) {
        // Another process has just removed it.
        Err(error) if error.is_not_found() => Vec::new(),
        below => below?,
    };
    let mut all = beside_all(root, config);
    all.extend(below.iter().map(|dir| RecycledFiles::under(dir, true)));
    Ok(all)
}

/// All files, and their directories that hold nothing else.
///
/// # Errors
/// [`Error::Io`].
fn all_but_none(all: &[RecycledFiles]) -> Result<Vec<PathBuf>> {
    let found: Result<Vec<_>> = all.iter().map(|files| files.all_but(std::iter::empty())).collect();
    Ok(found?.concat())
}

/// Removes what [`all_but_none`] returns.
///
/// # Errors
/// [`Error::Io`].
fn clear(all: &[RecycledFiles]) -> Result<()> {
    let mut removed = Vec::new();
    all.iter().try_for_each(|files| files.clear_but(std::iter::empty(), &mut removed))
}

/// Removes the recycled files that a save into these directories could still write over, because its disk is full. Returns
/// how many bytes they had.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn give_up(dirs: &[Arc<Dir>]) -> Result<u64> {
    let mut bytes = 0;
    for dir in dirs {
        let all = [RecycledFiles::beside(dir)?];
        bytes += all_but_none(&all)?.iter().map(|path| allocated(path)).sum::<u64>();
        clear(&all)?;
    }
    Ok(bytes)
}

/// Removes recycled files that no shard of a save into these directories could have claimed; the save has just committed
/// `files`. Those of checkpoints with more ranks or shards would otherwise stay for ever.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn drop_unfit(dirs: &[Arc<Dir>], files: &[FileEntry]) -> Result<()> {
    for dir in dirs {
        let Some(recycled) = RecycledFiles::beside(dir)?.open()? else { continue };
        for path in all_but(&recycled, files.iter().map(|file| file.name.as_str()))? {
            if path != recycled.path() {
                remove(recycled.at(&path))?;
            }
        }
    }
    Ok(())
}

/// The fallback to report when a full disk took the recycled files.
pub(in crate::store) fn gave_up(bytes: u64, error: &Error) -> Fallback {
    Fallback {
        kind: FallbackKind::Recycling,
        wanted: "recycled files for later saves to write over".into(),
        got: format!("their room on the disk, {bytes} bytes, for this save"),
        reason: error.to_string(),
        remedy:
            "free some space, or keep fewer checkpoints: a disk with room for one more saves faster"
                .into(),
    }
}

/// The length of a file that may be overwritten, or why it may not. `new` is the access of a new file.
fn check(part: &Path, new: &Access) -> std::result::Result<u64, String> {
    let file = file::open_write(part, false).map_err(|error| error.to_string())?;
    let found = file::look(&file).map_err(|error| error.to_string())?;
    if found.nlink() != 1 {
        return Err(HARD_LINK.into());
    }
    if Access::of(&file).map_err(|error| error.to_string())? != *new {
        return Err("its owner, group, mode or ACL is not that of a new file".into());
    }
    match is_sole_opener(&file) {
        Ok(true) => Ok(found.len()),
        Ok(false) => Err("a program has it open".into()),
        Err(error) => {
            Err(format!("the kernel does not say whether a program has it open: {error}"))
        }
    }
}

const HARD_LINK: &str = "it has another name, a hard link";

fn not_taken(recycled: &Path, reason: &str) -> Fallback {
    Fallback {
        kind: FallbackKind::Recycling,
        wanted: "the recycled files of a removed checkpoint".into(),
        got: "new files".into(),
        reason: format!("{} cannot be written over: {reason}", recycled.display()),
        remedy: "none needed: a new file is as safe, and takes the disk a little longer".into(),
    }
}

/// Who may read and write a file. An old file may come from another umask, directory or user, and its readers need
/// not be allowed to read the next checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::store) struct Access {
    owner: (u32, u32),
    mode: u32,
    acl: Option<Vec<u8>>,
}

impl Access {
    /// That of an open file.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        let found = file::look(file)?;
        let (owner, mode) = ((found.uid(), found.gid()), found.mode());
        Ok(Self { owner, mode, acl: file::acl(file)? })
    }
}
