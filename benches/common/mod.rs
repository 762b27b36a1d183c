//! What benches share: what they are asked for, time on the CPU, and what many measurements say together.
#![allow(dead_code)] // each of them uses a part of it

pub mod memory;

use fastrand::Rng;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Whatever goes wrong ends a bench.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Whether everything is to run once, small: `cargo bench -- --test`.
pub fn is_smoke_test() -> bool {
    std::env::args().any(|arg| arg == "--test")
}

/// Where to save unless an option says it.
pub fn bench_dir() -> PathBuf {
    let dir = std::env::var_os("RINGSTOW_BENCH_DIR").map(PathBuf::from);
    dir.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into())
}

/// Whether what lies there lies in memory.
pub fn is_in_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC)
}

/// What was asked for on the command line; what is looked at is taken out of it.
pub struct Args(Vec<String>);

impl Args {
    /// Those of this process; `None`, which is said, in the smoke test, that `bench` has no part in.
    pub fn unless_smoke_test(bench: &str) -> Option<Self> {
        if is_smoke_test() {
            println!("{bench}: left out of the smoke test");
            return None;
        }
        // Cargo's own, and what is meant for the benches of criterion in `cargo bench -- --quick`.
        let is_ours = |arg: &String| arg != "--bench" && arg != "--quick";
        Some(Self(std::env::args().skip(1).filter(is_ours).collect()))
    }

    /// Whether this option is there.
    pub fn flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|arg| arg != name);
        self.0.len() < before
    }

    /// What follows this option, each time that it is there.
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

    /// What follows this option the last time.
    pub fn value<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<Option<T>> {
        Ok(self.values(name)?.pop())
    }

    /// Bytes to save, by `--gb`.
    pub fn bytes(&mut self, gb: f64) -> Result<u64> {
        Ok((self.value("--gb")?.unwrap_or(gb) * 1e9) as u64)
    }

    /// What was not looked at.
    pub fn rest(self) -> Vec<String> {
        self.0
    }
}

/// CPU seconds that this process has used, its threads in the kernel among them.
pub fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("asking about oneself is allowed");
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}

/// The value in the middle of at least one.
pub fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    (of[(of.len() - 1) / 2] + of[of.len() / 2]) / 2.0
}

/// The median of ratios and its 95 % interval, by bootstrap: `1.02 (0.99–1.05)`.
pub fn spread(ratios: &[f64]) -> String {
    let mut random = Rng::with_seed(1);
    let again = |_| median(ratios.iter().map(|_| ratios[random.usize(..ratios.len())]).collect());
    let mut medians: Vec<f64> = (0..2000).map(again).collect();
    medians.sort_by(f64::total_cmp);
    let (low, high) = (medians[50], medians[1949]);
    format!("{:.3} ({low:.3}–{high:.3})", median(ratios.to_vec()))
}
