//! Saves and loads against the clock.

use super::super::progress;
use super::gpu::GpuTensors;
use super::{Figures, OfHost, Spread, Way};
use crate::config::Config;
use crate::device::Target;
use crate::engine::ladder::{Fallback, Rung};
use crate::error::{Error, Result};
use crate::format::Dtype;
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::state::StateDict;
use crate::store::{Checkpoint, Disposal, LoadOptions, retire_with, save};
use crate::sys::file::drop_page_cache;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::Serialize;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a tensor: a large layer's.
pub(super) const TENSOR_BYTES: usize = 64 << 20;

/// Where tensors are: saved from there and loaded to there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Place {
    /// Saved from host memory, loaded into host memory that is new each time.
    Fresh,
    /// In host memory, both ways.
    Host,
    /// In a GPU's memory, both ways.
    Gpu,
}

/// All that is saved from and loaded into.
pub(super) struct Memory {
    data: Vec<u8>,
    /// What `Place::Host` loads into.
    into: Vec<u8>,
    gpu: Option<GpuTensors>,
}

impl Memory {
    /// Random data in host memory and, where there is to be one, on the GPU.
    ///
    /// # Errors
    /// When the GPU has not so much.
    pub fn new(bytes: u64, gpu: Option<GpuTensors>) -> Result<Self> {
        let data = progress::watch("making random data", true, |_| noise(bytes as usize));
        let into = gpu.as_ref().map_or_else(Vec::new, |_| data.clone());
        let mut memory = Self { data, into, gpu };
        if let Some(gpu) = &mut memory.gpu {
            gpu.fill(&memory.data)?;
        }
        Ok(memory)
    }

    /// The GPU's part.
    pub fn gpu(&self) -> Option<&GpuTensors> {
        self.gpu.as_ref()
    }

    /// What is saved, of about as many bytes at most.
    fn state(&self, place: Place, bytes_max: usize) -> Result<StateDict<'_>> {
        if let (Place::Gpu, Some(gpu)) = (place, &self.gpu) {
            return gpu.state(bytes_max);
        }
        let mut state = StateDict::new();
        let data = &self.data[..self.data.len().min(bytes_max)];
        for (number, bytes) in data.chunks(TENSOR_BYTES).enumerate() {
            let shape = [bytes.len() as u64];
            state.bytes(format!("tensor.{number}"), Dtype::U8, &shape, bytes)?;
        }
        Ok(state)
    }

    /// What is loaded into.
    fn targets(&mut self, place: Place) -> Result<Vec<(String, Target<'_>)>> {
        if let (Place::Gpu, Some(gpu)) = (place, &mut self.gpu) {
            return gpu.targets();
        }
        let tensors = self.into.chunks_mut(TENSOR_BYTES).enumerate();
        Ok(tensors.map(|(n, bytes)| (format!("tensor.{n}"), Target::new(bytes))).collect())
    }
}

/// A rung and where its tensors are, and what was measured so.
pub(super) struct Contender {
    rung: Rung,
    place: Place,
    /// Kept over the rounds, as in a trainer: its pool is prefaulted and registered.
    runtime: Arc<Runtime>,
    refused: Option<String>,
    notes: Vec<String>,
    saves: Vec<Sample>,
    loads: Vec<Sample>,
}

/// One save or load.
struct Sample {
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    /// Of the copies that a GPU made, as it timed them.
    copies_gb_per_s: Option<f64>,
}

impl Contender {
    /// The configuration of `runtime` allows `rung` alone.
    pub fn new(rung: Rung, place: Place, runtime: Arc<Runtime>) -> Self {
        let (saves, loads) = (Vec::new(), Vec::new());
        Self { rung, place, runtime, refused: None, notes: Vec::new(), saves, loads }
    }

    fn name(&self) -> String {
        match self.place {
            Place::Fresh => self.rung.to_string(),
            Place::Host => format!("{}, host", self.rung),
            Place::Gpu => format!("{}, GPU", self.rung),
        }
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

/// Measures all contenders in turn, `rounds` times, in the directory `work`, which is there.
///
/// # Errors
/// What a save or load fails with, unless it is that a rung is refused.
pub(super) fn rounds(
    contenders: &mut [Contender],
    memory: &mut Memory,
    work: &Path,
    rounds: u16,
) -> Result<()> {
    // Its companions, where it is striped, have the same name, and stand beside those of others.
    let path = work.join(work.file_name().unwrap_or("checkpoint".as_ref()));
    let done = measure_all(contenders, memory, &path, rounds);
    // Whoever made `work` removes it, but not what lies elsewhere.
    match (&done, contenders.first()) {
        (Err(_), Some(contender)) => clear(&path, contender.runtime.config()).and(done),
        _ => done,
    }
}

fn measure_all(
    contenders: &mut [Contender],
    memory: &mut Memory,
    path: &Path,
    rounds: u16,
) -> Result<()> {
    for contender in contenders.iter_mut() {
        warm_up(contender, memory, path)?;
    }
    for round in 1..=rounds {
        for contender in contenders.iter_mut().filter(|c| c.refused.is_none()) {
            let label = |what| format!("{what} {round}/{rounds}: {}", contender.name());
            let save = label("save");
            let load = label("load");
            let saved =
                progress::watch(&save, false, |job| time_save(contender, memory, path, job))?;
            contender.saves.push(saved);
            let loaded =
                progress::watch(&load, false, |job| time_load(contender, memory, path, job))?;
            contender.loads.push(loaded);
            clear(path, contender.runtime.config())?;
        }
    }
    Ok(())
}

/// An untimed save of little: takes the staging memory, and tells whether the rung can be had.
fn warm_up(contender: &mut Contender, memory: &Memory, path: &Path) -> Result<()> {
    let saved = progress::watch("warming up", true, |job| {
        save(&contender.runtime, &memory.state(contender.place, 4096)?, path, job)
    });
    match saved {
        Ok(report) => contender.note(&report.moved.fallbacks),
        Err(error @ Error::Unsupported { .. }) => contender.refused = Some(error.to_string()),
        Err(error) => return Err(error),
    }
    clear(path, contender.runtime.config())
}

fn time_save(
    contender: &mut Contender,
    memory: &Memory,
    path: &Path,
    job: &Arc<Job>,
) -> Result<Sample> {
    let clock = Clock::start();
    let report = save(&contender.runtime, &memory.state(contender.place, usize::MAX)?, path, job)?;
    let sample = clock.sample(report.tensor_bytes, &report.moved, report.seconds.device_copy);
    contender.note(&report.moved.fallbacks);
    Ok(sample)
}

fn time_load(
    contender: &mut Contender,
    memory: &mut Memory,
    path: &Path,
    job: &Arc<Job>,
) -> Result<Sample> {
    let runtime = &contender.runtime;
    forget(path, runtime.config())?;
    let clock = Clock::start();
    let checkpoint = Checkpoint::open_with(path, runtime.config())?;
    let options = LoadOptions::default();
    let (sample, moved) = if contender.place == Place::Fresh {
        let names = checkpoint.tensors().iter().map(|tensor| &tensor.name);
        let loaded = checkpoint.load_names(names, options, runtime, job)?;
        let report = &loaded.report;
        // Before the memory is given back.
        let sample = clock.sample(report.tensor_bytes, &report.moved, report.seconds.device_copy);
        (sample, loaded.report.moved)
    } else {
        let targets = memory.targets(contender.place)?;
        let report = checkpoint.load_into(&targets, options, runtime, job)?;
        let sample = clock.sample(report.tensor_bytes, &report.moved, report.seconds.device_copy);
        (sample, report.moved)
    };
    contender.note(&moved.fallbacks);
    Ok(sample)
}

/// Drops a checkpoint's pages from the cache. All of them are on disk.
fn forget(path: &Path, config: &Config) -> Result<()> {
    for path in Checkpoint::open_with(path, config)?.shard_paths() {
        File::open(path)
            .and_then(|file| drop_page_cache(&file))
            .map_err(|e| Error::io("dropping from the page cache", path, e))?;
    }
    Ok(())
}

/// Removes a checkpoint, if it is there.
pub(super) fn clear(path: &Path, config: &Config) -> Result<()> {
    if path.exists() {
        match retire_with(path, Disposal::Remove, config) {
            Err(Error::Incomplete { .. }) => {}
            retired => drop(retired?),
        }
    }
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("removing", path, e)),
        _ => Ok(()),
    }
}

/// Time that passed, and time that the processors spent on it.
struct Clock {
    started: Instant,
    cpu_s: f64,
}

impl Clock {
    fn start() -> Self {
        Self { cpu_s: cpu_s(), started: Instant::now() }
    }

    /// Of so many bytes, and those that a GPU took `device_seconds` to copy.
    fn sample(self, bytes: u64, moved: &Moved, device_seconds: f64) -> Sample {
        let rate = |bytes, seconds: f64| bytes as f64 / 1e9 / seconds.max(1e-9);
        Sample {
            gb_per_s: rate(bytes, self.started.elapsed().as_secs_f64()),
            cpu_s_per_gb: (cpu_s() - self.cpu_s) / (bytes as f64 / 1e9),
            copies_gb_per_s: (moved.device_bytes > 0)
                .then(|| rate(moved.device_bytes, device_seconds)),
        }
    }
}

/// Processor seconds of this process so far, the kernel's on its behalf included.
fn cpu_s() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e6
    })
}

/// Bytes that no file system can compress or share.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = vec![0; len];
    for word in bytes.chunks_mut(8) {
        // xorshift64: Marsaglia, "Xorshift RNGs", 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes
}

/// What was measured. A contender on a GPU comes right after the one in host memory on its rung.
pub(super) fn ways(contenders: Vec<Contender>) -> Vec<Way> {
    let of_host = |(i, gpu): (usize, &Contender)| {
        (gpu.place == Place::Gpu).then(|| of_host(&contenders[i - 1], gpu)).flatten()
    };
    let ratios: Vec<Option<OfHost>> = contenders.iter().enumerate().map(of_host).collect();
    contenders.into_iter().zip(ratios).map(|(contender, ratio)| way(contender, ratio)).collect()
}

fn way(contender: Contender, of_host: Option<OfHost>) -> Way {
    let name = contender.name();
    let Contender { rung, place, refused, notes, saves, loads, .. } = contender;
    let (save, load) = (figures(&saves), figures(&loads));
    Way { name, rung, place, refused, notes, save, load, of_host }
}

/// A GPU's rates over the host's within the same round.
fn of_host(host: &Contender, gpu: &Contender) -> Option<OfHost> {
    let ratios = |gpu: &[Sample], host: &[Sample]| {
        spread(gpu.iter().zip(host).map(|(gpu, host)| gpu.gb_per_s / host.gb_per_s))
    };
    Some(OfHost { save: ratios(&gpu.saves, &host.saves)?, load: ratios(&gpu.loads, &host.loads)? })
}

fn figures(samples: &[Sample]) -> Option<Figures> {
    Some(Figures {
        gb_per_s: spread(samples.iter().map(|sample| sample.gb_per_s))?,
        cpu_s_per_gb: spread(samples.iter().map(|sample| sample.cpu_s_per_gb))?,
        copies_gb_per_s: spread(samples.iter().filter_map(|sample| sample.copies_gb_per_s)),
    })
}

/// `None` of no values.
pub(super) fn spread(values: impl Iterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (min, max) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    let median = match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    };
    Some(Spread { median, min, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let Spread { median, min, max } = spread([4.0, 1.0, 3.0, 2.0].into_iter()).unwrap();
        assert_eq!((median, min, max), (2.5, 1.0, 4.0));
        assert!(spread(std::iter::empty()).is_none());
    }

    #[test]
    fn noise_does_not_repeat() {
        let bytes = noise(100_003);
        let mut words: Vec<&[u8]> = bytes.chunks(8).collect();
        words.sort();
        words.dedup();
        assert_eq!(words.len(), 100_003usize.div_ceil(8));
    }
}
