//! What belongs to one process alone: a forked child begins without it, and without its locks.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// So many generations have something of their own: this process, its forked child, that one's child and so on.
pub(crate) const GENERATIONS: usize = 16;

/// How many forks lie between the first process and this one, as far as we were told.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// To be called in a forked child. Takes no lock: another thread of the parent may have held it at the moment
/// of the fork, and nobody would ever let go of it here.
pub(crate) fn forked() {
    GENERATION.fetch_add(1, SeqCst);
}

/// A value behind a lock, a fresh one in each forked child. What it held in the parent is never touched, nor
/// dropped, there: its threads are the parent's.
pub(crate) struct PerProcess<T>([Mutex<T>; GENERATIONS]);

impl<T> PerProcess<T> {
    /// Of so many equal values.
    pub const fn new(each: [Mutex<T>; GENERATIONS]) -> Self {
        Self(each)
    }

    /// This process' value. `None` in the child of a child that is too far down to have one.
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
    fn a_child_waits_for_no_lock_that_was_taken_before_it_was() {
        let value: PerProcess<Vec<u8>> =
            PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);
        let mut parents = value.of(0).unwrap();
        parents.push(7);
        assert!(value.of(1).unwrap().is_empty());
        assert!(value.of(GENERATIONS).is_none());
        assert_eq!(*parents, [7]);
    }
}
