//! What a manager notes about the steps that may leave its directory. It never decides on a removal:
//! [`evict`](crate::store::evict) checks each place right before.

use crate::error::{Error, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which steps stay in any case, and what a manager notes about the others.
#[derive(Debug)]
pub(super) struct Eviction {
    /// How many of the newest steps, and of the last saves, stay in any case.
    pub(super) keep: usize,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Steps that cannot be copied, since they are damaged.
    damaged: HashSet<PathBuf>,
    /// Bytes of the newest step; `None` before the first look.
    newest_bytes: Option<u64>,
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

    /// Notes that a step cannot be copied: another try would read its bytes again.
    pub fn note_damage(&self, path: &Path) {
        self.known().damaged.insert(path.into());
    }

    pub fn is_damaged(&self, path: &Path) -> bool {
        self.known().damaged.contains(path)
    }

    /// Forgets the steps that are gone.
    pub fn forget(&self, is_gone: impl Fn(&Path) -> bool) {
        self.known().damaged.retain(|path| !is_gone(path));
    }

    /// Bytes that the next save is expected to need: those of the newest step; `None` before the first look.
    pub fn expected_bytes(&self) -> Option<u64> {
        self.known().newest_bytes
    }

    pub fn expect(&self, bytes: u64) {
        self.known().newest_bytes = Some(bytes);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
