//! The file of checksums beside a stream's file: written, read, removed.

use super::part::Part;
use crate::error::{Error, Result};
use crate::format::file_sums::{FileSums, SUFFIX};
use crate::sys::{dir, file};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where the checksums of a file are.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

/// Length and time of the last change. Together they say which content of a file checksums are of.
pub(super) fn content(file: &File) -> io::Result<(u64, i64)> {
    let found = file::look(file)?;
    Ok((found.len(), modified_ns(&found)))
}

fn modified_ns(found: &Metadata) -> i64 {
    found.mtime().saturating_mul(1_000_000_000).saturating_add(found.mtime_nsec())
}

/// Writes checksums durably under an uncommitted name.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write(target: &Path, sums: &FileSums<'_>) -> Result<Part> {
    let part = Part::create(target)?;
    let failed = |error| Error::io("writing", target, error);
    let text = sums.encode().map_err(failed)?;
    let file = file::open_write(part.path(), false).map_err(failed)?;
    file::write_start(&file, target, &text)?;
    file::sync(&file).map_err(failed)?;
    Ok(part)
}

/// Reads the checksums of a file's present content. `None` without any, with the reason.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub(super) fn read(
    path: &Path,
    file: &File,
) -> Result<std::result::Result<FileSums<'static>, String>> {
    let beside = beside(path);
    let text = match file::read(&beside) {
        Err(error) if file::is_absent(&error) => {
            return Ok(Err(format!("{} does not exist", beside.display())));
        }
        text => text.map_err(|e| Error::io("reading", &*beside, e))?,
    };
    let sums = match FileSums::decode(&text, &beside) {
        Err(error) => return Ok(Err(format!("the checksums cannot be read: {error}"))),
        Ok(sums) => sums,
    };
    let content = content(file).map_err(|e| Error::io("opening", path, e))?;
    match content == (sums.bytes, sums.modified_ns) {
        true => Ok(Ok(sums)),
        false => Ok(Err(format!(
            "{} is of another content: the file was written anew, or copied without its time",
            beside.display()
        ))),
    }
}

/// Removes the checksums of an earlier content. They would not be used, so a failure changes nothing.
pub(super) fn remove_stale(path: &Path) {
    let beside = beside(path);
    if dir::is_file(&beside)
        && let Err(error) = dir::remove(&beside)
    {
        tracing::warn!(%error, "checksums of an earlier file are left, which no reader uses");
    }
}
