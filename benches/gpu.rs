//! Measures how fast tensors leave a GPU and come back: large copies alone; saves that skip the disk
//! (`fake_engines::AtOnce::null`); durable saves and cold loads, beside the same with tensors in host memory.
//!
//! ```text
//! cargo bench --bench gpu -- [--gpu 0] [--gb 1] [--rounds 5] [--dir DIR] [--copies-only] [--json]
//! ```
//!
//! `--copies-only` leaves the disk out. The configuration comes from `RINGSTOW_*` and `ringstow.toml`, without
//! `stripe`. Prints the median of the rounds and their range; a ratio compares within one round. Skips, with a
//! message, where there is no GPU, unless `--gpu` names one.

mod common;

use common::{Args, Result, bench_dir, median};
use fake_engines::AtOnce;
use ringstow::internals::{
    device::cuda::{Device, DeviceMemory, Direction, LargeCopy, Rates, Ready, measure},
    store::save,
    sys::file::drop_page_cache,
};
use ringstow::{
    Checkpoint, Config, Dtype, LoadOptions, Runtime, SaveReport, StateDict, Target, TensorInfo,
};
use serde::Serialize;
use std::fmt;
use std::fs::{File, remove_dir_all};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a tensor: a large layer's.
const TENSOR_BYTES: usize = 64 << 20;

/// Bytes of one large copy.
const COPIED_BYTES: usize = 256 << 20;

/// What to measure.
pub(crate) struct Options {
    pub(crate) gpu: u32,
    pub(crate) bytes: usize,
    pub(crate) rounds: usize,
    pub(crate) dir: PathBuf,
    pub(crate) copies_only: bool,
    pub(crate) config: Config,
}

/// All figures.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) gpu: Copies,
    /// `None` with `--copies-only`.
    pub(crate) save: Option<BesideHost>,
    pub(crate) load: Option<BesideHost>,
}

/// What the GPU's copies reach, whatever the disk does.
#[derive(Debug, Serialize)]
pub(crate) struct Copies {
    pub(crate) ordinal: u32,
    pub(crate) name: String,
    /// One large copy at a time.
    pub(crate) copies_gb_per_s: Rates,
    /// A save that skips the disk, from the first byte copied to the last one "written".
    pub(crate) to_nowhere_gb_per_s: Spread,
    /// The same over one large pinned copy in the same round. `None` if the driver pins nothing.
    pub(crate) to_nowhere_of_large_copy: Option<Spread>,
}

/// Durable saves, or cold loads, with tensors on the GPU and in host memory.
#[derive(Debug, Serialize)]
pub(crate) struct BesideHost {
    pub(crate) gpu_gb_per_s: Spread,
    pub(crate) host_gb_per_s: Spread,
    /// The first over the second, in the same round.
    pub(crate) gpu_of_host: Spread,
    /// The GPU's copies, as it timed them.
    pub(crate) copies_gb_per_s: Spread,
}

/// A figure over the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Of at least one value.
    fn of(values: Vec<f64>) -> Self {
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(0.0, f64::max);
        Self { median: median(values), min, max }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, min, max } = self;
        write!(f, "{median:.2} ({min:.2}–{max:.2})")
    }
}

/// Where tensors are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Gpu,
    Host,
}

/// The same tensors in both places.
struct Tensors {
    /// The sources of a save share them only while it runs.
    gpu: Vec<Arc<DeviceMemory>>,
    host: Vec<Vec<u8>>,
}

impl Tensors {
    fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let mut tensors = Self { gpu: Vec::new(), host: Vec::new() };
        for begin in (0..bytes).step_by(TENSOR_BYTES) {
            let mut data = vec![0; TENSOR_BYTES.min(bytes - begin)];
            fastrand::fill(&mut data);
            let mut memory = DeviceMemory::new(device, data.len())?;
            memory.fill(&data)?;
            tensors.gpu.push(Arc::new(memory));
            tensors.host.push(data);
        }
        Ok(tensors)
    }

    fn state(&self, place: Place) -> Result<StateDict<'_>> {
        let (mut state, mut ready) = (StateDict::new(), Ready::default());
        for (number, (memory, data)) in self.gpu.iter().zip(&self.host).enumerate() {
            let (name, shape) = (number.to_string(), vec![data.len() as u64]);
            match place {
                Place::Gpu => {
                    let info = TensorInfo { name, dtype: Dtype::U8, shape };
                    state.source(info, memory.source(&mut ready)?);
                }
                Place::Host => drop(state.bytes(name, Dtype::U8, &shape, data)?),
            }
        }
        Ok(state)
    }

    fn targets(&mut self, place: Place) -> Result<Vec<(String, Target<'_>)>> {
        let mut ready = Ready::default();
        let tensors = self.gpu.iter_mut().zip(&mut self.host).enumerate();
        let targets = tensors.map(|(number, (memory, data))| {
            let memory = Arc::get_mut(memory).expect("no save runs");
            let target = match place {
                Place::Gpu => memory.target(&mut ready)?,
                Place::Host => Target::new(data),
            };
            Ok((number.to_string(), target))
        });
        targets.collect()
    }

    /// Saves into a new directory.
    fn save(&self, place: Place, runtime: &Runtime, path: &Path) -> Result<SaveReport> {
        Ok(save(runtime, &self.state(place)?, path, &Arc::default())?)
    }
}

/// GB/s of each round, and of the GPU's copies in it.
#[derive(Default)]
struct Rounds {
    gpu: Vec<f64>,
    host: Vec<f64>,
    copies: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, place: Place, rate: f64, copies: f64) {
        match place {
            Place::Gpu => (self.gpu.push(rate), self.copies.push(copies)),
            Place::Host => (self.host.push(rate), ()),
        };
    }

    fn beside_host(self) -> BesideHost {
        let ratios = self.gpu.iter().zip(&self.host).map(|(gpu, host)| gpu / host).collect();
        BesideHost {
            gpu_gb_per_s: Spread::of(self.gpu),
            host_gb_per_s: Spread::of(self.host),
            gpu_of_host: Spread::of(ratios),
            copies_gb_per_s: Spread::of(self.copies),
        }
    }
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / 1e9 / seconds.max(1e-9)
}

/// Measures in a directory of its own, and removes that.
///
/// # Errors
/// What the driver, a save or a load fails with.
pub(crate) fn run(options: &Options) -> Result<Measured> {
    let device = Device::get(options.gpu)?;
    let work = tempfile::Builder::new().prefix(".ringstow-bench-").tempdir_in(&options.dir)?;
    let path = work.path().join("checkpoint");
    let mut tensors = Tensors::new(&device, options.bytes)?;
    let gpu = copies(&device, &tensors, options, &path)?;
    let (mut save, mut load) = (None, None);
    if !options.copies_only {
        let (saves, loads) = disk(&mut tensors, options, &path)?;
        (save, load) = (Some(saves), Some(loads));
    }
    Ok(Measured { gpu, save, load })
}

/// Measures large copies, and saves that skip the disk beside them.
fn copies(
    device: &Arc<Device>,
    tensors: &Tensors,
    options: &Options,
    path: &Path,
) -> Result<Copies> {
    let copies_gb_per_s = measure(device, COPIED_BYTES)?;
    let mut large = LargeCopy::new(device, COPIED_BYTES)?;
    let is_pinned = copies_gb_per_s.to_host_pinned.is_some();
    if is_pinned {
        large.pin()?;
    }
    let depth = options.config.queue_depth as usize;
    let nowhere = Arc::new(move || Ok(Box::new(AtOnce::null(depth)) as _));
    let nowhere = Runtime::with_engine(options.config.clone(), nowhere)?;
    let save = || -> Result<f64> {
        let report = tensors.save(Place::Gpu, &nowhere, path)?;
        remove_dir_all(path)?;
        Ok(rate(report.moved.device_bytes, report.seconds.write))
    };
    save()?; // takes and pins the pool
    let (mut rates, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        rates.push(save()?);
        ratios.push(rates[rates.len() - 1] / large.best_rate(Direction::ToHost)?);
    }
    Ok(Copies {
        ordinal: device.ordinal(),
        name: device.name().into(),
        copies_gb_per_s,
        to_nowhere_gb_per_s: Spread::of(rates),
        to_nowhere_of_large_copy: is_pinned.then(|| Spread::of(ratios)),
    })
}

/// Measures saves and loads, by turns from and into both places.
fn disk(tensors: &mut Tensors, options: &Options, path: &Path) -> Result<(BesideHost, BesideHost)> {
    let runtime = Runtime::new(options.config.clone())?;
    tensors.save(Place::Gpu, &runtime, path)?; // takes and pins the pool
    remove_dir_all(path)?;
    let (mut saves, mut loads) = (Rounds::default(), Rounds::default());
    for _ in 0..options.rounds {
        for place in [Place::Host, Place::Gpu] {
            let started = Instant::now();
            let report = tensors.save(place, &runtime, path)?;
            let saved = rate(report.tensor_bytes, started.elapsed().as_secs_f64());
            let copies = rate(report.moved.device_bytes, report.seconds.device_copy);
            saves.add(place, saved, copies);

            let checkpoint = Checkpoint::open(path)?;
            for shard in checkpoint.shard_paths() {
                drop_page_cache(&File::open(shard)?)?;
            }
            let targets = tensors.targets(place)?;
            let started = Instant::now();
            let report = checkpoint
                .load_into(&targets, LoadOptions::default().on(&runtime, &Arc::default()))?;
            let loaded = rate(report.tensor_bytes, started.elapsed().as_secs_f64());
            let copies = rate(report.moved.device_bytes, report.seconds.device_copy);
            loads.add(place, loaded, copies);
            remove_dir_all(path)?;
        }
    }
    Ok((saves.beside_host(), loads.beside_host()))
}

fn print(measured: &Measured) {
    let Measured { gpu, save, load } = measured;
    let rates = gpu.copies_gb_per_s;
    let pinned = |rate: Option<f64>| rate.map_or("refused".into(), |rate| format!("{rate:.1}"));
    let ratio = gpu.to_nowhere_of_large_copy.as_ref().map_or("-".into(), Spread::to_string);
    println!("GPU {}: {}, GB/s as median (min–max)", gpu.ordinal, gpu.name);
    for (direction, fast, slow) in [
        ("to host", rates.to_host_pinned, rates.to_host_pageable),
        ("from host", rates.to_device_pinned, rates.to_device_pageable),
    ] {
        println!("one large copy {direction:<9}  {} pinned, {slow:.1} pageable", pinned(fast));
    }
    println!("save, no disk    {}, of one large pinned copy {ratio}", gpu.to_nowhere_gb_per_s);
    for (what, figures) in [("save", save), ("load", load)] {
        if let Some(BesideHost { gpu_gb_per_s, host_gb_per_s, gpu_of_host, copies_gb_per_s }) =
            figures
        {
            println!(
                "{what}  GPU {gpu_gb_per_s}, host {host_gb_per_s}, ratio {gpu_of_host}, the GPU's copies \
                 {copies_gb_per_s}"
            );
        }
    }
}

fn main() -> Result<()> {
    let Some(mut args) = Args::unless_smoke_test("gpu") else { return Ok(()) };
    let named: Option<u32> = args.value("--gpu")?;
    let options = Options {
        gpu: named.unwrap_or(0),
        bytes: args.bytes(1.0)? as usize,
        rounds: args.value("--rounds")?.unwrap_or(5).max(1),
        dir: args.value("--dir")?.unwrap_or_else(bench_dir),
        copies_only: args.flag("--copies-only"),
        config: Config { stripe: Vec::new(), ..Config::found()? },
    };
    let as_json = args.flag("--json");
    if let (None, Err(why)) = (named, Device::get(0)) {
        println!("skipped: {why}");
        return Ok(());
    }
    let measured = run(&options)?;
    match as_json {
        true => println!("{}", serde_json::to_string_pretty(&measured)?),
        false => print(&measured),
    }
    Ok(())
}
