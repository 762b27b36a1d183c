//! Stripe directories that no checkpoint leads to: a save was killed before their marker had its name, or what removed
//! their checkpoint could not remove them. They hold no shard.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::stripes::stripe_owner;
use crate::sys::dir::{self, directories, entries, remove};
use crate::sys::lock::{self, DirLock};
use std::path::{Path, PathBuf};

/// Finds those of checkpoints below `root`, and those without a marker.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub(in crate::store) fn orphans(root: &Path, stripe: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (root, mut found) = (dir::real(root)?, Vec::new());
    for stripe in stripe.iter().filter(|stripe| dir::is_dir(stripe)) {
        for stripe_dir in directories(stripe)? {
            match remains(&stripe_dir, &root) {
                Ok(files) if files.is_empty() => {}
                // Not ringstow's: another user's, or `lost+found`.
                Err(Error::Io { doing: "listing", .. }) => {}
                Ok(_) => found.push(stripe_dir),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

/// The files of a stripe directory that no checkpoint leads to. None if it is not one.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub(in crate::store) fn remains(stripe_dir: &Path, root: &Path) -> Result<Vec<PathBuf>> {
    let entries = match entries(stripe_dir) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        entries => entries?,
    };
    let names = entries.iter().map(|entry| entry.file_name());
    let (locks, files): (Vec<_>, Vec<_>) = names.partition(|name| name == lock::FILE);
    let is_marker =
        |name: &str| name == names::STRIPE_MARKER || names::is_uncommitted_stripe_marker(name);
    if locks.len() > 1 || !files.iter().all(|name| name.to_str().is_some_and(is_marker)) {
        return Ok(Vec::new());
    }
    // Its checkpoint's directory exists from before the marker is written until after it is removed.
    if let Some(checkpoint) = stripe_owner(stripe_dir)?
        && !(Path::new(&checkpoint).starts_with(root) && dir::is_gone(Path::new(&checkpoint)))
    {
        return Ok(Vec::new());
    }
    Ok(files.iter().map(|name| stripe_dir.join(name)).collect())
}

/// Removes one, with its files. `lock` is its own: a save takes it before it looks for a marker.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub(in crate::store) fn remove_orphan(lock: DirLock, remains: &[PathBuf]) -> Result<bool> {
    remains.iter().try_for_each(|path| remove(path))?;
    lock.remove_dir()
}
