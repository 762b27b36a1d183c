//! A note on a directory that ringstow is about to remove. A process that is killed just before it removes the directory
//! leaves it empty, and nothing else would tell it from an empty directory of the user's.
//!
//! The note is an extended attribute. Where the file system has none, such a directory stays.

use crate::sys::lock;
use crate::sys::open_dir::Dir;
use crate::sys::seam::{Call, made};
use std::path::Path;

const NAME: &str = "user.ringstow.removing";

/// Notes that a directory goes once it is empty. It may not be possible; then the directory only goes if this process gets
/// to remove it.
pub(crate) fn note(dir: &Dir) {
    if let Err(error) = made(Call::Attribute, dir.path(), || set(dir)) {
        tracing::debug!(dir = %dir.path().display(), %error, "cannot note that it is being removed");
    }
}

/// Whether a directory is empty and has the note: what removed its files was killed before it removed the directory.
pub(crate) fn is_left_empty(dir: &Path) -> bool {
    made(Call::Query, dir, || has(dir)).unwrap_or(false) && lock::is_empty(dir)
}

#[cfg(target_os = "linux")]
fn set(dir: &Dir) -> std::io::Result<()> {
    Ok(rustix::fs::fsetxattr(dir.file(), NAME, b"", rustix::fs::XattrFlags::empty())?)
}

#[cfg(target_os = "linux")]
fn has(dir: &Path) -> std::io::Result<bool> {
    match rustix::fs::lgetxattr(dir, NAME, &mut [] as &mut [u8]) {
        Err(rustix::io::Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(true),
    }
}

/// Off Linux there is no note.
#[cfg(not(target_os = "linux"))]
fn set(_: &Dir) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Off Linux there is no note.
#[cfg(not(target_os = "linux"))]
fn has(_: &Path) -> std::io::Result<bool> {
    Ok(false)
}
