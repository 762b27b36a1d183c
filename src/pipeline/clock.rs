//! Time that several threads spend on one thing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Nanoseconds, added up over the threads.
#[derive(Debug, Default)]
pub(super) struct Clock(AtomicU64);

impl Clock {
    pub fn add(&self, since: Instant) {
        self.add_span(since, Instant::now());
    }

    pub fn add_span(&self, from: Instant, to: Instant) {
        self.0.fetch_add((to - from).as_nanos() as u64, Relaxed);
    }

    pub fn add_seconds(&self, seconds: f64) {
        self.0.fetch_add((seconds * 1e9) as u64, Relaxed);
    }

    pub fn seconds(&self) -> f64 {
        self.0.load(Relaxed) as f64 / 1e9
    }
}
