//! Compares the first save of a process with the second, in time and memory: the pool, its registration, the
//! threads. Each measurement runs this program in a new process, which saves twice into new directories.
//!
//! ```text
//! cargo bench --bench first_save -- [--processes 12] [--gb 1] [--dir DIR]
//! ```
//!
//! `--dir /dev/shm` removes the disk's noise; `--gb 0.0016` is a small state.

mod common;

use common::{Args, Result, bench_dir, median, spread};
use ringstow::{Dtype, StateDict};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Where the child saves; set only for it.
const CHILD_DIR: &str = "RINGSTOW_BENCH_FIRST_SAVE_DIR";

/// Bytes of a tensor, at most.
const TENSOR: usize = 16 << 20;

struct Options {
    processes: usize,
    bytes: usize,
    dir: PathBuf,
}

/// Reads the command line. `None` in the smoke test.
fn options() -> Result<Option<Options>> {
    let Some(mut args) = Args::unless_smoke_test("first_save") else { return Ok(None) };
    Ok(Some(Options {
        processes: args.value("--processes")?.unwrap_or(12),
        bytes: args.bytes(1.0)? as usize,
        dir: args.value("--dir")?.unwrap_or_else(bench_dir),
    }))
}

/// The child process: saves twice, and prints for each the seconds, the seconds to prepare memory and engine,
/// and the MiB that the process grew by.
fn save_twice(dir: &Path, bytes: usize) -> Result<()> {
    let tensor = TENSOR.min(bytes);
    let tensors: Vec<Vec<u8>> =
        (0..bytes.div_ceil(tensor)).map(|n| vec![n as u8 + 1; tensor]).collect();
    let mut state = StateDict::new();
    for (number, data) in tensors.iter().enumerate() {
        state.bytes(format!("layer.{number}"), Dtype::U8, &[tensor as u64], data)?;
    }
    for name in ["first", "second"] {
        let _ = Command::new("sync").status();
        let (resident, started) = (resident_mib()?, Instant::now());
        let report = ringstow::save(&state, dir.join(name))?;
        let seconds = started.elapsed().as_secs_f64();
        println!("{seconds} {} {}", report.seconds.prepare, resident_mib()? - resident);
        std::fs::remove_dir_all(dir.join(name))?;
    }
    Ok(())
}

/// Resident memory of this process.
fn resident_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: f64 = line.and_then(|text| text.split_whitespace().next()).unwrap_or("0").parse()?;
    Ok(kib / 1024.0)
}

/// Returns seconds, seconds to prepare, and MiB, of the first save and of the second.
fn measure(options: &Options, dir: &Path) -> Result<[f64; 6]> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--gb", &(options.bytes as f64 / 1e9).to_string()])
        .env(CHILD_DIR, dir)
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let told: Vec<f64> =
        text.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?;
    let failed = || format!("a save failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(told.try_into().map_err(|_| failed())?)
}

fn main() -> Result<()> {
    let Some(options) = options()? else { return Ok(()) };
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        return save_twice(Path::new(&dir), options.bytes);
    }
    let dir = options.dir.join("ringstow-first-save");
    std::fs::create_dir_all(&dir)?;
    let told: Vec<[f64; 6]> =
        (0..options.processes).map(|_| measure(&options, &dir)).collect::<Result<_>>()?;
    std::fs::remove_dir_all(&dir)?;
    let column = |at: usize| told.iter().map(|row| row[at]).collect::<Vec<f64>>();
    let ratios: Vec<f64> = told.iter().map(|row| row[0] / row[3]).collect();
    for (name, at) in [("first save", 0), ("second    ", 3)] {
        let [seconds, ready, mib] = [at, at + 1, at + 2].map(|at| median(column(at)));
        println!("{name} {seconds:.4} s, including {ready:.4} s to prepare; {mib:.1} MiB more");
    }
    println!("first / second, median and its 95 % interval: {}", spread(&ratios));
    Ok(())
}
