//! Files that appear in a directory whole or not at all: the manifest of a copy, and labels, which say what a directory is.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::unique::unique;
use crate::sys::dir;
use crate::sys::file;
use std::io::Write;
use std::path::Path;

/// Longer labels are not read.
pub(in crate::store) const LABEL_BYTES_MAX: u64 = 4096;

/// Reads a label; `None` if the directory has none.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn read_label(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match file::read_start(&path, LABEL_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(e) if file::is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io("reading", path, e)),
    }
}

/// Writes a label durably, and makes the directory if it is missing. Without `replaces`, leaves a label that is there.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn write_label(
    dir: &Path,
    name: &str,
    text: &str,
    replaces: bool,
) -> Result<()> {
    dir::make_all(dir)?;
    match publish(dir, name, text.as_bytes(), replaces) {
        Err(error) if error.is_taken() => {}
        published => published?,
    }
    dir::sync(dir)
}

/// Writes a file under another name, syncs it and renames it. The caller syncs the directory.
///
/// # Errors
/// [`Error::Io`], without `replaces` of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if there is a file of this name.
pub(in crate::store) fn publish(
    dir: &Path,
    name: &str,
    content: &[u8],
    replaces: bool,
) -> Result<()> {
    let part = dir.join(format!("{name}.{}{}", unique(), names::UNCOMMITTED_SUFFIX));
    let rename = if replaces { dir::rename } else { dir::rename_once };
    let published = file::write_durably(&part, |mut file| file.write_all(content))
        .and_then(|()| rename(&part, &dir.join(name)));
    if published.is_err() {
        let _gone = dir::try_remove(&part);
    }
    published
}
