//! Command line, CPU time and statistics of the benches.
#![allow(dead_code)] // each bench uses a part of this module

pub mod memory;

use fastrand::Rng;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Any error ends a bench.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Whether this is the smoke test, `cargo bench -- --test`: everything once, in small.
pub fn is_smoke_test() -> bool {
    std::env::args().any(|arg| arg == "--test")
}

/// The default directory.
pub fn bench_dir() -> PathBuf {
    let dir = std::env::var_os("RINGSTOW_BENCH_DIR").map(PathBuf::from);
    dir.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into())
}

/// Whether a directory is on a file system in memory.
pub fn is_in_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC)
}

/// The command line. Each method removes the arguments that it reads.
pub struct Args(Vec<String>);

impl Args {
    /// Returns the arguments of this process. `None`, with a message, in the smoke test, which leaves `bench` out.
    pub fn unless_smoke_test(bench: &str) -> Option<Self> {
        if is_smoke_test() {
            println!("{bench}: left out of the smoke test");
            return None;
        }
        // Cargo adds `--bench`; `--quick` is for the criterion benches.
        let is_ours = |arg: &String| arg != "--bench" && arg != "--quick";
        Some(Self(std::env::args().skip(1).filter(is_ours).collect()))
    }

    /// Whether this flag is present.
    pub fn flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|arg| arg != name);
        self.0.len() < before
    }

    /// The values of all occurrences of this option.
    pub fn values<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<Vec<T>> {
        let mut values = Vec::new();
        while let Some(at) = self.0.iter().position(|arg| arg == name) {
            self.0.remove(at);
            let value = self.0.get(at).ok_or_else(|| format!("{name} needs a value"))?;
            values.push(value.parse().map_err(|error| format!("{name} {value}: {error}"))?);
            self.0.remove(at);
        }
        Ok(values)
    }

    /// The value of the last occurrence of this option.
    pub fn value<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<Option<T>> {
        Ok(self.values(name)?.pop())
    }

    /// The bytes to save: `--gb`, or the default in gigabytes.
    pub fn bytes(&mut self, gb: f64) -> Result<u64> {
        Ok((self.value("--gb")?.unwrap_or(gb) * 1e9) as u64)
    }

    /// The arguments that were not read.
    pub fn rest(self) -> Vec<String> {
        self.0
    }
}

/// CPU seconds of this process so far, in user space and in the kernel.
pub fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("a process may query itself");
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}

/// The median of at least one value.
pub fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    (of[(of.len() - 1) / 2] + of[of.len() / 2]) / 2.0
}

/// Formats the median of ratios and its 95 % interval, by bootstrap: `1.02 (0.99–1.05)`.
pub fn spread(ratios: &[f64]) -> String {
    let mut random = Rng::with_seed(1);
    let again = |_| median(ratios.iter().map(|_| ratios[random.usize(..ratios.len())]).collect());
    let mut medians: Vec<f64> = (0..2000).map(again).collect();
    medians.sort_by(f64::total_cmp);
    let (low, high) = (medians[50], medians[1949]);
    format!("{:.3} ({low:.3}–{high:.3})", median(ratios.to_vec()))
}
