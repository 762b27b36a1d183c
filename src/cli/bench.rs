//! `ringstow bench`: how fast durable saves and cold loads are in a directory, beside fio.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::place;
use super::table::{list, table};
use super::{Exit, progress, text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::Dtype;
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::state::StateDict;
use crate::store::{Disposal, LoadOptions, OpenOptions, remove_checkpoint, save};
use crate::sys::dir::{is_dir, remove};
use crate::sys::file::{drop_page_cache, open_read, read_kernel_text};
use crate::sys::space::free_at;
use clap::Args;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a tensor: a large layer's.
const TENSOR_BYTES: usize = 64 << 20;

/// Space for headers, manifests and the file system's own data, in bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Measure durable saves and cold loads in a directory, beside fio
///
/// Saves random data and loads it again. A save ends when everything is on disk; a load begins with nothing
/// in the page cache. Where fio is installed, it writes and reads as much by turns, with O_DIRECT, in
/// transfers of the same size and as many at once. Prints medians and ranges. Removes what was written.
#[derive(Debug, Args)]
pub struct Bench {
    /// A directory on the disk to measure
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// Gigabytes (10^9 bytes) to save; as much is loaded into memory
    #[arg(long, default_value = "1", value_name = "GB", value_parser = parse_gb)]
    gb: f64,

    /// How often to measure
    #[arg(long, default_value = "3", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Serialize)]
struct Measured {
    #[serde(with = "crate::path_text")]
    dir: PathBuf,
    bytes: u64,
    rounds: u16,
    config: Config,
    ringstow: Rates,
    /// How ringstow moved the bytes of the last save.
    moved: Option<Moved>,
    fio: Rates,
    /// Why fio was not measured, and what to do about it.
    fio_refused: Option<String>,
}

/// GB/s of each round; in JSON the median and the range.
#[derive(Default, Serialize)]
struct Rates {
    #[serde(serialize_with = "as_spread")]
    save: Vec<f64>,
    #[serde(serialize_with = "as_spread")]
    load: Vec<f64>,
}

pub fn run(args: &Bench, out: &mut Output) -> Result<Exit> {
    let config = args.config.config()?;
    let bytes = (args.gb * 1e9) as u64;
    check_fits(&args.dir, bytes, config.staging_bytes())?;
    let measured = measure(args, config, bytes)?;
    out.print(args.json, &measured, || render(&measured))?;
    Ok(Exit::Success)
}

/// Measures in a directory of its own, and removes that.
fn measure(args: &Bench, config: Config, bytes: u64) -> Result<Measured> {
    let mut data = vec![0; bytes as usize];
    fastrand::fill(&mut data);
    let dir = tempfile::Builder::new()
        .prefix(".ringstow-bench-")
        .tempdir_in(&args.dir)
        .map_err(|e| Error::io("creating a directory in", &args.dir, e))?;
    // Its name is unique: stripe directories, which others use as well, get a directory of that name.
    let path = dir.path().join(dir.path().file_name().unwrap_or("checkpoint".as_ref()));
    // Kept over the rounds, as in a trainer.
    let runtime = Runtime::new(config.clone())?;
    let work = Work { data: &data, path: &path, runtime: &runtime };
    let mut measured = Measured {
        dir: args.dir.clone(),
        bytes,
        rounds: args.rounds,
        config,
        ringstow: Rates::default(),
        moved: None,
        fio: Rates::default(),
        fio_refused: None,
    };
    let done = (1..=args.rounds).try_for_each(|round| measured.round(round, work));
    // After an error, stripe directories may still hold files.
    done.and(work.clear())?;
    dir.close().map_err(|e| Error::io("removing the bench's files in", &args.dir, e))?;
    Ok(measured)
}

impl Measured {
    fn round(&mut self, round: u16, work: Work) -> Result<()> {
        let label = |what| format!("{what} {round}/{}", self.rounds);
        let (save, load, fio) = (label("save"), label("load"), label("fio"));
        let config = work.runtime.config();
        let (moved, rate) = progress::watch(&save, false, config, |job| work.save(job))?;
        self.moved = Some(moved);
        self.ringstow.save.push(rate);
        self.ringstow.load.push(progress::watch(&load, false, config, |job| work.load(job))?);
        work.clear()?;
        if self.fio_refused.is_some() {
            return Ok(());
        }
        match progress::watch(&fio, false, config, |_| Ok((work.fio("write")?, work.fio("read")?)))
        {
            Ok((save, load)) => {
                self.fio.save.push(save);
                self.fio.load.push(load);
            }
            Err(error @ Error::Unsupported { .. }) => self.fio_refused = Some(error.to_string()),
            Err(error) => return Err(error),
        }
        work.clear()
    }
}

/// What is saved, where and how.
#[derive(Clone, Copy)]
struct Work<'a> {
    data: &'a [u8],
    path: &'a Path,
    runtime: &'a Runtime,
}

impl Work<'_> {
    fn save(self, job: &Arc<Job>) -> Result<(Moved, f64)> {
        let mut state = StateDict::new();
        for (number, data) in self.data.chunks(TENSOR_BYTES).enumerate() {
            state.bytes(format!("tensor.{number}"), Dtype::U8, &[data.len() as u64], data)?;
        }
        let (report, rate) = self.timed(|| save(self.runtime, &state, self.path, job))?;
        Ok((report.moved, rate))
    }

    fn load(self, job: &Arc<Job>) -> Result<f64> {
        let open = || OpenOptions::of(self.runtime.config()).open(self.path);
        for path in open()?.shard_paths() {
            open_read(path, false)
                .and_then(|file| drop_page_cache(&file))
                .map_err(|e| Error::io("dropping from the page cache", path, e))?;
        }
        let (_, rate) = self.timed(|| {
            let checkpoint = open()?;
            let names = checkpoint.tensors().iter().map(|tensor| &tensor.name);
            checkpoint.load_names(names, LoadOptions::default().on(self.runtime, job))
        })?;
        Ok(rate)
    }

    /// The result, and the GB/s.
    fn timed<T>(self, act: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
        let started = Instant::now();
        let done = act()?;
        Ok((done, self.data.len() as f64 / 1e9 / started.elapsed().as_secs_f64().max(1e-9)))
    }

    /// The GB/s of one pass of fio over a file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if fio is missing or fails, [`Error::Cancelled`].
    fn fio(self, mode: &str) -> Result<f64> {
        let unsupported = |what, remedy: &str| Error::Unsupported { what, remedy: remedy.into() };
        let Config { block_bytes, queue_depth, .. } = self.runtime.config();
        let bytes = self.data.len().next_multiple_of(*block_bytes as usize);
        let output = Command::new("fio")
            .args(["--name=ringstow", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
            .args(["--fixedbufs=1", "--registerfiles=1", "--end_fsync=1", &format!("--rw={mode}")])
            .args([format!("--bs={block_bytes}"), format!("--iodepth={queue_depth}")])
            .args([format!("--size={bytes}"), format!("--filename={}", self.path.display())])
            .output();
        let output = output.map_err(|e| {
            unsupported(format!("fio does not start: {e}"), "install it (`apt-get install fio`)")
        })?;
        if progress::is_interrupted() {
            return Err(Error::Cancelled { path: self.path.into() });
        }
        let printed = String::from_utf8_lossy(&output.stdout);
        let report = printed.find('{').and_then(|at| serde_json::from_str(&printed[at..]).ok());
        let rate = report.and_then(|report: Value| report["jobs"][0][mode]["bw_bytes"].as_f64());
        rate.filter(|rate| *rate > 0.0 && output.status.success())
            .map(|rate| rate / 1e9)
            .ok_or_else(|| {
                let errors = String::from_utf8_lossy(&output.stderr);
                let reason =
                    format!("fio fails here: {}", errors.lines().next().unwrap_or_default());
                unsupported(reason, "run it there by hand")
            })
    }

    /// Removes the checkpoint, or fio's file, if it exists.
    fn clear(self) -> Result<()> {
        if !is_dir(self.path) {
            return remove(self.path);
        }
        match remove_checkpoint(self.path, Disposal::Remove, self.runtime.config()) {
            Err(error) if !error.is_incomplete() => Err(error),
            _ => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// `None` without samples.
    fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let median = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Self { median, min, max })
    }
}

/// Writes `null` without samples.
fn as_spread<S: Serializer>(samples: &[f64], to: S) -> std::result::Result<S::Ok, S::Error> {
    Spread::of(samples).serialize(to)
}

/// Refuses what the disk or the memory has no space for: the data, what is loaded, and the pool.
fn check_fits(dir: &Path, bytes: u64, pool_bytes: u64) -> Result<()> {
    // A file system that reports no size reports no free space either.
    let disk = free_at(dir).map_err(|e| Error::io("looking at", dir, e))?.unwrap_or(u64::MAX);
    let memory = available_memory().unwrap_or(u64::MAX);
    for (what, free, needed) in [
        (format!("{} has", dir.display()), disk, bytes.saturating_add(SLACK_BYTES)),
        ("the memory has".into(), memory, bytes.saturating_mul(2).saturating_add(pool_bytes)),
    ] {
        if free < needed {
            let (free, needed) = (text::size(free), text::size(needed));
            return Err(Error::invalid(format!(
                "{what} {free} available, and this needs {needed}; measure less with --gb"
            )));
        }
    }
    Ok(())
}

/// Unknown off Linux.
fn available_memory() -> Option<u64> {
    let meminfo = read_kernel_text("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

fn parse_gb(text: &str) -> std::result::Result<f64, String> {
    let gb = text.parse().ok().filter(|gb| (1e-6..=1e6).contains(gb));
    gb.ok_or_else(|| "a number of gigabytes: 0.5, 4".into())
}

fn render(measured: &Measured) -> String {
    let Config { block_bytes, queue_depth, .. } = measured.config;
    let mode = measured.moved.as_ref().map_or_else(String::new, |moved| {
        let fixed = if moved.fixed_buffers > 0 { ", fixed buffers" } else { "" };
        format!("{}{fixed}, {}", moved.engine, if moved.direct { "O_DIRECT" } else { "buffered" })
    });
    let mut text = format!(
        "{}: {}, median of {} (min–max)\nblocks of {}, queue depth {queue_depth}, pool {}\n\n{}",
        text::path(&measured.dir),
        text::size(measured.bytes),
        text::count(measured.rounds.into(), "round"),
        text::binary_size(block_bytes),
        text::binary_size(measured.config.staging_bytes()),
        table(
            ["<", ">SAVE GB/s", ">LOAD GB/s"],
            [
                row(format!("ringstow: {mode}"), &measured.ringstow),
                row("fio: uring, fixed buffers, O_DIRECT".into(), &measured.fio),
            ]
        )
    );
    if let Some(why) = &measured.fio_refused {
        text += &format!("\n\n{}", list([["fio".into(), text::printable(why)]]));
    }
    if cfg!(debug_assertions) {
        text += "\n\nThis is a debug build; one with --release is many times faster.";
    }
    text
}

fn row(name: String, rates: &Rates) -> [String; 3] {
    let cell = |samples: &[f64]| match Spread::of(samples) {
        Some(Spread { median, min, max }) => format!("{median:.2} ({min:.2}–{max:.2})"),
        None => "refused".into(),
    };
    [name, cell(&rates.save), cell(&rates.load)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_an_even_count_is_between_the_middle_two() {
        let Spread { median, min, max } = Spread::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((median, min, max), (2.5, 1.0, 4.0));
        assert!(Spread::of(&[]).is_none());
    }
}
