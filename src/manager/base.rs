//! The base of a manager's saves: the step before.

use super::Shared;
use crate::state::Base;
use crate::store::Wanted;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a manager remembers of the steps that it saved, to link their files.
#[derive(Debug, Default)]
pub struct Previous {
    /// Every which save shares no file with the ones before; 0 for none.
    full_every: u64,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    path: Option<PathBuf>,
    /// Saves since the last one that shared no file.
    linked: u64,
}

impl Previous {
    /// Nothing yet. With `full_every`, every save of that number shares no file with the ones before.
    pub fn new(full_every: Option<u64>) -> Self {
        Self { full_every: full_every.unwrap_or(0), last: Mutex::default() }
    }

    /// Remembers the step that was restored: newer ones may be damaged.
    pub fn restored(&self, path: &Path) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).path = Some(path.into());
    }

    /// Remembers a step that was committed.
    pub fn saved(&self, path: &Path) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.linked = if self.is_full(&last) { 1 } else { last.linked + 1 };
        last.path = Some(path.into());
    }

    /// The step that was saved or restored last, and whether the next save is to share no file with earlier ones.
    pub fn next(&self) -> (Option<PathBuf>, bool) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        (last.path.clone(), self.is_full(&last))
    }

    fn is_full(&self, last: &Last) -> bool {
        self.full_every > 0 && last.linked >= self.full_every
    }
}

impl Shared {
    /// The base of the next save; `None` if the manager has none.
    pub(super) fn base(&self) -> Option<Base> {
        let (last, is_full) = self.previous.as_ref()?.next();
        // A save must not fail because an older step cannot be read.
        let newest = || match self.store.latest(&self.root, &Wanted::default()) {
            Ok(newest) => newest,
            Err(error) => {
                tracing::warn!("no earlier step can be the base of this save: {error}");
                None
            }
        };
        let base = last.or_else(newest).map_or_else(Base::none, |path| Base::at(path).or_none());
        Some(if is_full { base.rewritten() } else { base })
    }
}
