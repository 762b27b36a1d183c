//! `ringstow bench`: how fast durable saves and cold loads are in a directory, beside fio.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::place;
use super::table::{Align, list, table};
use super::{Exit, progress, text};
use crate::config::{Config, EngineChoice, Switch};
use crate::engine::fallback::Fallback;
use crate::engine::io_mode::{EngineKind, IoMode, all_modes};
use crate::error::{Error, Result};
use crate::format::Dtype;
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::state::StateDict;
use crate::store::{Checkpoint, Disposal, LoadOptions, remove_checkpoint, save};
use crate::sys::dir::{free, is_dir, remove};
use crate::sys::file::{drop_page_cache, open_read, read_text};
use clap::Args;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a tensor: a large layer's.
const TENSOR_BYTES: usize = 64 << 20;

/// Bytes of the first save of each way.
const WARM_UP_BYTES: usize = 4096;

/// Space for headers, manifests and the file system's own data, in bytes.
const SLACK_BYTES: u64 = 64 << 20;

/// Measure durable saves and cold loads in a directory, beside fio
///
/// Saves random data and loads it again in each way of doing I/O that --engine, --direct and --fixed
/// allow, by turns. A save ends when everything is on disk; a load begins with nothing in the page cache.
/// Where fio is installed, it writes and reads as much with O_DIRECT, in transfers of the same size and
/// as many at once. Prints medians and ranges. Removes what was written. Loads never need registered
/// memory, so both uring ways load alike.
#[derive(Debug, Args)]
pub struct Bench {
    /// A directory on the disk to measure
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// Gigabytes (10^9 bytes) to save; as much is loaded into memory
    #[arg(long, default_value = "1", value_name = "GB", value_parser = parse_gb)]
    gb: f64,

    /// How often to measure each way
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
    ways: Vec<Way>,
    fio: Way,
}

/// A way of doing I/O, and one sample of each round.
#[derive(Serialize)]
struct Way {
    name: String,
    #[serde(flatten)]
    mode: Option<IoMode>,
    /// Why it is not available here, and what to do about it.
    refused: Option<String>,
    /// What it did otherwise than configured.
    notes: Vec<String>,
    #[serde(serialize_with = "figures")]
    save: Vec<Sample>,
    #[serde(serialize_with = "figures")]
    load: Vec<Sample>,
    /// Kept over the rounds, as in a trainer: its pool is prefaulted and registered. `None`: fio.
    #[serde(skip)]
    runtime: Option<Runtime>,
}

/// One save or load.
struct Sample {
    gb_per_s: f64,
    cpu_s_per_gb: f64,
}

pub fn run(args: &Bench, out: &mut Output) -> Result<Exit> {
    let config = args.config.config()?;
    let bytes = (args.gb * 1e9) as u64;
    let modes = all_modes(&config)?;
    check_fits(&args.dir, bytes, modes.len() as u64 * config.pool_bytes)?;
    let measured = measure(args, config, &modes, bytes)?;
    out.print(args.json, &measured, || render(&measured))?;
    let any = measured.ways.iter().any(|way| way.refused.is_none());
    Ok(if any { Exit::Ok } else { Exit::Failed })
}

/// What is saved, and where.
#[derive(Clone, Copy)]
struct Work<'a> {
    data: &'a [u8],
    path: &'a Path,
    config: &'a Config,
}

/// Measures in a directory of its own, and removes that.
fn measure(args: &Bench, config: Config, modes: &[IoMode], bytes: u64) -> Result<Measured> {
    let mut data = vec![0; bytes as usize];
    fastrand::fill(&mut data);
    let dir = tempfile::Builder::new()
        .prefix(".ringstow-bench-")
        .tempdir_in(&args.dir)
        .map_err(|e| Error::io("creating a directory in", &args.dir, e))?;
    // Its name is unique: stripe directories, which others use as well, get a directory of that name.
    let path = dir.path().join(dir.path().file_name().unwrap_or("checkpoint".as_ref()));
    let work = Work { data: &data, path: &path, config: &config };
    let ways = modes.iter().map(|mode| Way::on(*mode, &config));
    let mut ways = ways.chain([Ok(Way::fio())]).collect::<Result<Vec<Way>>>()?;
    let done = rounds(&mut ways, work, args.rounds);
    // After an error, stripe directories may still hold files.
    done.and(clear(&path, &config))?;
    dir.close().map_err(|e| Error::io("removing the bench's files in", &args.dir, e))?;
    let fio = ways.pop().expect("it is the last");
    Ok(Measured { dir: args.dir.clone(), bytes, rounds: args.rounds, config, ways, fio })
}

/// Measures all ways by turns, after a small save that shows whether a way is available.
fn rounds(ways: &mut [Way], work: Work, rounds: u16) -> Result<()> {
    let small = Work { data: &work.data[..work.data.len().min(WARM_UP_BYTES)], ..work };
    for way in ways.iter_mut() {
        match progress::watch("warming up", true, |job| way.save(small, job)) {
            Err(error @ Error::Unsupported { .. }) => way.refused = Some(error.to_string()),
            done => _ = done?,
        }
        clear(work.path, work.config)?;
    }
    for round in 1..=rounds {
        for way in ways.iter_mut().filter(|way| way.refused.is_none()) {
            let label = |what| format!("{what} {round}/{rounds}: {}", way.name);
            let (save, load) = (label("save"), label("load"));
            let saved = progress::watch(&save, false, |job| way.save(work, job))?;
            let loaded = progress::watch(&load, false, |job| way.load(work, job))?;
            way.save.push(saved);
            way.load.push(loaded);
            clear(work.path, work.config)?;
        }
    }
    Ok(())
}

impl Way {
    /// Uses this mode alone.
    fn on(mode: IoMode, config: &Config) -> Result<Self> {
        let switch = |on| if on { Switch::On } else { Switch::Off };
        let engine = match mode.engine {
            EngineKind::Uring => EngineChoice::Uring,
            EngineKind::Portable => EngineChoice::Portable,
            EngineKind::TokioUring => EngineChoice::TokioUring,
        };
        let (fixed, direct) = (switch(mode.fixed), switch(mode.direct));
        let runtime = Runtime::new(Config { engine, fixed, direct, ..config.clone() })?;
        let (name, mode) = (mode.to_string(), Some(mode));
        Ok(Self { name, mode, runtime: Some(runtime), ..Self::fio() })
    }

    fn fio() -> Self {
        let (notes, save, load) = (Vec::new(), Vec::new(), Vec::new());
        let name = "fio, O_DIRECT".into();
        Self { name, mode: None, refused: None, notes, save, load, runtime: None }
    }

    fn save(&mut self, work: Work, job: &Arc<Job>) -> Result<Sample> {
        let Some(runtime) = &self.runtime else { return fio("write", work) };
        let mut state = StateDict::new();
        for (number, data) in work.data.chunks(TENSOR_BYTES).enumerate() {
            state.bytes(format!("tensor.{number}"), Dtype::U8, &[data.len() as u64], data)?;
        }
        let (report, sample) = timed(work, || save(runtime, &state, work.path, job))?;
        self.note(&report.moved.fallbacks);
        Ok(sample)
    }

    fn load(&mut self, work: Work, job: &Arc<Job>) -> Result<Sample> {
        let Some(runtime) = &self.runtime else { return fio("read", work) };
        for path in Checkpoint::open_with(work.path, work.config)?.shard_paths() {
            open_read(path, false)
                .and_then(|file| drop_page_cache(&file))
                .map_err(|e| Error::io("dropping from the page cache", path, e))?;
        }
        let (loaded, sample) = timed(work, || {
            let checkpoint = Checkpoint::open_with(work.path, work.config)?;
            let names = checkpoint.tensors().iter().map(|tensor| &tensor.name);
            checkpoint.load_names(names, LoadOptions::default().on(runtime, job))
        })?;
        self.note(&loaded.report.moved.fallbacks);
        Ok(sample)
    }

    fn note(&mut self, fallbacks: &[Fallback]) {
        for Fallback { wanted, got, reason, remedy } in fallbacks {
            let note = format!("{got} instead of {wanted}: {reason}; {remedy}");
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }
}

/// One pass of fio over a file.
///
/// # Errors
/// [`Error::Unsupported`] if fio is missing or fails, [`Error::Cancelled`].
fn fio(mode: &str, work: Work) -> Result<Sample> {
    let unsupported = |what, remedy: &str| Error::Unsupported { what, remedy: remedy.into() };
    let Config { block_bytes, queue_depth, .. } = work.config;
    let bytes = work.data.len().next_multiple_of(*block_bytes as usize);
    let output = Command::new("fio")
        .args(["--name=ringstow", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .args(["--fixedbufs=1", "--registerfiles=1", "--end_fsync=1", &format!("--rw={mode}")])
        .args([format!("--bs={block_bytes}"), format!("--iodepth={queue_depth}")])
        .args([format!("--size={bytes}"), format!("--filename={}", work.path.display())])
        .output();
    let output = output.map_err(|e| {
        unsupported(format!("fio does not start: {e}"), "install it (`apt-get install fio`)")
    })?;
    if progress::is_interrupted() {
        return Err(Error::Cancelled { path: work.path.into() });
    }
    let said = String::from_utf8_lossy(&output.stdout);
    let report = said.find('{').and_then(|at| serde_json::from_str(&said[at..]).ok());
    let job = report.map_or(Value::Null, |mut report: Value| report["jobs"][0].take());
    let figure = |value: &Value| value.as_f64().filter(|value| *value > 0.0);
    let rate = figure(&job[mode]["bw_bytes"]).filter(|_| output.status.success());
    let Some((rate, ms)) = rate.zip(figure(&job["job_runtime"])) else {
        let said = String::from_utf8_lossy(&output.stderr);
        let reason = format!("fio fails here: {}", said.lines().next().unwrap_or_default());
        return Err(unsupported(reason, "run it there by hand"));
    };
    let cpu_percent =
        job["usr_cpu"].as_f64().unwrap_or(0.0) + job["sys_cpu"].as_f64().unwrap_or(0.0);
    let cpu_s_per_gb = cpu_percent / 100.0 * ms / 1e3 / (bytes as f64 / 1e9);
    Ok(Sample { gb_per_s: rate / 1e9, cpu_s_per_gb })
}

/// Removes the checkpoint, or fio's file, if it exists.
fn clear(path: &Path, config: &Config) -> Result<()> {
    if is_dir(path) {
        return match remove_checkpoint(path, Disposal::Remove, config) {
            Ok(_) => Ok(()),
            Err(error) if error.is_incomplete() => Ok(()),
            Err(error) => Err(error),
        };
    }
    remove(path)
}

/// Times a save or load.
fn timed<T>(work: Work, act: impl FnOnce() -> Result<T>) -> Result<(T, Sample)> {
    let (cpu, started) = (cpu_s(), Instant::now());
    let done = act()?;
    let (gb, seconds) = (work.data.len() as f64 / 1e9, started.elapsed().as_secs_f64());
    let cpu_s_per_gb = (cpu_s() - cpu) / gb;
    Ok((done, Sample { gb_per_s: gb / seconds.max(1e-9), cpu_s_per_gb }))
}

/// Processor seconds of this process so far, in user space and in the kernel.
fn cpu_s() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e6
    })
}

/// Writes `null` for a way that was refused.
fn figures<S: Serializer>(samples: &[Sample], to: S) -> std::result::Result<S::Ok, S::Error> {
    let [rate, cpu] = [spread(samples, |s| s.gb_per_s), spread(samples, |s| s.cpu_s_per_gb)];
    rate.zip(cpu).map(|(rate, cpu)| json!({"gb_per_s": rate, "cpu_s_per_gb": cpu})).serialize(to)
}

#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

/// `None` without samples.
fn spread(samples: &[Sample], figure: impl Fn(&Sample) -> f64) -> Option<Spread> {
    let mut values: Vec<f64> = samples.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    let (min, max) = (*values.first()?, *values.last()?);
    let median = (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0;
    Some(Spread { median, min, max })
}

/// Refuses what the disk or the memory has no space for: the data, what is loaded, and the pools.
fn check_fits(dir: &Path, bytes: u64, pools: u64) -> Result<()> {
    // A file system that reports no size reports no free space either.
    let disk = free(dir).map_err(|e| Error::io("looking at", dir, e))?.unwrap_or(u64::MAX);
    let memory = available_memory().unwrap_or(u64::MAX);
    for (what, free, needed) in [
        (format!("{} has", dir.display()), disk, bytes.saturating_add(SLACK_BYTES)),
        ("the memory has".into(), memory, bytes.saturating_mul(2).saturating_add(pools)),
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
    let meminfo = read_text("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

fn parse_gb(text: &str) -> std::result::Result<f64, String> {
    let gb = text.parse().ok().filter(|gb| (1e-6..=1e6).contains(gb));
    gb.ok_or_else(|| "a number of gigabytes: 0.5, 4".into())
}

fn render(measured: &Measured) -> String {
    use Align::{Left, Right};
    let Config { block_bytes, queue_depth, pool_bytes, .. } = measured.config;
    let columns = [
        ("", Left),
        ("SAVE GB/s", Right),
        ("CPU s/GB", Right),
        ("LOAD GB/s", Right),
        ("CPU s/GB", Right),
    ];
    let ways = || measured.ways.iter().chain([&measured.fio]);
    let mut text = format!(
        "{}: {}, median of {} (min–max)\nblocks of {}, queue depth {queue_depth}, pool {}\n\n{}",
        text::path(&measured.dir),
        text::size(measured.bytes),
        text::count(measured.rounds.into(), "round"),
        text::binary_size(block_bytes),
        text::binary_size(pool_bytes),
        table(columns, ways().map(row))
    );
    let notes: Vec<[String; 2]> = ways()
        .flat_map(|way| way.refused.iter().chain(&way.notes).map(|note| (&way.name, note)))
        .map(|(name, note)| [text::printable(name), text::printable(note)])
        .collect();
    if !notes.is_empty() {
        text += &format!("\n\n{}", list(notes));
    }
    if cfg!(debug_assertions) {
        text += "\n\nThis is a debug build; one with --release is many times faster.";
    }
    text
}

fn row(way: &Way) -> [String; 5] {
    let cells =
        |samples| match (spread(samples, |s| s.gb_per_s), spread(samples, |s| s.cpu_s_per_gb)) {
            (Some(Spread { median, min, max }), Some(cpu)) => {
                [format!("{median:.2} ({min:.2}–{max:.2})"), format!("{:.2}", cpu.median)]
            }
            _ => ["refused".into(), "-".into()],
        };
    let ([save, save_cpu], [load, load_cpu]) = (cells(&way.save), cells(&way.load));
    [way.name.clone(), save, save_cpu, load, load_cpu]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_an_even_count_is_between_the_middle_two() {
        let sample = |gb_per_s| Sample { gb_per_s, cpu_s_per_gb: 0.0 };
        let Spread { median, min, max } =
            spread(&[4.0, 1.0, 3.0, 2.0].map(sample), |s| s.gb_per_s).unwrap();
        assert_eq!((median, min, max), (2.5, 1.0, 4.0));
        assert!(spread(&[], |s| s.gb_per_s).is_none());
    }
}
