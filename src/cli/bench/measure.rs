//! Saves and loads against the clock.

use super::super::progress;
use super::{Figures, Spread, Way};
use crate::config::Config;
use crate::engine::file::drop_page_cache;
use crate::engine::ladder::{Fallback, Rung};
use crate::error::{Error, Result};
use crate::format::Dtype;
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::state::StateDict;
use crate::store::{Checkpoint, LoadOptions, save};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a tensor: a large layer's.
const TENSOR_BYTES: usize = 64 << 20;

/// A rung, and what was measured on it.
pub(super) struct Contender {
    rung: Rung,
    /// Kept over the rounds, as in a trainer: its pool is prefaulted and registered.
    runtime: Runtime,
    refused: Option<String>,
    notes: Vec<String>,
    saves: Vec<Sample>,
    loads: Vec<Sample>,
}

/// One save or load.
struct Sample {
    gb_per_s: f64,
    cpu_s_per_gb: f64,
}

impl Contender {
    /// `config` allows `rung` alone.
    pub fn new(rung: Rung, config: Config) -> Result<Self> {
        let runtime = Runtime::new(config)?;
        let (saves, loads) = (Vec::new(), Vec::new());
        Ok(Self { rung, runtime, refused: None, notes: Vec::new(), saves, loads })
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

/// Measures all contenders in turn, `rounds` times. Works in a directory of its own in `dir`, which
/// is removed in the end, however that comes.
///
/// # Errors
/// What a save or load fails with, unless it is that a rung is refused.
pub(super) fn rounds(
    contenders: &mut [Contender],
    dir: &Path,
    bytes: u64,
    rounds: u16,
) -> Result<()> {
    let work = tempfile::Builder::new()
        .prefix(".ringstow-bench-")
        .tempdir_in(dir)
        .map_err(|e| Error::io("creating a directory in", dir, e))?;
    let path = work.path().join("checkpoint");
    let data = progress::watch("making random data", true, |_| noise(bytes as usize));
    for contender in contenders.iter_mut() {
        warm_up(contender, &data, &path)?;
    }
    for round in 1..=rounds {
        for contender in contenders.iter_mut().filter(|c| c.refused.is_none()) {
            let label = |what| format!("{what} {round}/{rounds}: {}", contender.rung);
            let save = label("save");
            let load = label("load");
            let saved =
                progress::watch(&save, false, |job| time_save(contender, &data, &path, job))?;
            contender.saves.push(saved);
            let loaded = progress::watch(&load, false, |job| time_load(contender, &path, job))?;
            contender.loads.push(loaded);
            clear(&path)?;
        }
    }
    work.close().map_err(|e| Error::io("removing the bench's files in", dir, e))
}

/// An untimed save of a page: takes the staging memory, and tells whether the rung can be had.
fn warm_up(contender: &mut Contender, data: &[u8], path: &Path) -> Result<()> {
    let page = &data[..data.len().min(4096)];
    let saved = progress::watch("warming up", true, |job| run_save(contender, page, path, job));
    match saved {
        Ok(fallbacks) => contender.note(&fallbacks),
        Err(error @ Error::Unsupported { .. }) => contender.refused = Some(error.to_string()),
        Err(error) => return Err(error),
    }
    clear(path)
}

fn time_save(
    contender: &mut Contender,
    data: &[u8],
    path: &Path,
    job: &Arc<Job>,
) -> Result<Sample> {
    let clock = Clock::start();
    let fallbacks = run_save(contender, data, path, job)?;
    let sample = clock.sample(data.len() as u64);
    contender.note(&fallbacks);
    Ok(sample)
}

fn run_save(
    contender: &Contender,
    data: &[u8],
    path: &Path,
    job: &Arc<Job>,
) -> Result<Vec<Fallback>> {
    let mut state = StateDict::new();
    for (number, bytes) in data.chunks(TENSOR_BYTES).enumerate() {
        let shape = [bytes.len() as u64];
        state.bytes(format!("tensor.{number}"), Dtype::U8, &shape, bytes)?;
    }
    let report = save(&contender.runtime, &state, path, job)?;
    Ok(report.moved.fallbacks)
}

fn time_load(contender: &mut Contender, path: &Path, job: &Arc<Job>) -> Result<Sample> {
    forget(path)?;
    let clock = Clock::start();
    let checkpoint = Checkpoint::open(path)?;
    let names = checkpoint.tensors().iter().map(|tensor| &tensor.name);
    let loaded = checkpoint.load_names(names, LoadOptions::default(), &contender.runtime, job)?;
    let sample = clock.sample(loaded.report.tensor_bytes);
    contender.note(&loaded.report.moved.fallbacks);
    Ok(sample)
}

/// Drops a checkpoint's pages from the cache. All of them are on disk.
fn forget(path: &Path) -> Result<()> {
    for file in &Checkpoint::open(path)?.manifest().files {
        let path = path.join(&file.name);
        File::open(&path)
            .and_then(|file| drop_page_cache(&file))
            .map_err(|e| Error::io("dropping from the page cache", path, e))?;
    }
    Ok(())
}

fn clear(path: &Path) -> Result<()> {
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

    fn sample(self, bytes: u64) -> Sample {
        let seconds = self.started.elapsed().as_secs_f64();
        let gb = bytes as f64 / 1e9;
        Sample { gb_per_s: gb / seconds.max(1e-9), cpu_s_per_gb: (cpu_s() - self.cpu_s) / gb }
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

impl From<Contender> for Way {
    fn from(contender: Contender) -> Self {
        let Contender { rung, refused, notes, saves, loads, .. } = contender;
        let (save, load) = (figures(&saves), figures(&loads));
        Self { name: rung.to_string(), rung, refused, notes, save, load }
    }
}

fn figures(samples: &[Sample]) -> Option<Figures> {
    Some(Figures {
        gb_per_s: spread(samples.iter().map(|sample| sample.gb_per_s))?,
        cpu_s_per_gb: spread(samples.iter().map(|sample| sample.cpu_s_per_gb))?,
    })
}

/// `None` of no values.
fn spread(values: impl Iterator<Item = f64>) -> Option<Spread> {
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
