//! Which steps may leave a manager's directory, since all of its places have them.

use crate::error::{Error, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a manager knows of the steps that may leave its directory.
#[derive(Debug)]
pub(super) struct Eviction {
    /// How many of the newest steps, and of the last saves, stay in any case.
    pub(super) keep: usize,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The saves that all places have, by path and time: a step may be saved again.
    copied: HashSet<(PathBuf, Option<u64>)>,
    /// Steps that cannot be copied, since they are damaged.
    damaged: HashSet<PathBuf>,
    /// Bytes of the newest step; `None` before the first look.
    newest_bytes: Option<u64>,
    /// Whether the manager has listed the places.
    has_looked: bool,
}

impl Eviction {
    /// # Errors
    /// [`Error::Invalid`] for a number that keeps nothing.
    pub fn new(keep: usize) -> Result<Self> {
        if keep == 0 {
            return Err(Error::invalid("keep_here is 0, and the newest step stays: 1 or more"));
        }
        Ok(Self { keep, known: Mutex::default() })
    }

    /// Notes that all places have a save.
    pub fn note(&self, path: &Path, created_unix_ms: Option<u64>) {
        self.known().copied.insert((path.into(), created_unix_ms));
    }

    /// Notes that a step cannot be copied: another try would read its bytes again.
    pub fn note_damage(&self, path: &Path) {
        self.known().damaged.insert(path.into());
    }

    pub fn is_damaged(&self, path: &Path) -> bool {
        self.known().damaged.contains(path)
    }

    pub fn has_copied(&self, path: &Path, created_unix_ms: Option<u64>) -> bool {
        self.known().copied.contains(&(path.into(), created_unix_ms))
    }

    /// Forgets the steps that are gone.
    pub fn forget(&self, is_gone: impl Fn(&Path) -> bool) {
        let mut known = self.known();
        known.copied.retain(|(path, _)| !is_gone(path));
        known.damaged.retain(|path| !is_gone(path));
    }

    /// Bytes that the next save is expected to need: those of the newest step; `None` before the first look.
    pub fn expected_bytes(&self) -> Option<u64> {
        self.known().newest_bytes
    }

    pub fn expect(&self, bytes: u64) {
        self.known().newest_bytes = Some(bytes);
    }

    /// Records that the manager has listed the places; returns whether it had before.
    pub fn look(&self) -> bool {
        std::mem::replace(&mut self.known().has_looked, true)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
