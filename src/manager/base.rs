//! The base of a manager's saves: the step before.

use super::Shared;
use crate::state::Base;
use crate::store::Wanted;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a manager remembers of the steps that it saved, to link their files.
#[derive(Debug, Default)]
pub(super) struct Previous {
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

    fn is_full(&self, last: &Last) -> bool {
        self.full_every > 0 && last.linked >= self.full_every
    }
}

impl Shared {
    /// The base of the next save; `None` if the manager has none.
    pub(super) fn base(&self) -> Option<Base> {
        let previous = self.previous.as_ref()?;
        let last = previous.last.lock().unwrap_or_else(PoisonError::into_inner);
        let path = match &last.path {
            Some(path) => Some(path.clone()),
            // A save must not fail because an older step cannot be read.
            None => self.store.latest(&self.root, &Wanted::default()).unwrap_or_else(|error| {
                tracing::warn!(%error, "no earlier step can be the base of this save");
                None
            }),
        };
        let base = path.map_or_else(Base::none, |path| Base::at(path).or_none());
        Some(if previous.is_full(&last) { base.rewritten() } else { base })
    }
}
