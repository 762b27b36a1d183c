//! What the store does to directories and the names in them, with errors that say where. Nothing here
//! knows what a checkpoint is.

use crate::error::{Error, Result};
use crate::sys::file;
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

/// All that is in a directory, in no order.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn entries(dir: &Path) -> Result<Vec<DirEntry>> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect);
    entries.map_err(|e| {
        crate::sys::path::check(dir).err().unwrap_or_else(|| Error::io("listing", dir, e))
    })
}

/// Names of the files in a directory, sorted; those that are not Unicode are not ours.
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

/// The directories in a directory, by name; links are not followed.
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

/// Removes a file; one that is gone already is no failure.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("removing", path, e)),
        _ => Ok(()),
    }
}

/// Renames a file to a name that is free.
///
/// # Errors
/// [`Error::Io`], of [`io::ErrorKind::AlreadyExists`] naming `to` if it is there.
pub(crate) fn rename_new(from: &Path, to: &Path) -> Result<()> {
    match file::rename_new(from, to) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            Err(Error::io("renaming a file to", to, e))
        }
        renamed => renamed.map_err(|e| Error::io("renaming", from, e)),
    }
}

/// Makes the names in a directory durable: files created, renamed and removed.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn sync(dir: &Path) -> Result<()> {
    try_sync(dir).map_err(|e| Error::io("syncing", dir, e))
}

/// [`sync`], with the system's own error.
///
/// # Errors
/// The system's.
pub(crate) fn try_sync(dir: &Path) -> io::Result<()> {
    fault(Call::Sync, dir)?;
    file::sync_dir(dir)
}

/// Whether a directory is there. A disk that fails, or a network file system that has lost it, is an error.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn is_there(dir: &Path) -> Result<bool> {
    match fault(Call::Look, dir).and_then(|()| fs::metadata(dir)) {
        Ok(found) => Ok(found.is_dir()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(e) => Err(Error::io("opening", dir, e)),
    }
}

/// What a test can make fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Looking whether a directory is there.
    Look,
    /// Reading a small file.
    Read,
    /// Syncing a directory.
    Sync,
}

/// The error that a test asks for, and none in a program.
#[cfg(not(test))]
#[inline]
pub(crate) fn fault(_: Call, _: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use faults::fault;

/// Failures of the system's that no test can bring about: a directory that cannot be synced, a bad sector.
#[cfg(test)]
pub(crate) mod faults {
    use crate::sys::dir::{Call, Path, PathBuf, io};
    use std::cell::RefCell;

    thread_local! {
        static ASKED: RefCell<Vec<(Call, PathBuf, i32)>> = const { RefCell::new(Vec::new()) };
        static MADE: RefCell<Vec<(Call, PathBuf)>> = const { RefCell::new(Vec::new()) };
    }

    /// Fails this call on this path, in this thread, until the returned guard goes.
    pub fn fail(call: Call, path: &Path, errno: nix::errno::Errno) -> Failing {
        ASKED.with_borrow_mut(|asked| asked.push((call, path.into(), errno as i32)));
        Failing
    }

    /// Ends what [`fail`] began.
    pub struct Failing;

    impl Drop for Failing {
        fn drop(&mut self) {
            ASKED.with_borrow_mut(Vec::clear);
        }
    }

    /// The paths on which this thread made this call since it was last asked.
    pub fn made(call: Call) -> Vec<PathBuf> {
        let all = MADE.take();
        all.into_iter().filter(|(made, _)| *made == call).map(|(_, path)| path).collect()
    }

    pub fn fault(call: Call, path: &Path) -> io::Result<()> {
        MADE.with_borrow_mut(|made| made.push((call, path.into())));
        let is_asked = |(asked, of, _): &&(Call, PathBuf, i32)| *asked == call && of == path;
        ASKED.with_borrow(|asked| match asked.iter().find(is_asked) {
            Some((_, _, errno)) => Err(io::Error::from_raw_os_error(*errno)),
            None => Ok(()),
        })
    }
}
