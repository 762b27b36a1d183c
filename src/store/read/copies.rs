//! Copies of a checkpoint on other tiers. A load reads from them what the checkpoint itself lacks, or has damaged.

use crate::engine::fallback::Fallback;
use crate::format::Manifest;
use crate::pipeline::fallbacks::warn_once_of;
use crate::pipeline::load::ShardFile;
use crate::store::read::fault::Fault;
use crate::store::read::shards::Shards;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Where else a checkpoint is, the nearest first.
#[derive(Debug, Default)]
pub(in crate::store) struct Copies {
    list: Vec<Copy>,
    /// The files of which something was read from a copy, each once.
    used: Mutex<Vec<Fallback>>,
}

/// A copy, which is opened once it is needed.
#[derive(Debug)]
struct Copy {
    path: PathBuf,
    /// `None` if nothing can be read from it.
    shards: OnceLock<Option<Shards>>,
}

impl Copies {
    pub fn new(paths: &[PathBuf]) -> Self {
        let copy = |path: &PathBuf| Copy { path: path.clone(), shards: OnceLock::new() };
        Self { list: paths.iter().map(copy).collect(), used: Mutex::default() }
    }

    /// The copies of a file that have all of its bytes, as far as that is known without reading them. `open` opens a
    /// copy, unless nothing can be read from it.
    pub fn shards<'a>(
        &'a self,
        file: usize,
        open: impl Fn(&Path) -> Option<Shards> + 'a,
    ) -> impl Iterator<Item = &'a ShardFile> {
        let opened = self
            .list
            .iter()
            .filter_map(move |copy| copy.shards.get_or_init(|| open(&copy.path)).as_ref());
        let whole = opened.filter(move |copy| Fault::in_file(&copy.faults, file).is_none());
        whole.map(move |copy| &copy.files[file])
    }

    /// Notes that something of a file of a checkpoint is read from a copy, and warns of it once.
    pub fn note(&self, dir: &Path, file: &Path, copy: &Path, why: &dyn Display) {
        let step = Fallback {
            wanted: file.display().to_string(),
            got: format!("its copy {}", copy.display()),
            reason: why.to_string(),
            remedy: format!("`ringstow verify {}` lists all damage there", dir.display()),
        };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !used.iter().any(|known| known.wanted == step.wanted) {
            used.push(step.clone());
            drop(used); // a logger may wait for a thread that wants the lock
            warn_once_of(dir, &format!("{} {copy:?}", step.wanted), &step);
        }
    }

    /// Files of which something was read from a copy, with the reason.
    pub fn used(&self) -> Vec<Fallback> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Whether two manifests have files of the same bytes: a copy gives them names of its own.
pub(in crate::store) fn is_same_save(one: &Manifest, other: &Manifest) -> bool {
    one.block_bytes == other.block_bytes
        && one.files.len() == other.files.len()
        && one
            .files
            .iter()
            .zip(&other.files)
            .all(|(one, other)| (one.bytes, &one.crc32) == (other.bytes, &other.crc32))
}
