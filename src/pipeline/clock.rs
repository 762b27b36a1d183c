//! Time that several threads spend on one thing.

use crate::device::Finished;
use crate::pool::Buffer;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Time that the threads of a save or load spent, added up over them.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    pub copy: Clock,
    pub checksum: Clock,
    pub wait: Clock,
    /// Of GPUs.
    pub device: Clock,
    /// Bytes that GPUs copied.
    pub device_bytes: AtomicU64,
}

impl Clocks {
    /// Adds what GPUs did for a buffer, which this returns.
    pub fn add_finished(&self, finished: Finished) -> Buffer {
        self.device.0.fetch_add((finished.device_seconds * 1e9) as u64, Relaxed);
        self.device_bytes.fetch_add(finished.device_bytes, Relaxed);
        finished.buffer
    }
}

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

    pub fn seconds(&self) -> f64 {
        self.0.load(Relaxed) as f64 / 1e9
    }
}
