//! `ringstow bench`: how fast durable saves and cold loads are in a directory, on each rung of the
//! ladder.

mod measure;

use super::config::ConfigFlags;
use super::output::Output;
use super::table::{Align, list, table};
use super::{Exit, text};
use crate::config::{Config, EngineChoice, Switch};
use crate::engine::ladder::{Kind, Rung, all_rungs};
use crate::error::{Error, Result};
use clap::Args;
use measure::Contender;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Room for headers, manifests and the file system's own, in bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Measures durable saves and cold loads in a directory
///
/// Saves random data and loads it again, on each way of doing I/O that this library has, taking
/// turns. A save ends when everything is on disk; before each load the page cache is told to forget
/// the files. Prints medians and ranges. What was written is removed. With --engine, --direct or
/// --fixed only the ways that they allow are measured. Loads never need registered memory, so
/// both uring ways load alike.
#[derive(Debug, Args)]
pub struct Bench {
    /// A directory on the disk to be measured
    dir: PathBuf,

    /// Gigabytes (10^9 bytes) to save; as much is loaded into memory
    #[arg(long, default_value = "1", value_name = "GB", value_parser = parse_gb)]
    gb: f64,

    /// How often each is measured
    #[arg(long, default_value = "3", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Measured {
    dir: PathBuf,
    bytes: u64,
    rounds: u16,
    config: Config,
    ways: Vec<Way>,
}

/// One rung.
#[derive(Debug, Serialize)]
struct Way {
    name: String,
    #[serde(flatten)]
    rung: Rung,
    /// Why it cannot be had here, and what to do about it.
    refused: Option<String>,
    /// What it could not do as wanted, though it worked.
    notes: Vec<String>,
    save: Option<Figures>,
    load: Option<Figures>,
}

/// Figures over the rounds.
#[derive(Debug, Serialize)]
struct Figures {
    gb_per_s: Spread,
    cpu_s_per_gb: Spread,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

pub fn run(args: &Bench, out: &mut Output) -> Result<Exit> {
    let config = args.config.config()?;
    let bytes = (args.gb * 1e9) as u64;
    let rungs = all_rungs(&config)?;
    check_space(&args.dir, bytes)?;
    check_memory(bytes, rungs.len() as u64 * config.pool_bytes)?;
    let mut contenders = rungs
        .into_iter()
        .map(|rung| Contender::new(rung, on_rung(&config, &rung)))
        .collect::<Result<Vec<_>>>()?;
    measure::rounds(&mut contenders, &args.dir, bytes, args.rounds)?;
    let ways = contenders.into_iter().map(Way::from).collect();
    let measured = Measured { dir: args.dir.clone(), bytes, rounds: args.rounds, config, ways };
    if args.json {
        out.json(&measured)?;
    } else {
        out.line(render(&measured))?;
    }
    let some = measured.ways.iter().any(|way| way.refused.is_none());
    Ok(if some { Exit::Ok } else { Exit::Failed })
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

fn render(measured: &Measured) -> String {
    use Align::{Left, Right};
    let Config { block_bytes, queue_depth, pool_bytes, .. } = measured.config;
    let mut text = format!(
        "{}: {}, median of {} (min–max)\nblocks of {}, queue depth {queue_depth}, pool {}\n\n",
        text::path(&measured.dir),
        text::size(measured.bytes),
        text::count(measured.rounds.into(), "round"),
        text::binary_size(block_bytes),
        text::binary_size(pool_bytes)
    );
    let columns = [
        ("", Left),
        ("SAVE GB/s", Right),
        ("CPU s/GB", Right),
        ("LOAD GB/s", Right),
        ("CPU s/GB", Right),
    ];
    text.push_str(&table(columns, measured.ways.iter().map(row)));
    let refused = measured.ways.iter().flat_map(|way| {
        let said = way.refused.iter().chain(&way.notes);
        said.map(|why| [text::printable(&way.name), text::printable(why)])
    });
    let refused: Vec<[String; 2]> = refused.collect();
    if !refused.is_empty() {
        text.push_str("\n\n");
        text.push_str(&list(refused));
    }
    if cfg!(debug_assertions) {
        text.push_str("\n\nThis is a debug build; one with --release is many times faster.");
    }
    text
}

fn row(way: &Way) -> [String; 5] {
    let dash = || "-".to_owned();
    let speed = |figures: &Option<Figures>| match (figures, &way.refused) {
        (Some(figures), _) => {
            let Spread { median, min, max } = figures.gb_per_s;
            format!("{median:.2} ({min:.2}–{max:.2})")
        }
        (None, Some(_)) => "refused".into(),
        (None, None) => dash(),
    };
    let cpu = |figures: &Option<Figures>| {
        figures.as_ref().map_or_else(dash, |f| format!("{:.2}", f.cpu_s_per_gb.median))
    };
    let name = way.name.clone();
    [name, speed(&way.save), cpu(&way.save), speed(&way.load), cpu(&way.load)]
}
