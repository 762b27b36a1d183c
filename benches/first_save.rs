//! What the first save of a process costs beside the second: the pool, its registration, the threads. Each
//! measurement is a process of its own (this program again), which saves twice into new directories.
//!
//! ```text
//! cargo bench --bench first_save -- [--processes 12] [--gb 1] [--dir DIR]
//! ```
//!
//! `--dir /dev/shm` takes the disk's noise away.

mod common;

use common::{Args, Result, bench_dir, median, spread};
use ringstow::{Config, Dtype, StateDict};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Where the child saves; set only for it.
const CHILD_DIR: &str = "RINGSTOW_BENCH_FIRST_SAVE_DIR";

/// Bytes of a tensor.
const TENSOR: usize = 16 << 20;

struct Options {
    processes: usize,
    bytes: usize,
    dir: PathBuf,
}

/// What was asked for; `None` for the smoke test.
fn options() -> Result<Option<Options>> {
    let Some(mut args) = Args::unless_smoke_test("first_save") else { return Ok(None) };
    Ok(Some(Options {
        processes: args.value("--processes")?.unwrap_or(12),
        bytes: args.bytes(1.0)? as usize,
        dir: args.value("--dir")?.unwrap_or_else(bench_dir),
    }))
}

/// The child: saves twice, and tells the seconds of each and how long memory and engine took.
fn save_twice(dir: &Path, bytes: usize) -> Result<()> {
    let tensors: Vec<Vec<u8>> =
        (0..bytes.div_ceil(TENSOR)).map(|n| vec![n as u8 + 1; TENSOR]).collect();
    let mut state = StateDict::new();
    for (number, data) in tensors.iter().enumerate() {
        state.bytes(format!("layer.{number}"), Dtype::U8, &[TENSOR as u64], data)?;
    }
    for name in ["first", "second"] {
        let _ = Command::new("sync").status();
        let started = Instant::now();
        let report = ringstow::save(&state, dir.join(name), &Config::default())?;
        println!("{} {}", started.elapsed().as_secs_f64(), report.seconds.prepare);
        std::fs::remove_dir_all(dir.join(name))?;
    }
    Ok(())
}

/// Seconds of the first and the second save, and of these the ones to get ready.
fn measure(options: &Options, dir: &Path) -> Result<[f64; 4]> {
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
    let told: Vec<[f64; 4]> =
        (0..options.processes).map(|_| measure(&options, &dir)).collect::<Result<_>>()?;
    std::fs::remove_dir_all(&dir)?;
    let column = |at: usize| told.iter().map(|row| row[at]).collect::<Vec<f64>>();
    let ratios: Vec<f64> = told.iter().map(|row| row[0] / row[2]).collect();
    println!(
        "first save {:.3} s, of it {:.3} s to get ready",
        median(column(0)),
        median(column(1))
    );
    println!(
        "second     {:.3} s, of it {:.3} s to get ready",
        median(column(2)),
        median(column(3))
    );
    println!("first / second, median and its 95 % interval: {}", spread(&ratios));
    Ok(())
}
