//! Directories and the names in them: look, list, create, rename, remove, sync. Nothing here knows what a
//! checkpoint is.

use crate::error::{Error, Result, is_unsupported};
use crate::sys::inodes;
use crate::sys::seam::{Call, made};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, mkdirat, renameat, statat, unlinkat};
use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where a call finds a file: by its path or, in an open directory (`Dir::at`).
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    /// As the system gets it.
    pub(crate) name: &'a Path,
    /// For messages and the [seam](crate::sys::seam).
    pub(crate) path: &'a Path,
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for At<'a> {
    fn from(path: &'a P) -> Self {
        let path = path.as_ref();
        Self { dir: CWD, name: path, path }
    }
}

/// All that is in a directory, in no order.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn entries(dir: &Path) -> Result<Vec<DirEntry>> {
    try_entries(dir).map_err(|e| {
        crate::sys::path::check(dir).err().unwrap_or_else(|| Error::io("listing", dir, e))
    })
}

/// [`entries`], with the system's own error.
///
/// # Errors
/// The system's.
pub(crate) fn try_entries(dir: &Path) -> io::Result<Vec<DirEntry>> {
    made(Call::List, dir, || fs::read_dir(dir)?.collect())
}

/// Names of the files in a directory, sorted. A name that is not Unicode is not ringstow's, and left out.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn file_names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in entries(dir)? {
        let kind = entry.file_type().map_err(|e| Error::io("listing", dir, e))?;
        names.extend(entry.file_name().into_string().ok().filter(|_| !kind.is_dir()));
    }
    names.sort();
    Ok(names)
}

/// The directories in a directory, sorted by path; links are not followed.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn directories(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_dir = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let directories = entries(dir)?.into_iter().filter(is_dir);
    let mut found: Vec<PathBuf> = directories.map(|entry| entry.path()).collect();
    found.sort();
    Ok(found)
}

/// What the system knows about a path, or about what a link there leads to.
///
/// # Errors
/// The system's.
pub(crate) fn look(path: &Path) -> io::Result<Metadata> {
    made(Call::Look, path, || fs::metadata(path))
}

/// What the system knows about a path; a link is not followed.
///
/// # Errors
/// The system's.
pub(crate) fn look_at(path: &Path) -> io::Result<Metadata> {
    made(Call::Look, path, || fs::symlink_metadata(path))
}

fn stat(at: At<'_>) -> io::Result<Stat> {
    made(Call::Look, at.path, || Ok(statat(at.dir, at.name, AtFlags::SYMLINK_NOFOLLOW)?))
}

/// Whether anything has this path, a broken link included.
pub(crate) fn has<'a>(at: impl Into<At<'a>>) -> bool {
    stat(at.into()).is_ok()
}

/// Whether nothing has this path; false if the system does not say.
pub(crate) fn is_gone<'a>(at: impl Into<At<'a>>) -> bool {
    stat(at.into()).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Whether this path is a symbolic link.
pub(crate) fn is_link(path: &Path) -> bool {
    look_at(path).is_ok_and(|found| found.is_symlink())
}

/// Whether a directory has this path, or a link that leads to one.
pub(crate) fn is_dir(path: &Path) -> bool {
    look(path).is_ok_and(|found| found.is_dir())
}

/// Whether a regular file has this path, or a link that leads to one.
pub(crate) fn is_file(path: &Path) -> bool {
    look(path).is_ok_and(|found| found.is_file())
}

/// Whether a path leads to anything.
pub(crate) fn leads_somewhere(path: &Path) -> bool {
    look(path).is_ok()
}

/// The number of the file system that a path is on; `None` if it leads nowhere.
pub(crate) fn device(path: &Path) -> Option<u64> {
    look(path).ok().map(|found| found.dev())
}

/// Whether two paths lead to the same file or directory.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    match (look(one), look(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => one == other,
    }
}

/// Whether two paths are the same, or one is in the other, through links and bind mounts too. They need not exist, and may
/// be URLs.
pub(crate) fn are_nested(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| {
        if crate::sys::path::is_object(path) {
            return path.into();
        }
        let known = path.ancestors().find_map(|above| Some((above, try_real(above).ok()?)));
        known.map_or_else(
            || path.into(),
            |(above, real)| real.join(path.strip_prefix(above).unwrap_or(Path::new(""))),
        )
    };
    let (one, other) = (real(one), real(other));
    let is_in = |inner: &Path, outer: &Path| {
        inner.starts_with(outer) || inner.ancestors().any(|above| is_same(above, outer))
    };
    is_in(&one, &other) || is_in(&other, &one)
}

/// Whether a directory exists. If a disk fails, or a network file system has lost the directory, that is an
/// error.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn is_there(dir: &Path) -> Result<bool> {
    match look(dir) {
        Ok(found) => Ok(found.is_dir()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(e) => Err(Error::io("opening", dir, e)),
    }
}

/// A path from the root, with no link in it.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn real(path: &Path) -> Result<PathBuf> {
    try_real(path).map_err(|e| Error::io("opening", path, e))
}

/// [`real`], with the system's own error.
///
/// # Errors
/// The system's.
pub(crate) fn try_real(path: &Path) -> io::Result<PathBuf> {
    made(Call::Look, path, || fs::canonicalize(path))
}

/// Creates a directory in an existing one; says whether it did, and the directory was not there before.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn make<'a>(at: impl Into<At<'a>>) -> Result<bool> {
    let (at, mode) = (at.into(), Mode::from_raw_mode(0o777));
    match made(Call::MakeDir, at.path, || Ok(mkdirat(at.dir, at.name, mode)?)) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(inodes::creating(at.path, e)),
    }
}

/// Creates a directory and those above it that are missing, durably.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn make_all(dir: &Path) -> Result<()> {
    let above = dir.ancestors().filter(|above| !above.as_os_str().is_empty());
    let missing: Vec<&Path> = above.take_while(|above| !has(above)).collect();
    for missing in missing.into_iter().rev() {
        make(missing)?;
        missing.parent().filter(|above| !above.as_os_str().is_empty()).map_or(Ok(()), sync)?;
    }
    Ok(())
}

/// Removes a file; one that is gone already is no failure.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn remove<'a>(at: impl Into<At<'a>>) -> Result<()> {
    let at = at.into();
    try_remove(at).map(drop).map_err(|e| Error::io("removing", at.path, e))
}

/// [`remove`], with the system's own error. Says whether it was there.
///
/// # Errors
/// The system's.
pub(crate) fn try_remove<'a>(at: impl Into<At<'a>>) -> io::Result<bool> {
    let at = at.into();
    match made(Call::Remove, at.path, || Ok(unlinkat(at.dir, at.name, AtFlags::empty())?)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        // Linux refuses before it looks whether the file is there.
        Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem && is_gone(at) => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Removes a directory if it is empty; says whether it did. False if something is in it, or if it is gone already.
///
/// # Errors
/// [`Error::Io`] if it is empty and the system refuses.
pub(crate) fn remove_if_empty<'a>(at: impl Into<At<'a>>) -> Result<bool> {
    let At { dir, name, path } = at.into();
    match made(Call::RemoveDir, path, || Ok(unlinkat(dir, name, AtFlags::REMOVEDIR)?)) {
        Ok(()) => Ok(true),
        // Without the permission to remove it, the system does not look whether it is empty.
        Err(error) if entries(path).is_ok_and(|all| all.is_empty()) => {
            Err(Error::io("removing", path, error))
        }
        Err(_) => Ok(false),
    }
}

/// Renames a file. What has the other name is replaced.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn rename<'a>(from: impl Into<At<'a>>, to: impl Into<At<'a>>) -> Result<()> {
    let to = to.into();
    try_rename(from, to).map_err(|e| Error::io("renaming a file to", to.path, e))
}

/// [`rename`], with the system's own error.
///
/// # Errors
/// The system's.
pub(crate) fn try_rename<'a>(from: impl Into<At<'a>>, to: impl Into<At<'a>>) -> io::Result<()> {
    let (from, to) = (from.into(), to.into());
    made(Call::Rename, from.path, || Ok(renameat(from.dir, from.name, to.dir, to.name)?))
}

/// Gives a file a second name. A symbolic link is not followed.
///
/// # Errors
/// The system's.
pub(crate) fn link(from: &Path, to: &Path) -> io::Result<()> {
    made(Call::Link, to, || fs::hard_link(from, to))
}

/// Renames a file to a name that is free. If the rename fails, and then `to` is there and `from` is gone, it counts as
/// done: the server of a network file system did it, and its answer was lost.
///
/// # Errors
/// [`Error::Io`], of [`io::ErrorKind::AlreadyExists`] naming `to` if it is there.
pub fn rename_new<'a>(from: impl Into<At<'a>>, to: impl Into<At<'a>>) -> Result<()> {
    let (from, to) = (from.into(), to.into());
    match rename_to_free(from, to) {
        Err(error) if !error.is_taken() && has(to) && !has(from) => Ok(()),
        renamed => renamed,
    }
}

/// Renames a file to a name that is free. If the file system cannot refuse a taken name by itself (`EINVAL`), looks
/// for the name first; another process may create it in between.
///
/// # Errors
/// [`Error::Io`], of [`io::ErrorKind::AlreadyExists`] naming `to` if it is there.
pub(crate) fn rename_to_free<'a>(from: impl Into<At<'a>>, to: impl Into<At<'a>>) -> Result<()> {
    let (from, to) = (from.into(), to.into());
    let renamed = match rename_if_free(from, to) {
        Err(e) if e.kind() == io::ErrorKind::InvalidInput || is_unsupported(&e) => match stat(to) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => try_rename(from, to),
            Err(e) => Err(e),
            Ok(_) => Err(rustix::io::Errno::EXIST.into()),
        },
        renamed => renamed,
    };
    renamed.map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Error::io("renaming a file to", to.path, e),
        _ => Error::io("renaming", from.path, e),
    })
}

/// [`rename_to_free`], where no other process can take the name in between on a network file system either, if it has
/// hard links.
///
/// # Errors
/// As for [`rename_to_free`].
pub(crate) fn rename_once(from: &Path, to: &Path) -> Result<()> {
    match link(from, to) {
        Ok(()) => remove(from),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(Error::io("renaming a file to", to, error))
        }
        Err(_) => rename_to_free(from, to), // no links there
    }
}

#[cfg(target_os = "linux")]
fn rename_if_free(from: At<'_>, to: At<'_>) -> io::Result<()> {
    use rustix::fs::{RenameFlags, renameat_with};
    let new = RenameFlags::NOREPLACE;
    made(Call::Rename, from.path, || Ok(renameat_with(from.dir, from.name, to.dir, to.name, new)?))
}

#[cfg(not(target_os = "linux"))]
fn rename_if_free(_: At<'_>, _: At<'_>) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Swaps what two paths name, at once: nobody sees one of them missing.
///
/// # Errors
/// [`Error::Io`]; of `EINVAL`, `ENOSYS` or `ENOTSUP` where the file system cannot.
pub fn exchange(one: &Path, other: &Path) -> Result<()> {
    let exchanged = made(Call::Rename, one, || {
        #[cfg(any(target_os = "linux", target_vendor = "apple"))]
        {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
        }
        #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
        {
            let _ = other;
            Err(io::ErrorKind::Unsupported.into())
        }
    });
    exchanged.map_err(|e| Error::io("swapping the names of two directories", one, e))
}

/// Makes a symbolic link that leads to `to`, durably.
///
/// # Errors
/// [`Error::Io`], also if the name is taken.
pub(crate) fn link_to(path: &Path, to: &Path) -> Result<()> {
    made(Call::Link, path, || std::os::unix::fs::symlink(to, path))
        .map_err(|e| inodes::creating(path, e))?;
    sync(path.parent().unwrap_or(Path::new(".")))
}

/// Makes the names in a directory durable: files created, renamed and removed.
///
/// # Errors
/// [`Error::Io`].
pub fn sync(dir: &Path) -> Result<()> {
    try_sync(dir).map_err(|e| Error::io("syncing", dir, e))
}

/// [`sync`], with the system's own error. A file system without this operation (`EINVAL`) needs none.
///
/// # Errors
/// The system's.
pub(crate) fn try_sync(dir: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    try_sync_open(&rustix::fs::open(dir, flags, Mode::empty())?, dir)
}

/// [`try_sync`] for an open directory.
///
/// # Errors
/// The system's.
pub(crate) fn try_sync_open(opened: &impl AsFd, dir: &Path) -> io::Result<()> {
    made(Call::Sync, dir, || match rustix::fs::fsync(opened) {
        Err(rustix::io::Errno::INVAL) => Ok(()),
        synced => Ok(synced?),
    })?;
    check_journal(opened)?;
    made(Call::Synced, dir, || Ok(()))
}

/// Checks that the file system of a directory still writes its journal. Once a write of the journal has failed, ext4 and XFS
/// say of a directory whose changes were in it that it is synced (`jbd2_complete_transaction` and `xfs_log_force_inode` in
/// the kernel's [fs](https://github.com/torvalds/linux/tree/v6.18/fs)), and refuse every change. So this asks for one that
/// changes nothing: to remove an attribute that is not there.
///
/// # Errors
/// The system's, if the journal is lost.
#[cfg(target_os = "linux")]
fn check_journal(dir: &impl AsFd) -> io::Result<()> {
    use nix::sys::statfs::{
        BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC,
        XFS_SUPER_MAGIC, fstatfs,
    };
    let journaled = [
        BTRFS_SUPER_MAGIC,
        EXT4_SUPER_MAGIC,
        F2FS_SUPER_MAGIC,
        OVERLAYFS_SUPER_MAGIC, // asks the file system below it
        XFS_SUPER_MAGIC,
    ];
    if !fstatfs(dir).is_ok_and(|found| journaled.contains(&found.filesystem_type())) {
        return Ok(());
    }
    match rustix::fs::fremovexattr(dir, "user.ringstow.none") {
        Err(lost @ (rustix::io::Errno::IO | rustix::io::Errno::ROFS)) => Err(lost.into()),
        _ => Ok(()), // there is none, or this process may not change the directory
    }
}

/// Off Linux this is not known.
#[cfg(not(target_os = "linux"))]
fn check_journal(_: &impl AsFd) -> io::Result<()> {
    Ok(())
}

/// Whether a path is on a file system of this machine's own, as [`is_sole_opener`] needs it, that writes to
/// the blocks which a file has: one that copies on write gains nothing from recycled files.
///
/// [`is_sole_opener`]: crate::sys::lease::is_sole_opener
#[cfg(target_os = "linux")]
pub(crate) fn overwrites_in_place(path: &Path) -> bool {
    use nix::sys::statfs::{
        EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, TMPFS_MAGIC, XFS_SUPER_MAGIC, statfs,
    };
    let fit = [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, F2FS_SUPER_MAGIC, TMPFS_MAGIC];
    let found = made(Call::Query, path, || Ok(statfs(path)?));
    found.is_ok_and(|found| fit.contains(&found.filesystem_type()))
}

/// Off Linux nothing is recycled.
#[cfg(not(target_os = "linux"))]
pub(crate) fn overwrites_in_place(_: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::seam::fail_call;

    #[test]
    fn file_that_was_never_made_on_a_read_only_file_system_counts_as_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let _failing = fail_call(Call::Remove, &path, nix::libc::EROFS);
        assert!(!try_remove(&path).unwrap());
        std::fs::write(&path, "").unwrap();
        assert!(try_remove(&path).is_err(), "it is there, and stays");
    }
}
