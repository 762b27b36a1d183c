//! Whether a file system can hold more files: `ENOSPC` says no more than that something is used up.

use crate::error::{Error, Shortage, is_full};
use crate::sys::seam::{Call, made};
use std::io;
use std::path::Path;

/// The [`Error::Io`] for a file or directory that could not be created. Says so if the file system lacks inodes.
pub(crate) fn creating(path: &Path, error: io::Error) -> Error {
    let lacks_inodes = is_full(&error) && are_used_up(path);
    let mut error = Error::io("creating", path, error);
    if let Error::Io { shortage, .. } = &mut error
        && lacks_inodes
    {
        *shortage = Some(Shortage::Inodes);
    }
    error
}

/// Whether the file system on which a path is, or would be, has no free inodes. False if it counts none, or if the system
/// does not say.
pub(crate) fn are_used_up(path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let found = made(Call::Query, parent, || Ok(rustix::fs::statvfs(parent)?));
    found.is_ok_and(|vfs| vfs.f_files > 0 && vfs.f_favail == 0)
}
