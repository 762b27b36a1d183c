//! Reads of a block from a copy of its file: rare, and after a failure, so one at a time and through the page cache.

use crate::error::Error;
use crate::object::{Bucket, is_url, split};
use crate::sys::file;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Fills `to` with the bytes of a file, or of an object, from an offset on.
///
/// # Errors
/// The system's or the store's.
pub(super) fn read(path: &Path, offset: u64, to: &mut [u8]) -> io::Result<()> {
    if !is_url(path) {
        return file::open_read(path, false)?.read_exact_at(to, offset);
    }
    let (dir, name) = split(path).map_err(refused)?;
    to.copy_from_slice(&Bucket::at(&dir).map_err(refused)?.read_range(&name, offset, to.len())?);
    Ok(())
}

fn refused(error: Error) -> io::Error {
    io::Error::other(error.to_string())
}
