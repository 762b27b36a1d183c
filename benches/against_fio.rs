//! Compares ringstow with fio on the same disk in the same run: durable saves into new files and over those
//! of a removed checkpoint, and cold loads into fresh memory and into existing tensors. fio writes and reads
//! as much through io_uring (fixed buffers, registered file, O_DIRECT, fsync at the end), with several block
//! sizes and depths; the setting with the best median is the one to compare with.
//!
//! ```text
//! cargo bench --bench against_fio -- [--rounds 7] [--gb 3] [--dir DIR] [--small] [--used-memory]
//! ```
//!
//! `--small` uses only tensors of 4 KiB. `--used-memory` fills the page cache before each measurement, so that
//! no memory is free, as on a machine that has been in use (`common::memory`). Each round measures everything
//! once, in random order. Prints the median of the ratios within a round, and its 95 % interval: on a shared
//! disk nothing else is comparable.
//!
//! A load into fresh memory is never faster than the system provides that memory, which fio with its few
//! buffers does not need. On a virtual machine whose host reclaims free memory, this can be slower than the
//! disk. So the bench also measures memory alone, and `--used-memory` removes the host's influence.

mod common;

use common::memory::{PageCache, line_of};
use common::{Args, Result, bench_dir, cpu_seconds, is_in_memory, median, spread};
use fastrand::Rng;
use ringstow::internals::{pool::Mapping, sys::file::drop_page_cache};
use ringstow::{Checkpoint, Config, Disposal, Dtype, LoadOptions, Runtime, StateDict, Target};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

/// Bytes of a transfer and transfers in flight: fio's best settings on different kinds of disk.
const FIO: [(&str, &str); 3] = [("1M", "32"), ("4M", "8"), ("16M", "4")];

struct Options {
    rounds: usize,
    bytes: u64,
    dir: PathBuf,
    small: bool,
    used_memory: bool,
}

/// Reads the command line. `None` in the smoke test, which does not measure disks.
fn options() -> Result<Option<Options>> {
    let Some(mut args) = Args::unless_smoke_test("against_fio") else { return Ok(None) };
    Ok(Some(Options {
        rounds: args.value("--rounds")?.unwrap_or(7),
        bytes: args.bytes(3.0)?,
        dir: args.value("--dir")?.unwrap_or_else(bench_dir),
        small: args.flag("--small"),
        used_memory: args.flag("--used-memory"),
    }))
}

/// What each round measures once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// fio with the setting of this index writes a new file and flushes it.
    FioWrite(usize),
    /// The same over an existing file.
    FioWriteOver(usize),
    /// fio reads, with a cold cache.
    FioRead(usize),
    Save,
    /// Over the files of a checkpoint, including its removal.
    SaveOver,
    /// Into fresh memory.
    Load,
    /// Into existing memory.
    LoadInto,
    /// Fresh memory without reading anything.
    Memory,
}

impl Work {
    fn all() -> Vec<Self> {
        let fio = (0..FIO.len())
            .flat_map(|n| [Self::FioWrite(n), Self::FioWriteOver(n), Self::FioRead(n)]);
        let ours = [Self::Save, Self::SaveOver, Self::Load, Self::LoadInto, Self::Memory];
        fio.chain(ours).collect()
    }

    fn name(self) -> String {
        let fio = |n: usize, what| format!("fio {} x {} {what}", FIO[n].0, FIO[n].1);
        match self {
            Self::FioWrite(n) => fio(n, "write, new file"),
            Self::FioWriteOver(n) => fio(n, "write over a file"),
            Self::FioRead(n) => fio(n, "read"),
            Self::Save => "save, new files".into(),
            Self::SaveOver => "save over a removed checkpoint".into(),
            Self::Load => "load into fresh memory".into(),
            Self::LoadInto => "load into existing tensors".into(),
            Self::Memory => "fresh memory alone".into(),
        }
    }

    /// The fio measurement to compare with.
    fn fio(self) -> Option<fn(usize) -> Self> {
        match self {
            Self::Save => Some(Self::FioWrite),
            Self::SaveOver => Some(Self::FioWriteOver),
            Self::Load | Self::LoadInto | Self::Memory => Some(Self::FioRead),
            _ => None,
        }
    }
}

/// Tensors, the directory, and fio's file of the same size.
struct Lab {
    dir: PathBuf,
    bytes: u64,
    config: Config,
    tensors: Vec<(String, Vec<u8>)>,
    targets: Vec<Vec<u8>>,
    /// Filled before each measurement with `--used-memory`.
    page_cache: Option<PageCache>,
    /// The most memory that a save took beyond its pool.
    extra: u64,
}

impl Lab {
    fn new(options: &Options) -> Result<Self> {
        let dir = options.dir.join("ringstow-against-fio");
        clear(&dir);
        fs::create_dir_all(dir.join("over"))?;
        let tensors = tensors(options.bytes, options.small);
        let targets = tensors.iter().map(|(_, data)| vec![1; data.len()]).collect();
        let config = Config::default();
        let page_cache = options.used_memory.then(|| PageCache::new(&dir)).transpose()?;
        let bytes = options.bytes;
        let lab = Self { dir, bytes, config, tensors, targets, page_cache, extra: 0 };
        // The first round already needs a pool, a checkpoint, and a file to write over.
        lab.save(&lab.kept())?;
        lab.fio("write", 0, &lab.dir.join("over.bin"))?;
        drop(ringstow::load(lab.kept())?);
        Ok(lab)
    }

    /// The checkpoint that is removed, saved over and loaded.
    fn kept(&self) -> PathBuf {
        self.dir.join("over").join("ckpt")
    }

    /// Brings disk and memory into the same state before each measurement.
    fn settle(&mut self) -> Result<()> {
        let _ = Command::new("sync").status();
        self.page_cache.as_mut().map_or(Ok(()), PageCache::fill)
    }

    /// Runs it, and returns the seconds.
    fn time(&mut self, work: Work) -> Result<f64> {
        let (new, over) = (self.dir.join("new"), self.dir.join("over.bin"));
        match work {
            Work::FioWrite(setting) => {
                let seconds = self.fio("write", setting, &self.dir.join("new.bin"));
                clear(&self.dir.join("new.bin"));
                seconds
            }
            Work::FioWriteOver(setting) => self.fio("write", setting, &over),
            Work::FioRead(setting) => self.fio("read", setting, &over),
            Work::Save => {
                let (seconds, extra) = extra_memory(|| self.save(&new.join("ckpt")));
                self.extra = self.extra.max(extra);
                clear(&new);
                seconds
            }
            Work::SaveOver => {
                let started = Instant::now();
                ringstow::remove(self.kept(), Disposal::Recycle)?;
                self.save(&self.kept())?;
                Ok(started.elapsed().as_secs_f64())
            }
            Work::Load => {
                self.forget()?;
                let started = Instant::now();
                let loaded = ringstow::load(self.kept())?;
                let seconds = started.elapsed().as_secs_f64();
                drop(loaded);
                Ok(seconds)
            }
            Work::LoadInto => self.load_into(),
            Work::Memory => fresh_memory(self.bytes),
        }
    }

    fn save(&self, path: &Path) -> Result<f64> {
        let mut state = StateDict::new();
        for (name, data) in &self.tensors {
            state.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
        }
        let started = Instant::now();
        ringstow::Store::new(self.config.clone()).unwrap().save(&state, path)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn load_into(&mut self) -> Result<f64> {
        self.forget()?;
        let (path, runtime) = (self.kept(), Runtime::shared(&self.config)?);
        let targets = self.tensors.iter().zip(&mut self.targets);
        let targets: Vec<_> =
            targets.map(|((name, _), to)| (name.as_str(), Target::new(to))).collect();
        let started = Instant::now();
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.load_into(&targets, LoadOptions::default().on(&runtime, &Default::default()))?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Drops the checkpoint from the page cache.
    fn forget(&self) -> Result<()> {
        for entry in fs::read_dir(self.kept())? {
            drop_page_cache(&File::open(entry?.path())?)?;
        }
        Ok(())
    }

    /// Runs fio on as many bytes, and returns its seconds.
    fn fio(&self, mode: &str, setting: usize, file: &Path) -> Result<f64> {
        let (block, depth) = FIO[setting];
        let output = Command::new("fio")
            .args(["--name=limit", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1"])
            .args(["--registerfiles=1", "--output-format=json"])
            // fio does not count the time to allocate a file, which is most of the work in memory.
            .args(is_in_memory(&self.dir).then_some("--fallocate=none"))
            .args([format!("--bs={block}"), format!("--iodepth={depth}"), format!("--rw={mode}")])
            .args([format!("--size={}", self.bytes.next_multiple_of(16 << 20))])
            .args([format!("--end_fsync={}", u8::from(mode == "write"))])
            .arg(format!("--filename={}", file.display()))
            .output()
            .map_err(|error| {
                format!("fio does not start: {error}; install it (`apt-get install fio`)")
            })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let json = text.find('{').map(|at| &text[at..]).ok_or("fio said nothing")?;
        let report: serde_json::Value = serde_json::from_str(json)?;
        let speed = report["jobs"][0][mode]["bw_bytes"].as_f64().filter(|speed| *speed > 0.0);
        Ok(self.bytes as f64 / speed.ok_or_else(|| format!("fio failed: {text}"))?)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        clear(&self.dir);
    }
}

/// Returns the most memory that this process took while `work` ran, beyond what it had before.
fn extra_memory<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let _ = fs::write("/proc/self/clear_refs", "5"); // resets the high-water mark
    let before = memory("VmRSS");
    let done = work();
    (done, memory("VmHWM").saturating_sub(before))
}

/// Reads a line of /proc/self/status, in bytes: `VmRSS`, `VmHWM`.
fn memory(line: &str) -> u64 {
    line_of("/proc/self/status", line).unwrap_or(0)
}

/// Tensors of a transformer's sizes, or only small ones. All memory is touched.
fn tensors(bytes: u64, small: bool) -> Vec<(String, Vec<u8>)> {
    let sizes = if small { [4096; 5] } else { [67_108_864, 16_777_216, 16_777_216, 16_384, 4096] };
    let mut left = bytes as usize;
    let mut all = Vec::new();
    for number in 0.. {
        let len = sizes[number % 5].min(left);
        if len == 0 {
            return all;
        }
        left -= len;
        // Not zeros, which a disk or file system may handle faster.
        let mut data = vec![0u8; len];
        Rng::with_seed(number as u64).fill(&mut data);
        all.push((format!("layer.{}.part.{}", number / 5, number % 5), data));
    }
    all
}

/// Measures in seconds how fast the system provides memory in the way a load takes it.
fn fresh_memory(bytes: u64) -> Result<f64> {
    let started = Instant::now();
    let mapping = Mapping::new(bytes as usize)?;
    let half = mapping.len() / 2;
    // SAFETY: two halves that nobody else uses.
    #[allow(unsafe_code)]
    thread::scope(|scope| unsafe {
        scope.spawn(|| mapping.prefault(0, half));
        mapping.prefault(half, mapping.len() - half);
    });
    Ok(started.elapsed().as_secs_f64())
}

/// Removes a file or directory, and waits until the disk has settled.
fn clear(path: &Path) {
    let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
    let _ = Command::new("sync").status();
}

/// Seconds and CPU seconds of each round.
type Figures = BTreeMap<Work, Vec<(f64, f64)>>;

fn measure(lab: &mut Lab, rounds: usize) -> Result<Figures> {
    let (mut figures, mut random) = (Figures::new(), Rng::with_seed(lab.bytes));
    let gb = lab.bytes as f64 / 1e9;
    for round in 0..rounds {
        let mut works = Work::all();
        random.shuffle(&mut works);
        for work in works {
            lab.settle()?;
            let before = cpu_seconds();
            let seconds = lab.time(work)?;
            let cpu = cpu_seconds() - before;
            println!("round {round}: {:<34} {:.2} GB/s", work.name(), gb / seconds);
            figures.entry(work).or_default().push((seconds, cpu));
        }
    }
    Ok(figures)
}

/// The speed of each round in GB/s.
fn speeds(figures: &Figures, work: Work, gb: f64) -> Vec<f64> {
    figures[&work].iter().map(|(seconds, _)| gb / seconds).collect()
}

fn tell(figures: &Figures, gb: f64) {
    println!(
        "\n{:<34} {:>21} {:>21}  CPU s/GB",
        "median (95 % interval)", "GB/s", "of the best fio"
    );
    for work in Work::all() {
        let own = speeds(figures, work, gb);
        let (mut ratio, mut cpu) = (String::new(), String::new());
        if let Some(fio) = work.fio() {
            let middle = |n: &usize| median(speeds(figures, fio(*n), gb));
            let best = (0..FIO.len()).max_by(|a, b| middle(a).total_cmp(&middle(b)));
            let best = speeds(figures, fio(best.expect("there are some")), gb);
            ratio = spread(&own.iter().zip(best).map(|(own, fio)| own / fio).collect::<Vec<_>>());
            cpu =
                format!("{:.2}", median(figures[&work].iter().map(|(_, cpu)| cpu / gb).collect()));
        }
        println!("{:<34} {:>21} {ratio:>21}  {cpu}", work.name(), spread(&own));
    }
}

fn main() -> Result<()> {
    let Some(options) = options()? else { return Ok(()) };
    let mut lab = Lab::new(&options)?;
    let figures = measure(&mut lab, options.rounds)?;
    tell(&figures, options.bytes as f64 / 1e9);
    println!(
        "memory beyond tensors and pool: {:.1} MiB at most",
        lab.extra as f64 / f64::from(1 << 20)
    );
    Ok(())
}
