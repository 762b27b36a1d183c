//! Removes a stripe directory: its marker last, and only while nothing else is in it. Without the marker, nobody could
//! tell whose the files beside it are.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::stripe_marker::read_marker;
use crate::store::layout::unique::unique;
use crate::store::write::swept::Left;
use crate::sys::dir::{self, entries, remove};
use crate::sys::file;
use crate::sys::lock::{self, DirLock};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The markers in a directory that holds nothing else, those without their final name included. `None` if something else
/// is in it, or if it is gone.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn markers_alone(dir: &Path) -> Result<Option<Vec<PathBuf>>> {
    let entries = match entries(dir) {
        Err(error) if error.is_not_found() => return Ok(None),
        entries => entries?,
    };
    let mut names: Vec<_> = entries.iter().map(|entry| entry.file_name()).collect();
    names.retain(|name| name != lock::FILE);
    names.sort();
    let is_marker =
        |name: &str| name == names::STRIPE_MARKER || names::is_uncommitted_stripe_marker(name);
    let all = names.iter().all(|name| name.to_str().is_some_and(is_marker));
    Ok(all.then(|| names.iter().map(|name| dir.join(name)).collect()))
}

/// Removes the markers of a stripe directory that holds nothing else, and with `whole` the directory. `lock` is its own;
/// without one, another checkpoint of the same name is about to claim the directory, and only the markers go. Returns the
/// directory if the system refuses to remove it.
///
/// # Errors
/// [`Error::Io`]; also for a marker that cannot be read, and so not be put back.
pub(in crate::store) fn remove_stripe_dir(
    dir: &Path,
    lock: Option<DirLock>,
    whole: bool,
) -> Result<Option<Left>> {
    let Some(markers) = markers_alone(dir)? else { return Ok(None) };
    let marker = read_marker(dir)?.filter(|_| lock.is_some());
    markers.iter().try_for_each(|marker| remove(marker))?;
    let is_done = match lock {
        Some(lock) if whole => lock.remove_dir(),
        Some(_) => Ok(lock::is_empty(dir)),
        None => Ok(false),
    };
    if let Some(marker) = marker.filter(|_| !matches!(is_done, Ok(true))) {
        // A rank that outlived its session has just written a shard, or the listing was old, as a network file system's
        // may be. Or the directory cannot be removed: the marker says whose it is.
        put_back(dir, &marker)?;
    }
    Ok(is_done.err().map(|error| Left::emptied(dir, &error)))
}

/// Puts a marker back, whole or not at all, unless another process has written one.
fn put_back(dir: &Path, marker: &[u8]) -> Result<()> {
    let part = dir.join(names::unique_stripe_marker(&unique()));
    let write = || {
        file::write_durably(&part, |mut file| file.write_all(marker))?;
        dir::rename_new(&part, &dir.join(names::STRIPE_MARKER))?;
        dir::sync(dir)
    };
    match write() {
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::AlreadyExists => remove(&part),
        Err(error) if error.is_not_found() && dir::is_gone(dir) => Ok(()),
        written => written,
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use crate::sys::seam::{Call, Outcome, on_thread};

    /// Whatever call fails meanwhile, or kills the process, the marker has its text or is not there.
    #[test]
    fn marker_that_is_put_back_is_never_half_written() {
        for n in 1.. {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("step-1");
            std::fs::create_dir(&dir).unwrap();
            let marker = dir.join(names::STRIPE_MARKER);
            std::fs::write(&marker, "text").unwrap();
            let lock = DirLock::take(&dir).unwrap();
            // A rank that outlived its session writes a shard.
            let late = dir.join("rank00000-0.safetensors.part");
            let path = marker.clone();
            let watch = on_thread(move |number, call, on| {
                if call == Call::Remove && on == path {
                    std::fs::write(&late, "").unwrap();
                }
                if number >= n { Outcome::Fail(5) } else { Outcome::Pass }
            });
            let done = remove_stripe_dir(&dir, Some(lock), true);
            let calls = watch.take().len() as u64;
            drop(watch);
            let text = std::fs::read_to_string(&marker).ok();
            assert!(text.as_deref().is_none_or(|text| text == "text"), "call {n}: {text:?}");
            if calls < n {
                assert!(done.unwrap().is_none() && text.is_some());
                break;
            }
        }
    }
}
