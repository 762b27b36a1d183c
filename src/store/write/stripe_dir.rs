//! Removes a stripe directory: its marker last, and only while nothing else is in it. Without the marker, nobody could
//! tell whose the files beside it are.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::stripe_marker::read_marker;
use crate::store::write::swept::{Left, Swept};
use crate::sys::chance::unique;
use crate::sys::dir::{self, entries, remove};
use crate::sys::file;
use crate::sys::lock::{self, DirLock};
use crate::sys::open_dir::Dir;
use crate::sys::removal_note;
use std::ffi::OsString;
use std::fs::DirEntry;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    Ok(alone(dir, entries.iter().map(DirEntry::file_name).collect()))
}

/// [`markers_alone`], given all names in the directory.
fn alone(dir: &Path, mut names: Vec<OsString>) -> Option<Vec<PathBuf>> {
    names.retain(|name| name != lock::FILE);
    names.sort();
    let is_marker =
        |name: &str| name == names::STRIPE_MARKER || names::is_uncommitted_stripe_marker(name);
    let all = names.iter().all(|name| name.to_str().is_some_and(is_marker));
    all.then(|| names.iter().map(|name| dir.join(name)).collect())
}

fn markers_in(dir: &Dir) -> Result<Option<Vec<PathBuf>>> {
    let names = dir.names()?.into_iter().map(|(name, _)| name.into_os_string());
    Ok(alone(dir.path(), names.collect()))
}

/// [`remove_stripe_dir`] for a caller without the directory's lock. If it cannot be taken, nothing changes, and the directory
/// is in the report; while another process holds it, only the markers go.
///
/// # Errors
/// As for [`remove_stripe_dir`].
pub(in crate::store) fn lock_and_remove(dir: &Path, whole: bool) -> Result<Swept> {
    let removed = Dir::open_real(dir).and_then(|open| match DirLock::take_open(&open) {
        Err(Error::Busy { .. }) => Ok((open, None)),
        lock => lock.map(|lock| (open, Some(lock))),
    });
    match removed {
        Ok((open, lock)) => remove_stripe_dir(&open, lock, whole),
        Err(error) if error.is_not_found() && dir::is_gone(dir) => Ok(Swept::default()),
        Err(error) => Ok(Left::failed(dir, &error).into()),
    }
}

/// Removes the markers of a stripe directory that holds nothing else, and with `whole` the directory. `lock` is its own;
/// while another process has it, another checkpoint of the same name is about to claim the directory, and only the markers
/// go. Returns the files that are gone for good, the directory if it is gone, and what the system refuses.
///
/// # Errors
/// [`Error::Io`] before any change; also for a marker that cannot be read, and so not be put back.
pub(in crate::store) fn remove_stripe_dir(
    open: &Arc<Dir>,
    lock: Option<DirLock>,
    whole: bool,
) -> Result<Swept> {
    let dir = open.path();
    let Some(markers) = markers_in(open)? else { return Ok(Swept::default()) };
    let marker = read_marker(dir)?;
    open.check()?;
    let mut left = Vec::new();
    if whole {
        removal_note::note(open);
    }
    // They are sorted: the one that says whose the directory is goes last.
    let is_done = match markers.iter().rev().try_for_each(|marker| remove(open.at(marker))) {
        Err(error) => {
            left.push(Left::failed(dir, &error));
            false
        }
        Ok(()) => match lock {
            Some(lock) if whole => lock.remove_dir().unwrap_or_else(|error| {
                left.push(Left::emptied(dir, &error));
                false
            }),
            Some(_) => lock::holds_nothing(open),
            None => markers_in(open).is_ok_and(|alone| alone.is_some()),
        },
    };
    if let Some(marker) = marker.filter(|_| !is_done) {
        // A rank that outlived its session has just written a shard, or the listing was old, as a network file system's
        // may be. Or the directory cannot be removed: the marker says whose it is.
        left.extend(put_back(open, &marker).err().map(|error| Left::failed(dir, &error)));
    }
    let mut removed: Vec<PathBuf> =
        markers.into_iter().filter(|path| !dir::has(open.at(path))).collect();
    removed.extend((whole && !dir::has(dir)).then(|| dir.into()));
    Ok(Swept { removed, left, ..Swept::default() })
}

/// Puts a marker back, whole or not at all, unless another process has written one.
fn put_back(dir: &Dir, marker: &[u8]) -> Result<()> {
    let part = dir.path().join(names::unique_stripe_marker(&unique()));
    let path = dir.path().join(names::STRIPE_MARKER);
    let write = || {
        file::write_durably(dir.at(&part), |mut file| file.write_all(marker))?;
        dir::rename_new(dir.at(&part), dir.at(&path))?;
        dir.sync()
    };
    match write() {
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::AlreadyExists => {
            remove(dir.at(&part))
        }
        Err(error) if error.is_not_found() && dir::is_gone(dir.path()) => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::seam::{Call, Outcome, fail_call, on_thread};

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
            let done = remove_stripe_dir(&lock.dir().clone(), Some(lock), true);
            let calls = watch.take().len() as u64;
            drop(watch);
            let text = std::fs::read_to_string(&marker).ok();
            assert!(text.as_deref().is_none_or(|text| text == "text"), "call {n}: {text:?}");
            if calls < n {
                assert!(done.unwrap() == Swept::default() && text.is_some());
                break;
            }
        }
    }

    /// A stripe directory with these files, and its marker.
    fn stripe_dir(names: &[&str]) -> (tempfile::TempDir, PathBuf, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step-1");
        std::fs::create_dir(&dir).unwrap();
        for name in names {
            std::fs::write(dir.join(name), "text").unwrap();
        }
        let marker = dir.join(names::STRIPE_MARKER);
        (root, dir, marker)
    }

    #[test]
    fn marker_stays_while_its_directory_cannot_be_locked() {
        let (_root, dir, marker) = stripe_dir(&[names::STRIPE_MARKER]);
        let failing = fail_call(Call::Open, &dir, nix::libc::EMFILE);
        let swept = lock_and_remove(&dir, true).unwrap();
        drop(failing);
        assert!(marker.exists() && swept.removed.is_empty());
        assert!(matches!(&*swept.left, [left] if left.failed && left.path == dir), "{swept:?}");
        assert_eq!(lock_and_remove(&dir, true).unwrap().removed, [marker, dir]);
    }

    #[test]
    fn marker_stays_beside_a_late_shard_while_another_process_holds_the_lock() {
        let (_root, dir, marker) = stripe_dir(&[names::STRIPE_MARKER]);
        let _other = DirLock::take(&dir).unwrap();
        let (path, late) = (marker.clone(), dir.join("rank00000-0.safetensors.part"));
        let watch = on_thread(move |_, call, on| {
            if call == Call::Remove && on == path {
                std::fs::write(&late, "").unwrap();
            }
            Outcome::Pass
        });
        assert_eq!(lock_and_remove(&dir, true).unwrap(), Swept::default());
        drop(watch);
        assert_eq!(std::fs::read_to_string(marker).unwrap(), "text");
    }

    #[test]
    fn what_is_removed_from_a_directory_that_stays_is_reported() {
        let part = names::UNCOMMITTED_STRIPE_MARKER;
        let (_root, dir, marker) = stripe_dir(&[names::STRIPE_MARKER, part]);
        let failing = fail_call(Call::RemoveDir, &dir, nix::libc::EPERM);
        let swept = lock_and_remove(&dir, true).unwrap();
        drop(failing);
        assert!(marker.exists() && !dir.join(part).exists());
        assert_eq!(swept.removed, [dir.join(part)]);
        assert!(matches!(&*swept.left, [left] if left.failed && left.path == dir), "{swept:?}");
    }
}
