//! `ringstow bench`: how fast durable saves and cold loads are in a directory, on each rung of the
//! ladder.

#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "bench/no_gpu.rs"]
mod gpu;
mod measure;
mod render;

use super::config::ConfigFlags;
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::config::{Config, EngineChoice, Switch};
use crate::engine::ladder::{Kind, Rung, all_rungs};
use crate::error::{Error, Result};
use crate::pipeline::runtime::Runtime;
use clap::Args;
use gpu::{GpuFigures, GpuTensors};
use measure::{Contender, Memory, Place};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Room for headers, manifests and the file system's own, in bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Measures durable saves and cold loads in a directory
///
/// Saves random data and loads it again, on each way of doing I/O that this library has, taking
/// turns. A save ends when everything is on disk; before each load the page cache is told to forget
/// the files. Prints medians and ranges. What was written is removed. With --engine, --direct or
/// --fixed only the ways that they allow are measured. Loads never need registered memory, so
/// both uring ways load alike. With --gpu the same is saved from and loaded into a GPU's memory as
/// well, right after host memory in each round, and the GPU's copies are measured by themselves.
#[derive(Debug, Args)]
pub struct Bench {
    /// A directory on the disk to be measured
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// Gigabytes (10^9 bytes) to save; as much is loaded into memory
    #[arg(long, default_value = "1", value_name = "GB", value_parser = parse_gb)]
    gb: f64,

    /// How often each is measured
    #[arg(long, default_value = "3", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Beside host memory, save from and load into that of the GPU of this number
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// Only the GPU's copies, and saves from it that write nothing
    #[arg(long, requires = "gpu")]
    copies_only: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Measured {
    #[serde(with = "crate::path_text")]
    dir: PathBuf,
    bytes: u64,
    rounds: u16,
    config: Config,
    gpu: Option<GpuFigures>,
    ways: Vec<Way>,
}

/// One rung, and where the tensors are.
#[derive(Debug, Serialize)]
struct Way {
    name: String,
    #[serde(flatten)]
    rung: Rung,
    place: Place,
    /// Why it cannot be had here, and what to do about it.
    refused: Option<String>,
    /// What it could not do as wanted, though it worked.
    notes: Vec<String>,
    save: Option<Figures>,
    load: Option<Figures>,
    /// Of tensors on a GPU.
    of_host: Option<OfHost>,
}

/// Rates with tensors on a GPU, over those with tensors in host memory in the same round.
#[derive(Debug, Serialize)]
struct OfHost {
    save: Spread,
    load: Spread,
}

/// Figures over the rounds.
#[derive(Debug, Serialize)]
struct Figures {
    gb_per_s: Spread,
    cpu_s_per_gb: Spread,
    /// The GPU's copies, as it timed them.
    copies_gb_per_s: Option<Spread>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

pub fn run(args: &Bench, out: &mut Output) -> Result<Exit> {
    let config = args.config.config()?;
    let gpu = args.gpu.map(GpuTensors::on).transpose()?;
    let bytes = (args.gb * 1e9) as u64;
    let rungs = all_rungs(&config)?;
    check_space(&args.dir, bytes)?;
    check_memory(bytes, (rungs.len() as u64 + u64::from(gpu.is_some())) * config.pool_bytes)?;
    let measured = measure(args, config, &rungs, bytes, gpu)?;
    out.print(args.json, &measured, || render::text(&measured))?;
    let some = args.copies_only || measured.ways.iter().any(|way| way.refused.is_none());
    Ok(if some { Exit::Ok } else { Exit::Failed })
}

/// Works in a directory of its own, which is removed in the end, however that comes.
fn measure(
    args: &Bench,
    config: Config,
    rungs: &[Rung],
    bytes: u64,
    gpu: Option<GpuTensors>,
) -> Result<Measured> {
    let dir = &args.dir;
    let work = tempfile::Builder::new()
        .prefix(".ringstow-bench-")
        .tempdir_in(dir)
        .map_err(|e| Error::io("creating a directory in", dir, e))?;
    let places: &[Place] = match gpu {
        Some(_) if args.copies_only => &[],
        Some(_) => &[Place::Host, Place::Gpu],
        None => &[Place::Fresh],
    };
    let mut contenders = Vec::new();
    for rung in rungs {
        let runtime = Arc::new(Runtime::new(on_rung(&config, rung))?);
        contenders.extend(places.iter().map(|&p| Contender::new(*rung, p, runtime.clone())));
    }
    let mut memory = Memory::new(bytes, gpu)?;
    let nowhere = work.path().join("nowhere");
    let gpu = memory.gpu().map(|gpu| gpu.figures(&config, &nowhere, args.rounds)).transpose()?;
    measure::rounds(&mut contenders, &mut memory, work.path(), args.rounds)?;
    work.close().map_err(|e| Error::io("removing the bench's files in", dir, e))?;
    let ways = measure::ways(contenders);
    Ok(Measured { dir: dir.clone(), bytes, rounds: args.rounds, config, gpu, ways })
}

/// The configuration that allows this rung alone.
fn on_rung(config: &Config, rung: &Rung) -> Config {
    let switch = |on| if on { Switch::On } else { Switch::Off };
    let engine = match rung.engine {
        Kind::Uring => EngineChoice::Uring,
        Kind::Portable => EngineChoice::Portable,
        Kind::TokioUring => EngineChoice::TokioUring,
    };
    Config { engine, fixed: switch(rung.fixed), direct: switch(rung.direct), ..config.clone() }
}

fn check_space(dir: &Path, bytes: u64) -> Result<()> {
    if !std::fs::metadata(dir).map_err(|e| Error::io("opening", dir, e))?.is_dir() {
        return Err(Error::invalid(format!("{} is not a directory", dir.display())));
    }
    let disk = rustix::fs::statvfs(dir).map_err(|e| Error::io("looking at", dir, e.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let needed = bytes.saturating_add(SLACK_BYTES);
    // A file system that reports no size at all reports no free space either.
    if disk.f_blocks == 0 || free >= needed {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} has {} free, this needs {}; free some space, or measure less with --gb",
        dir.display(),
        text::size(free),
        text::size(needed)
    )))
}

/// The data, what is loaded, and the pools have to fit. Unknown off Linux.
fn check_memory(bytes: u64, pools: u64) -> Result<()> {
    let needed = bytes.saturating_mul(2).saturating_add(pools);
    match available_memory() {
        Some(available) if available < needed => Err(Error::invalid(format!(
            "{} of memory is available, this needs {}; measure less with --gb, or use a smaller \
             --pool-bytes",
            text::size(available),
            text::size(needed)
        ))),
        _ => Ok(()),
    }
}

fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

fn parse_gb(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gb) if (1e-6..=1e6).contains(&gb) => Ok(gb),
        _ => Err("a number of gigabytes: 0.5, 4".into()),
    }
}
