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
    /// Steps that must get to the places, or are there already, as their copy will find out.
    awaited: HashSet<PathBuf>,
    /// Bytes of the newest step, as far as this process has seen one.
    newest_bytes: u64,
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
        let mut known = self.known();
        known.copied.insert((path.into(), created_unix_ms));
        known.awaited.remove(path);
    }

    /// Notes that a step must get to the places; tells whether that was new.
    pub fn await_copy(&self, path: &Path) -> bool {
        self.known().awaited.insert(path.into())
    }

    pub fn awaits(&self, path: &Path) -> bool {
        self.known().awaited.contains(path)
    }

    pub fn has_copied(&self, path: &Path, created_unix_ms: Option<u64>) -> bool {
        self.known().copied.contains(&(path.into(), created_unix_ms))
    }

    pub fn forget(&self, path: &Path, created_unix_ms: Option<u64>) {
        self.known().copied.remove(&(path.into(), created_unix_ms));
    }

    /// Bytes that the next save is expected to need: those of the newest step.
    pub fn expected_bytes(&self) -> u64 {
        self.known().newest_bytes
    }

    pub fn expect(&self, bytes: u64) {
        self.known().newest_bytes = bytes;
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
