//! Copies of a checkpoint on other tiers. A load reads from them what the checkpoint itself lacks, or has damaged.

use crate::config::Config;
use crate::engine::fallback::Fallback;
use crate::error::Result;
use crate::format::Manifest;
use crate::pipeline::fallbacks::warn_once_of;
use crate::pipeline::load::ShardFile;
use crate::store::catalog::latest::is_of_checkpoint;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, FaultKind};
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
    opened: OnceLock<Option<Box<Checkpoint>>>,
}

impl Copies {
    fn new(paths: &[PathBuf]) -> Self {
        let copy = |path: &PathBuf| Copy { path: path.clone(), opened: OnceLock::new() };
        Self { list: paths.iter().map(copy).collect(), used: Mutex::default() }
    }

    /// Has `read` read from each copy of a file in turn, until it succeeds. Returns whether it did.
    pub fn read(
        &self,
        of: &Checkpoint,
        file: usize,
        why: &dyn Display,
        read: &mut dyn FnMut(&Path) -> bool,
    ) -> bool {
        let mut shards = self.shards(of, file).filter(|shard| shard.path != of.files[file].path);
        let Some(shard) = shards.find(|shard| read(&shard.path)) else { return false };
        self.note(of.path(), &of.files[file].path, &shard.path, why);
        true
    }

    /// The copies of a file that have all of its bytes, as far as that is known without reading them.
    fn shards<'a>(
        &'a self,
        of: &'a Checkpoint,
        file: usize,
    ) -> impl Iterator<Item = &'a ShardFile> {
        let opened = self.list.iter().filter_map(move |copy| copy.opened(of));
        let whole = opened.filter(move |copy| Fault::in_file(&copy.faults, file).is_none());
        whole.map(move |copy| &copy.files[file])
    }

    fn note(&self, dir: &Path, file: &Path, copy: &Path, why: &dyn Display) {
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

impl Copy {
    fn opened(&self, of: &Checkpoint) -> Option<&Checkpoint> {
        self.opened.get_or_init(|| open(&self.path, of).map(Box::new)).as_deref()
    }
}

/// Opens a copy of a checkpoint, although files of it may be missing, too.
fn open(path: &Path, of: &Checkpoint) -> Option<Checkpoint> {
    match Checkpoint::open_damaged_once(path, of.config()) {
        Ok(copy) if is_same_save(&copy.manifest, &of.manifest) => return Some(copy),
        Ok(_) => tracing::warn!(
            "nothing is read from {}: it is another checkpoint than {}",
            path.display(),
            of.path().display()
        ),
        Err(error) => tracing::warn!(%error, "nothing is read from {}", path.display()),
    }
    None
}

/// Whether two manifests have files of the same bytes: a copy gives them names of its own.
fn is_same_save(one: &Manifest, other: &Manifest) -> bool {
    one.block_bytes == other.block_bytes
        && one.files.len() == other.files.len()
        && one
            .files
            .iter()
            .zip(&other.files)
            .all(|(one, other)| (one.bytes, &one.crc32) == (other.bytes, &other.crc32))
}

/// Where the tiers of a run may have a copy of a checkpoint: under the same name.
pub(crate) fn copies_of(path: &Path, tiers: &[PathBuf]) -> Vec<PathBuf> {
    let Some(name) = path.file_name() else { return Vec::new() };
    tiers.iter().map(|tier| tier.join(name)).filter(|copy| copy != path).collect()
}

impl Checkpoint {
    /// [`Checkpoint::open`] of a checkpoint that has copies, the nearest first. A file that is missing or cut, a checksum
    /// chunk that is damaged and one on a bad sector are read from the first copy that has them whole: a warning and
    /// [`LoadReport::fallbacks`](crate::LoadReport) say so. If the checkpoint itself cannot be opened, its first copy that can
    /// be is opened in its place. A copy that is not of the same save is not read.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], if no copy helps.
    pub fn open_copied(path: &Path, copies: &[PathBuf], config: &Config) -> Result<Self> {
        let open = |path: &Path| Self::open_damaged_with(path, config);
        let checkpoint = Self::nearest(path, copies, open)?;
        checkpoint.check_files()?;
        Ok(checkpoint)
    }

    /// Opens a checkpoint, or else the first of its copies that `open` opens.
    #[doc(hidden)]
    pub fn nearest(
        path: &Path,
        copies: &[PathBuf],
        open: impl Fn(&Path) -> Result<Self>,
    ) -> Result<Self> {
        let failure = match open(path) {
            Ok(checkpoint) => return Ok(checkpoint.beside(copies)),
            Err(error) if copies.is_empty() || !is_of_checkpoint(&error) => return Err(error),
            Err(error) => error,
        };
        for (at, copy) in copies.iter().enumerate() {
            match open(copy) {
                Ok(checkpoint) => {
                    let (path, copy) = (path.display(), copy.display());
                    tracing::warn!("{copy} is loaded instead of {path}: {failure}");
                    return Ok(checkpoint.beside(&copies[at + 1..]));
                }
                Err(error) => tracing::warn!(%error, "{} cannot be opened", copy.display()),
            }
        }
        Err(failure)
    }

    /// The same checkpoint, with these copies. Files that it lacks are replaced by theirs.
    fn beside(mut self, copies: &[PathBuf]) -> Self {
        let copies = Copies::new(copies);
        for fault in std::mem::take(&mut self.faults) {
            // What is on another node is not lost.
            let is_lost = fault.kind != FaultKind::Elsewhere;
            let shard = is_lost.then(|| copies.shards(&self, fault.file).next().cloned());
            match shard.flatten() {
                Some(shard) => {
                    let why =
                        format!("{} should be {}, is {}", fault.what, fault.expected, fault.got);
                    copies.note(&self.path, &self.files[fault.file].path, &shard.path, &why);
                    self.files[fault.file] = shard;
                }
                None => self.faults.push(fault),
            }
        }
        if !self.faults.iter().any(|fault| fault.kind == FaultKind::Missing) {
            self.problem = None;
        }
        self.copies = copies;
        self
    }
}
