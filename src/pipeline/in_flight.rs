//! How many transfers of one save or load are in flight, and its first failure.

use std::sync::{Condvar, Mutex, MutexGuard};

/// A count of transfers to wait for.
#[derive(Debug)]
pub(super) struct InFlight<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    count: usize,
    failure: Option<E>,
}

impl<E> InFlight<E> {
    pub fn new() -> Self {
        let state = Mutex::new(State { count: 0, failure: None });
        Self { state, changed: Condvar::new() }
    }

    /// One more; it ends with [`InFlight::end`].
    pub fn begin(&self) {
        self.state().count += 1;
    }

    pub fn end(&self) {
        let mut state = self.state();
        state.count -= 1;
        if state.count == 0 {
            self.changed.notify_all();
        }
    }

    /// Keeps the first failure.
    pub fn fail(&self, failure: E) {
        self.state().failure.get_or_insert(failure);
    }

    /// Waits until no transfer is in flight, and takes the first failure.
    pub fn settle(&self) -> Option<E> {
        let state = self.changed.wait_while(self.state(), |state| state.count > 0);
        state.expect("no panic while it is held").failure.take()
    }

    fn state(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().expect("no panic while it is held")
    }
}
