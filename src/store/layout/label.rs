//! Small files that say what a directory is. One is created once, by whoever is first.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::unique::unique;
use crate::sys::dir;
use crate::sys::file;
use std::io::Write;
use std::path::Path;

/// Longer files are none of these.
pub(in crate::store) const BYTES_MAX: u64 = 4096;

/// The text of a directory's label; `None` if it has none yet.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn read(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match file::read_start(&path, BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(e) if file::is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io("reading", path, e)),
    }
}

/// Labels a directory, unless it is labelled; makes it if it is missing.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn create(dir: &Path, name: &str, text: &str) -> Result<()> {
    match write(dir, name, text, dir::rename_once) {
        Err(error) if error.is_taken() => Ok(()),
        written => written,
    }
}

/// Labels a directory, whatever its label is.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn replace(dir: &Path, name: &str, text: &str) -> Result<()> {
    write(dir, name, text, dir::rename)
}

fn write(dir: &Path, name: &str, text: &str, rename: fn(&Path, &Path) -> Result<()>) -> Result<()> {
    dir::make_all(dir)?;
    let part = dir.join(format!("{name}.{}{}", unique(), names::UNCOMMITTED_SUFFIX));
    let written = file::write_durably(&part, |mut file| file.write_all(text.as_bytes()));
    let named = written.and_then(|()| rename(&part, &dir.join(name)));
    if named.is_err() {
        let _gone = dir::try_remove(&part);
    }
    named.and_then(|()| dir::sync(dir))
}
