//! What the store does to directories and the names in them, with errors that say where. Nothing here
//! knows what a checkpoint is.

use crate::engine::file;
use crate::error::{Error, Result};
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

/// All that is in a directory, in no order.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn entries(dir: &Path) -> Result<Vec<DirEntry>> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect);
    entries
        .map_err(|e| crate::local::check(dir).err().unwrap_or_else(|| Error::io("listing", dir, e)))
}

/// Names of the files in a directory, sorted; those that are not Unicode are not ours.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn file_names(dir: &Path) -> Result<Vec<String>> {
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
pub(super) fn directories(dir: &Path) -> Result<Vec<PathBuf>> {
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
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("removing", path, e)),
        _ => Ok(()),
    }
}

/// Renames a file to a name that is free.
///
/// # Errors
/// [`Error::Io`], of [`io::ErrorKind::AlreadyExists`] naming `to` if it is there.
pub(super) fn rename_new(from: &Path, to: &Path) -> Result<()> {
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
pub(super) fn sync(dir: &Path) -> Result<()> {
    file::sync_dir(dir).map_err(|e| Error::io("syncing", dir, e))
}
