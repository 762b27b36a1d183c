//! Which directories' names this process has made durable.

use crate::error::{Error, Result};
use crate::sys::dir;
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

static DURABLE: PerProcess<BTreeSet<Name>> =
    PerProcess::new([const { Mutex::new(BTreeSet::new()) }; GENERATIONS]);

/// The name of one directory. Another directory that gets the same path later has another one: file systems reuse
/// inode numbers, so the time of its creation counts too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::store) struct Name {
    path: PathBuf,
    device: u64,
    inode: u64,
    created: Option<SystemTime>,
}

impl Name {
    /// The name of a directory, by its path from the root.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of(dir: &Path) -> Result<Self> {
        let found = look(dir)?;
        let (device, inode) = (found.dev(), found.ino());
        Ok(Self { path: dir.into(), device, inode, created: found.created().ok() })
    }

    /// Whether the directory is on another file system than the one above it: a mount, not a name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn is_mount_below(&self, parent: &Path) -> Result<bool> {
        Ok(look(parent)?.dev() != self.device)
    }

    /// Whether this process has synced the directory that holds the name.
    pub fn is_durable(&self) -> bool {
        DURABLE.lock().is_some_and(|all| all.contains(self))
    }

    /// Notes that the directory that holds the name was synced.
    pub fn note_durable(self) {
        if let Some(mut all) = DURABLE.lock() {
            all.insert(self);
        }
    }
}

fn look(dir: &Path) -> Result<Metadata> {
    dir::look(dir).map_err(|e| Error::io("opening", dir, e))
}
