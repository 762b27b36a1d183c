//! What a save, a load or a check did, and how long each part took.

use super::fallbacks::{warn_once, warn_once_of};
use crate::device::Pinning;
use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::{Advice, Error};
use crate::pool::NoMore;
use crate::units::{duration, size};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// How bytes were moved.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The engine: `"uring"`, `"portable"` or `"tokio-uring"`.
    pub engine: String,
    /// Whether O_DIRECT was used.
    pub direct: bool,
    /// Staging buffers registered with io_uring so far; each is registered when first used.
    pub fixed_buffers: usize,
    /// Bytes that GPUs copied.
    pub device_bytes: u64,
    /// Whether the staging memory was pinned for GPUs; `None` if no GPU copied.
    pub pinned: Option<bool>,
    /// What was unavailable, why, and what to do about it.
    pub fallbacks: Vec<Fallback>,
}

impl Moved {
    /// Notes how the staging memory was pinned for GPUs. Warns once for each `dir` if it was not.
    pub(super) fn note(&mut self, dir: &Path, pinning: Pinning) {
        self.pinned = pinning.as_ref().map(|pinned| pinned.is_ok());
        let pageable = pinning.and_then(|pinned| pinned.err()).map(|reason| Fallback {
            kind: FallbackKind::PinnedMemory,
            wanted: "pinned staging memory".into(),
            got: "pageable copies".into(),
            reason,
            remedy:
                "lower pool_bytes, or let the process lock more memory (`ulimit -l unlimited`); \
                     until then, GPU copies are several times slower"
                    .into(),
        });
        warn_once(dir, &pageable);
        self.fallbacks.extend(pageable);
    }

    /// Notes why a background save of `bytes` bytes had less memory than that. Warns once for each `dir`.
    pub(super) fn note_streamed(
        &mut self,
        dir: &Path,
        bytes: u64,
        had: u64,
        no_more: Option<&NoMore>,
    ) {
        let Some(no_more) = no_more else { return };
        let streamed = Fallback {
            kind: FallbackKind::StagingMemory,
            wanted: format!("staging memory for all {} of the save", size(bytes)),
            got: format!("{}, so that training waited for the disk to take the rest", size(had)),
            reason: no_more.reason().into(),
            remedy: "give the job more memory, or save fewer bytes by each process; a size as pool_bytes sets another bound"
                .into(),
        };
        warn_once_of(dir, "staging memory", &streamed); // the reason's numbers are others each time
        self.fallbacks.push(streamed);
    }
}

/// The report of a save.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SaveReport {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// The step of training that was saved, if it has a number.
    pub step: Option<u64>,
    /// Saves into this directory that came before; more on a file system that hosts share.
    pub generation: u64,
    /// Tensors saved; those that share memory count once.
    pub tensors: usize,
    /// Bytes of tensor data.
    pub tensor_bytes: u64,
    /// Bytes of all shards, headers included.
    pub file_bytes: u64,
    /// Shards.
    pub files: usize,
    /// Bytes of files that were linked from the base instead of being written; part of `file_bytes`.
    pub linked_bytes: u64,
    /// Bytes of tensors that have not changed since the base, whether their files were linked or written.
    pub unchanged_bytes: u64,
    /// Bytes that were written over recycled files.
    pub recycled_bytes: u64,
    /// Bytes of staging memory that the save could use.
    pub pool_bytes: u64,
    /// How the bytes were moved.
    #[serde(flatten)]
    pub moved: Moved,
    /// Where the time went.
    pub seconds: SaveSeconds,
}

/// Seconds of each part of a save. Copying, checksums and writing overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SaveSeconds {
    /// Laying out the shards.
    pub plan: f64,
    /// Linking files of the base, and comparing the tensors with it.
    pub compare: f64,
    /// Starting the engine (the first save only), opening and preallocating files, and the trial write.
    pub prepare: f64,
    /// From the first byte copied to the last: after `compare + plan + prepare + stage` the tensors may change.
    pub stage: f64,
    /// From the first byte copied to the last one written.
    pub write: f64,
    /// Making the data durable.
    pub sync: f64,
    /// Manifest and renames, each made durable.
    pub commit: f64,
    /// All of it.
    pub total: f64,
    /// Copying, added up over the threads.
    pub copy_cpu: f64,
    /// Checksums, added up over the threads.
    pub checksum_cpu: f64,
    /// Waiting for a free buffer, summed over the threads: high if the disk is the bottleneck.
    pub wait: f64,
    /// Copying from GPUs, as they measured it, added up over them.
    pub device_copy: f64,
}

impl SaveReport {
    /// Bytes of files that were written.
    pub fn written_bytes(&self) -> u64 {
        self.file_bytes - self.linked_bytes
    }

    /// Gigabytes (10^9) of written files per second, from the call to the commit.
    pub fn gb_per_s(&self) -> f64 {
        gb_per_s(self.written_bytes(), self.seconds.total)
    }

    /// Gigabytes (10^9) per second of GPU copies while they ran; `None` if no GPU copied.
    pub fn device_gb_per_s(&self) -> Option<f64> {
        device_gb_per_s(&self.moved, self.seconds.device_copy)
    }
}

/// What a load did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// The step of training that it was saved as, if it has a number.
    pub step: Option<u64>,
    /// Names of the checkpoint below which [`Store::slim`](crate::Store::slim) has dropped everything: it may lack what was asked for.
    pub dropped: Vec<String>,
    /// Tensors loaded.
    pub tensors: usize,
    /// Bytes of their data.
    pub tensor_bytes: u64,
    /// Bytes of the files read for them.
    pub read_bytes: u64,
    /// Of these, bytes that were in the page cache and copied from there, without the disk.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Of [`read_bytes`](Self::read_bytes), bytes that another process has read and sent.
    #[serde(default)]
    pub received_bytes: u64,
    /// Whether every checksum chunk was verified.
    pub verified: bool,
    /// How the bytes were moved.
    #[serde(flatten)]
    pub moved: Moved,
    /// Where the time went.
    pub seconds: LoadSeconds,
    /// Tensors that were left out because they are damaged; see [`OnCorrupt::Skip`](crate::OnCorrupt::Skip).
    pub damaged: Vec<DamagedTensor>,
}

/// Seconds of each part of a load. Reading and checksums overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadSeconds {
    /// Starting the engine (the first time only), opening files and the trial read.
    pub prepare: f64,
    /// From the first read to the last checksum chunk verified.
    pub read: f64,
    /// All of it.
    pub total: f64,
    /// Checksums, added up over the threads.
    pub checksum_cpu: f64,
    /// Copying to GPUs, as they measured it, added up over them.
    pub device_copy: f64,
}

impl LoadReport {
    /// Gigabytes (10^9) read per second.
    pub fn gb_per_s(&self) -> f64 {
        gb_per_s(self.read_bytes, self.seconds.total)
    }

    /// Gigabytes (10^9) per second of GPU copies while they ran; `None` if no GPU copied.
    pub fn device_gb_per_s(&self) -> Option<f64> {
        device_gb_per_s(&self.moved, self.seconds.device_copy)
    }
}

/// The report of a file that was [written as a stream](crate::Store::open_write).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WriteReport {
    /// The file.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// CRC-32 (ISO-HDLC, as in zip) of all its bytes.
    pub crc32: u32,
    /// Whether its checksums were stored beside it.
    pub checksums: bool,
    /// How the bytes were moved.
    #[serde(flatten)]
    pub moved: Moved,
    /// Where the time went.
    pub seconds: WriteSeconds,
}

/// Seconds of each part of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WriteSeconds {
    /// Starting the engine (the first time only), opening the file and the trial write.
    pub prepare: f64,
    /// Waiting for a free buffer in calls of `write`: high if the disk is the bottleneck.
    pub wait: f64,
    /// Writing what was left at the end, making all durable, and the rename.
    pub publish: f64,
    /// From the call that opened the stream until the file was durable, the caller's own work included.
    pub total: f64,
}

impl WriteReport {
    /// Gigabytes (10^9) per second from the call that opened the stream until the file was durable.
    pub fn gb_per_s(&self) -> f64 {
        gb_per_s(self.bytes, self.seconds.total)
    }
}

/// The report of a verification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Files checked.
    pub files: usize,
    /// Files that are on other nodes, which were not checked.
    #[serde(default)]
    pub elsewhere: usize,
    /// Checksum chunks checked.
    pub blocks: usize,
    /// Bytes read.
    pub read_bytes: u64,
    /// Every damaged range of a file; empty for an intact checkpoint.
    pub damage: Vec<Damage>,
    /// If files are missing: which, and where to look for them.
    pub problem: Option<String>,
    /// Tensors and objects in the checkpoint.
    pub tensors: usize,
    /// How the bytes were moved.
    #[serde(flatten)]
    pub moved: Moved,
    /// Seconds in total.
    pub seconds: f64,
}

impl VerifyReport {
    /// The names of the tensors with bytes in damaged ranges, each once, by file and offset.
    pub fn damaged_tensors(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        let names = self.damage.iter().flat_map(|damage| &damage.tensors);
        names.map(String::as_str).filter(|name| seen.insert(*name)).collect()
    }
}

/// A damaged range of a file: a checksum chunk, or what is missing of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The file.
    #[serde(with = "crate::path_text")]
    pub file: PathBuf,
    /// Byte offset of the range.
    pub offset: u64,
    /// Bytes of the range.
    pub bytes: u64,
    /// What was compared: `"crc32 of checksum chunk 7 (1048576 bytes)"`, `"length in bytes"`.
    pub what: String,
    /// What was recorded when the checkpoint was written.
    pub expected: String,
    /// What was found.
    pub got: String,
    /// The names of the tensors and objects with bytes in the range. Empty if it holds only a header or padding.
    pub tensors: Vec<String>,
    /// Whether this process may not open the file, so that its bytes may be intact.
    #[serde(skip)]
    pub(crate) is_refusal: bool,
}

impl From<Damage> for Error {
    fn from(damage: Damage) -> Self {
        let Damage { file: path, offset, what, expected, got, tensors, .. } = damage;
        Self::Corrupt {
            path,
            offset,
            what: what.into(),
            expected,
            got,
            tensors: tensors.into(),
            advice: Advice::GoBack,
        }
    }
}

/// A tensor or object that cannot be loaded, because bytes of it are damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedTensor {
    /// Its name.
    pub name: String,
    /// The file of the first damage.
    #[serde(with = "crate::path_text")]
    pub file: PathBuf,
    /// Byte offset of that damage.
    pub offset: u64,
    /// What is wrong there.
    pub why: String,
}

impl DamagedTensor {
    /// The tensors with bytes in damaged ranges, each once.
    pub(crate) fn all_in(damage: &[Damage]) -> Vec<Self> {
        let mut seen = HashSet::new();
        let each = damage.iter().flat_map(|one| one.tensors.iter().map(move |name| (name, one)));
        let first = each.filter(|(name, _)| seen.insert(name.as_str()));
        let new = |(name, damage): (&String, &Damage)| Self {
            name: name.clone(),
            file: damage.file.clone(),
            offset: damage.offset,
            why: format!("{} should be {}, is {}", damage.what, damage.expected, damage.got),
        };
        first.map(new).collect()
    }
}

fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / 1e9 / seconds.max(1e-9)
}

fn device_gb_per_s(moved: &Moved, seconds: f64) -> Option<f64> {
    (moved.device_bytes > 0).then(|| gb_per_s(moved.device_bytes, seconds))
}

/// Target of the events that log a report in one line. The Python package logs its own, with what it knows besides.
pub const TARGET: &str = "ringstow::done";

impl fmt::Display for SaveReport {
    /// `run/step-1000: 3.41 GB in 1.52 s (2.24 GB/s, io_uring, fixed buffers, O_DIRECT)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = (self.written_bytes(), self.seconds.total, self.gb_per_s());
        write!(f, "{}: {}", self.path.display(), done(figures, &self.moved))?;
        match self.linked_bytes {
            0 => Ok(()),
            linked => write!(f, "; {} linked", size(linked)),
        }
    }
}

impl fmt::Display for LoadReport {
    /// `loaded run/step-1000: 3.41 GB in 1.66 s (2.05 GB/s, io_uring, fixed buffers, O_DIRECT)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = (self.read_bytes, self.seconds.total, self.gb_per_s());
        write!(f, "loaded {}: {}", self.path.display(), done(figures, &self.moved))?;
        match self.cached_bytes {
            0 => {}
            cached => write!(f, ", {} from the page cache", size(cached))?,
        }
        match self.received_bytes {
            0 => Ok(()),
            received => write!(f, ", {} from other ranks", size(received)),
        }
    }
}

/// `3.41 GB in 1.52 s (2.24 GB/s, io_uring, fixed buffers, O_DIRECT)`: bytes, seconds, gigabytes (10^9) per second, and how
/// they were moved.
pub fn done((bytes, seconds, rate): (u64, f64, f64), moved: &Moved) -> String {
    let engine = match &*moved.engine {
        "uring" => "io_uring",
        "" | "none" => "no engine",
        other => other,
    };
    let fixed = if moved.fixed_buffers > 0 { ", fixed buffers" } else { "" };
    let direct = if moved.direct { "O_DIRECT" } else { "buffered" };
    let (bytes, time, rate) = (size(bytes), duration(seconds), size((rate * 1e9) as u64));
    format!("{bytes} in {time} ({rate}/s, {engine}{fixed}, {direct})")
}
