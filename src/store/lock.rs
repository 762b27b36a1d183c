//! One saver a directory at a time.

use crate::engine::inherited::Inherited;
use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;
use std::path::Path;

/// An exclusive lock on a directory, held until dropped or until the process ends.
///
/// It is on the directory itself (flock), so that it leaves no file behind, however the process ends.
#[derive(Debug)]
pub(crate) struct DirLock {
    _inherited: Option<Inherited>,
    _held: Option<Flock<File>>,
}

impl DirLock {
    /// Takes the lock without waiting. File systems that have no locks are taken as they are.
    ///
    /// # Errors
    /// [`Error::Busy`] if another save holds it.
    pub fn take(dir: &Path) -> Result<Self> {
        let file = File::open(dir).map_err(|e| Error::io("opening", dir, e))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => {
                let inherited = Some(Inherited::note(&*held));
                Ok(Self { _inherited: inherited, _held: Some(held) })
            }
            Err((_, Errno::EWOULDBLOCK)) => Err(Error::Busy { path: dir.into() }),
            Err((_, errno)) => {
                tracing::warn!(dir = %dir.display(), %errno, "cannot lock the directory: two savers at once would not see each other");
                Ok(Self { _inherited: None, _held: None })
            }
        }
    }
}
