//! One saver per directory at a time.

use crate::error::{Error, Result};
use crate::sys::inherited::Inherited;
use crate::sys::seam::{Call, call};
use crate::sys::{dir, file};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// An exclusive lock on a directory, held until dropped or until the process ends.
///
/// The lock (flock) is on the directory itself, so it leaves no file behind, however the process ends.
#[derive(Debug)]
pub(crate) struct DirLock {
    _inherited: Option<Inherited>,
    held: Option<Flock<File>>,
}

impl DirLock {
    /// Takes the lock without waiting. On a file system without locks, logs a warning and goes on without.
    ///
    /// # Errors
    /// [`Error::Busy`] if another save holds it; [`Error::Io`], also if the directory is gone.
    pub fn take(dir: &Path) -> Result<Self> {
        loop {
            let opened = call(Call::Lock, dir).and_then(|()| File::open(dir));
            let file = opened.map_err(|e| Error::io("opening", dir, e))?;
            if let Some(lock) = Self::of(file, dir)? {
                return Ok(lock);
            }
        }
    }

    /// Locks a directory that was opened by this path. `None` if another directory has the path by now: a
    /// clean-up has removed the opened one, and another process may hold the lock of the new one.
    fn of(file: File, dir: &Path) -> Result<Option<Self>> {
        // Flock unlocks when it is dropped. Closing alone would not, while a forked child has the descriptor.
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => {
                let identity = |found: Metadata| (found.dev(), found.ino());
                let [own, now] =
                    [file::look(&held), dir::look(dir)].map(|found| found.map(identity));
                let io = |e| Error::io("opening", dir, e);
                if own.map_err(io)? != now.map_err(io)? {
                    return Ok(None);
                }
                let inherited = Some(Inherited::note(&*held));
                Ok(Some(Self { _inherited: inherited, held: Some(held) }))
            }
            Err((_, Errno::EWOULDBLOCK)) => Err(Error::Busy { path: dir.into() }),
            Err((_, errno)) => {
                tracing::warn!(dir = %dir.display(), %errno, "cannot lock the directory: concurrent saves will not be detected");
                Ok(Some(Self { _inherited: None, held: None }))
            }
        }
    }

    /// Whether the lock keeps others out: false on a file system without locks.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::lock::*;
    use std::fs;

    #[test]
    fn directory_that_was_removed_and_recreated_has_one_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step");
        fs::create_dir(&dir).unwrap();
        // Opened, and removed by somebody else before it is locked.
        let opened = File::open(&dir).unwrap();
        fs::remove_dir(&dir).unwrap();
        let again = opened.try_clone().unwrap();
        let error = DirLock::of(opened, &dir).unwrap_err();
        assert!(error.is_not_found(), "{error}");
        fs::create_dir(&dir).unwrap();
        let held = DirLock::take(&dir).unwrap();
        assert!(held.is_held());
        assert!(DirLock::of(again, &dir).unwrap().is_none());
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
    }
}
