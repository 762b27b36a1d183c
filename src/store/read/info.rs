//! A checkpoint's manifest in brief.

use crate::format::manifest::{Order, numbers};
use crate::format::{Metrics, RankShare, TensorEntry, metrics};
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use crate::sys::dir;
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A checkpoint's manifest in brief. For another program's files, what their headers say.
#[derive(Debug, Clone, Serialize)]
pub struct Info {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Who wrote it.
    pub kind: CheckpointKind,
    /// Version of the format.
    pub version: u32,
    /// Version of the library that wrote it.
    pub writer: String,
    /// When it was committed, in milliseconds since 1970-01-01 UTC; 0 for another program's files.
    pub created_unix_ms: u64,
    /// See [`Found::order`](crate::Found::order).
    #[serde(serialize_with = "numbers")]
    pub order: Order,
    /// How many times this directory had been saved into before.
    pub generation: u64,
    /// Ranks that wrote it.
    pub world_size: u32,
    /// Bytes that one checksum covers.
    pub block_bytes: u64,
    /// Number of tensors; those that share memory count once.
    pub tensors: usize,
    /// Bytes of their data.
    pub tensor_bytes: u64,
    /// Bytes of all shards, headers included.
    pub file_bytes: u64,
    /// Bytes of those shards that have another name, a hard link, most likely in another checkpoint.
    pub shared_bytes: u64,
    /// The shards.
    pub files: Vec<FileInfo>,
    /// Other directories that the files were striped over, as the saver's configuration named them.
    pub stripes: Vec<String>,
    /// Which rank's share it is, if several ranks saved each by itself.
    pub part_of: Option<RankShare>,
    /// The step of training that it was saved as, if one was given.
    pub step: Option<u64>,
    /// The metrics that it was saved with.
    #[serde(with = "metrics")]
    pub metrics: Metrics,
    /// Names below which everything was dropped; see [`Store::slim`](crate::Store::slim).
    pub dropped: Vec<String>,
}

/// A shard.
#[derive(Debug, Clone, Serialize)]
pub struct FileInfo {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

impl Checkpoint {
    /// Bytes of the shards that have several names.
    fn shared_bytes(&self) -> u64 {
        let shared = |path: &Path| dir::look_at(path).ok().filter(|found| found.nlink() > 1);
        self.shard_paths().filter_map(shared).map(|found| found.len()).sum()
    }

    /// The manifest in brief.
    pub fn info(&self) -> Info {
        let manifest = self.manifest();
        let file = |file: &crate::format::FileEntry| FileInfo {
            name: file.name.clone(),
            bytes: file.bytes,
        };
        let files: Vec<FileInfo> = manifest.files.iter().map(file).collect();
        let held = manifest.tensors.iter().map(TensorEntry::held_bytes);
        Info {
            path: self.path().into(),
            kind: self.kind(),
            version: manifest.version,
            writer: manifest.writer.clone(),
            created_unix_ms: manifest.created_unix_ms,
            order: manifest.order(manifest.step),
            generation: manifest.generation,
            world_size: manifest.world_size,
            block_bytes: manifest.block_bytes,
            tensors: manifest.tensors.len(),
            tensor_bytes: held.fold(0, u64::saturating_add),
            file_bytes: files.iter().map(|file| file.bytes).fold(0, u64::saturating_add),
            shared_bytes: self.shared_bytes(),
            files,
            stripes: manifest.stripes.clone(),
            part_of: manifest.part_of.clone(),
            step: manifest.step,
            metrics: manifest.metrics.clone(),
            dropped: manifest.dropped.clone(),
        }
    }
}
