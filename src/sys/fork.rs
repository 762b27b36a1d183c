//! Values that belong to one process: a forked child gets fresh ones, with fresh locks.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many generations of forked processes have values of their own: this process, its child, that child's child.
pub(crate) const GENERATIONS: usize = 16;

/// How many forks lie between the first process and this one, counted by calls of [`forked`].
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// Must be called in a forked child. Takes no lock: another thread of the parent may have held it during the fork, and
/// nobody would ever release it here.
pub(crate) fn forked() {
    GENERATION.fetch_add(1, SeqCst);
}

/// A value behind a lock, a fresh one in each forked child. The child neither uses nor drops the parent's value, whose
/// threads are the parent's.
pub(crate) struct PerProcess<T>([Mutex<T>; GENERATIONS]);

impl<T> PerProcess<T> {
    /// Takes one initial value per generation.
    pub const fn new(each: [Mutex<T>; GENERATIONS]) -> Self {
        Self(each)
    }

    /// This process' value. `None` in a process more than [`GENERATIONS`] forks down.
    pub fn lock(&self) -> Option<MutexGuard<'_, T>> {
        self.of(GENERATION.load(SeqCst))
    }

    fn of(&self, generation: usize) -> Option<MutexGuard<'_, T>> {
        let mine = self.0.get(generation)?;
        Some(mine.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::fork::*;

    #[test]
    fn child_does_not_wait_for_a_lock_of_its_parent() {
        let value: PerProcess<Vec<u8>> =
            PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);
        let mut parents = value.of(0).unwrap();
        parents.push(7);
        assert!(value.of(1).unwrap().is_empty());
        assert!(value.of(GENERATIONS).is_none());
        assert_eq!(*parents, [7]);
    }
}
