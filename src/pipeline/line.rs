//! What a save or load did, in one line.

use super::report::{LoadReport, Moved, SaveReport};
use crate::units::{duration, size};
use std::fmt;

/// Target of the events that log these lines. The Python package logs its own, with what it knows besides.
pub const TARGET: &str = "ringstow::done";

impl fmt::Display for SaveReport {
    /// `run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, fixed buffers, O_DIRECT)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = (self.written_bytes(), self.seconds.total, self.gb_per_s());
        write!(f, "{}: {}", self.path.display(), done(figures, &self.moved))?;
        match self.linked_bytes {
            0 => Ok(()),
            linked => write!(f, "; {} linked", size(linked)),
        }
    }
}

impl fmt::Display for LoadReport {
    /// `loaded run/step-1000: 3.41 GB in 1.66 s (2.05 GB/s, io_uring, fixed buffers, O_DIRECT)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = (self.read_bytes, self.seconds.total, self.gb_per_s());
        write!(f, "loaded {}: {}", self.path.display(), done(figures, &self.moved))
    }
}

/// `3.41 GB in 1.52 s (2.24 GB/s, io_uring, fixed buffers, O_DIRECT)`: bytes, seconds, gigabytes (10^9) per second, and how
/// they were moved.
pub fn done((bytes, seconds, rate): (u64, f64, f64), moved: &Moved) -> String {
    let engine = match &*moved.engine {
        "uring" => "io_uring",
        "" | "none" => "no engine",
        other => other,
    };
    let fixed = if moved.fixed_buffers > 0 { ", fixed buffers" } else { "" };
    let direct = if moved.direct { "O_DIRECT" } else { "buffered" };
    let (bytes, time, rate) = (size(bytes), duration(seconds), size((rate * 1e9) as u64));
    format!("{bytes} in {time} ({rate}/s, {engine}{fixed}, {direct})")
}
