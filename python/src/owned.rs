//! What a forked child must leave alone.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value of the process that made it, until that process takes it.
pub(crate) struct Owned<T> {
    inner: Mutex<Option<T>>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: Mutex::new(Some(value)), process: std::process::id() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, for the process that made it: a forked child leaves its parent's alone.
    pub(crate) fn take(&self) -> Option<T> {
        let value = self.lock().take();
        match std::process::id() == self.process {
            true => value,
            false => {
                std::mem::forget(value);
                None
            }
        }
    }
}
