//! What a save or load did, in one line.

use super::report::{LoadReport, Moved, SaveReport};
use bytesize::ByteSize;
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

fn done((bytes, seconds, rate): (u64, f64, f64), moved: &Moved) -> String {
    let engine = if moved.engine == "uring" { "io_uring" } else { &moved.engine };
    let fixed = if moved.fixed_buffers > 0 { ", fixed buffers" } else { "" };
    let direct = if moved.direct { "O_DIRECT" } else { "buffered" };
    let (bytes, time, rate) = (size(bytes), duration(seconds), size((rate * 1e9) as u64));
    format!("{bytes} in {time} ({rate}/s, {engine}{fixed}, {direct})")
}

/// A size in powers of ten with three digits, as disks are sold: `4.19 MB`.
pub(crate) fn size(bytes: u64) -> String {
    let last = 10u64.pow(bytes.max(1).ilog10().saturating_sub(2));
    let rounded = (bytes.saturating_add(last / 2) / last).saturating_mul(last);
    let decimals = 2 - rounded.max(1).ilog10() as usize % 3;
    format!("{:.decimals$}", ByteSize(rounded).display().si())
}

/// `12 ms`, `1.52 s`, `185 s`.
fn duration(seconds: f64) -> String {
    match seconds {
        ..0.00995 => format!("{:.1} ms", seconds * 1e3),
        ..0.9995 => format!("{:.0} ms", seconds * 1e3),
        ..9.995 => format!("{seconds:.2} s"),
        ..99.95 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_three_digits_at_most() {
        let said = [0.0004, 0.00996, 0.9994, 0.9996, 9.996, 99.96].map(duration);
        assert_eq!(said, ["0.4 ms", "10 ms", "999 ms", "1.00 s", "10.0 s", "100 s"]);
    }
}
