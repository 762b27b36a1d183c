//! What a save makes on disk before it is known to succeed, and takes back if it does not.

use super::dir::{self, remove};
use super::lock::DirLock;
use crate::error::{Error, Result};
use crate::local;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Files and directories that a save has made. Dropped, it removes them, unless they are kept.
#[derive(Debug)]
pub(super) struct Parts {
    /// Files that are written, or about to be.
    pub files: Vec<PathBuf>,
    /// Directories that were not there before, outermost first.
    made: Vec<PathBuf>,
    kept: bool,
    /// Let go of when everything has been removed.
    lock: Option<DirLock>,
}

impl Parts {
    /// Nothing yet, in a directory that somebody else has made.
    pub fn new() -> Self {
        Self { files: Vec::new(), made: Vec::new(), kept: false, lock: None }
    }

    /// Makes the directory and its parents, if need be.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL, or [`Error::Io`], and nothing is made.
    pub fn begin(dir: &Path) -> Result<Self> {
        local::check(dir)?;
        let mut parts = Self::new();
        let missing: Vec<&Path> = dir
            .ancestors()
            .take_while(|d| !d.as_os_str().is_empty() && fs::symlink_metadata(d).is_err())
            .collect();
        missing.into_iter().rev().try_for_each(|dir| parts.make_dir(dir))?;
        match fs::metadata(dir) {
            Ok(kind) if kind.is_dir() => Ok(parts),
            Ok(_) => {
                let error = io::Error::from_raw_os_error(nix::libc::ENOTDIR);
                Err(Error::io("saving to (a checkpoint is a directory)", dir, error))
            }
            Err(e) => Err(Error::io("opening", dir, e)),
        }
    }

    /// Makes a directory, if need be, in one that is there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn make_dir(&mut self, dir: &Path) -> Result<()> {
        match fs::create_dir(dir) {
            Ok(()) => self.made.push(dir.into()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io("creating", dir, e)),
        }
        Ok(())
    }

    /// Locks the directory, until these are dropped.
    ///
    /// # Errors
    /// [`Error::Busy`] if another save holds it; [`Error::Io`].
    pub fn lock(&mut self, dir: &Path) -> Result<()> {
        self.lock = Some(DirLock::take(dir)?);
        Ok(())
    }

    /// Leaves everything where it is, from now on.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Whether [`Parts::keep`] was called.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Makes the names of the directories that were made durable.
    pub fn sync_parents(&self) -> Result<()> {
        let parents = self.made.iter().filter_map(|dir| dir.parent());
        for parent in parents.filter(|parent| !parent.as_os_str().is_empty()) {
            dir::sync(parent)?;
        }
        Ok(())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for file in &self.files {
            if let Err(error) = remove(file) {
                tracing::warn!(%error, "could not remove what a failed save wrote");
            }
        }
        for dir in self.made.iter().rev() {
            let _ = fs::remove_dir(dir); // only an empty one goes
        }
    }
}
