//! Copies of a checkpoint on other tiers. A load reads from them what the checkpoint itself lacks, or has damaged.

use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::{Error, Result};
use crate::pipeline::load::ShardFile;
use crate::store::read::fault::Fault;
use crate::store::read::fingerprint::Fingerprint;
use crate::store::read::shards::Shards;
use crate::sys::dir;
use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Where the tiers of a run may have a copy of a checkpoint: under the same name, which a link's is not.
pub fn copies_of(path: &Path, tiers: &[PathBuf]) -> Vec<PathBuf> {
    let real = dir::is_link(path).then(|| dir::real(path).ok()).flatten();
    let Some(name) = real.as_deref().unwrap_or(path).file_name() else { return Vec::new() };
    tiers.iter().map(|tier| tier.join(name)).filter(|copy| copy != path).collect()
}

/// Where else a checkpoint is, the nearest first.
#[derive(Debug, Default)]
pub(in crate::store) struct Copies {
    list: Vec<Copy>,
    /// The checkpoint's own files that are shorter than they should be, by number. They are read last.
    pub cut: HashMap<usize, ShardFile>,
    /// The files of which something was read from a copy, each once.
    used: Mutex<Vec<Fallback>>,
}

/// A copy, which is opened once it is needed.
#[derive(Debug)]
struct Copy {
    path: PathBuf,
    /// `None` if nothing can be read from it.
    opened: OnceLock<Option<OpenCopy>>,
}

/// A copy as it was when it was opened.
#[derive(Debug)]
pub(in crate::store) struct OpenCopy {
    pub shards: Shards,
    pub fingerprint: Option<Fingerprint>,
}

impl Copies {
    pub fn new(paths: &[PathBuf]) -> Self {
        let copy = |path: &PathBuf| Copy { path: path.clone(), opened: OnceLock::new() };
        Self { list: paths.iter().map(copy).collect(), ..Self::default() }
    }

    /// The copies of a file that have all of its bytes, as far as that is known without reading them. `open` opens a
    /// copy, unless nothing can be read from it.
    pub fn shards<'a>(
        &'a self,
        file: usize,
        own: &'a ShardFile,
        open: impl Fn(&Path) -> Option<OpenCopy> + 'a,
    ) -> impl Iterator<Item = &'a ShardFile> {
        let opened = self
            .list
            .iter()
            .filter_map(move |copy| copy.opened.get_or_init(|| open(&copy.path)).as_ref());
        opened.filter_map(move |copy| whole(&copy.shards, file, own))
    }

    /// Checks that files, by number, are still those of the copies that they were found in, once they are open: another
    /// checkpoint may have taken a copy's place since. `own` are the files that they stand for.
    ///
    /// # Errors
    /// As for [`Fingerprint::check`].
    pub fn check(
        &self,
        files: &[Option<&Path>],
        own: &[ShardFile],
        open: impl Fn(&Path) -> Option<OpenCopy>,
    ) -> Result<()> {
        for copy in &self.list {
            let Some(Some(OpenCopy { fingerprint: Some(known), .. })) = copy.opened.get() else {
                continue;
            };
            let opened = files.iter().enumerate().filter_map(|(n, path)| Some((n, (*path)?)));
            let in_it = opened.filter(|(_, path)| path.parent() == Some(&copy.path));
            let found: Vec<(usize, &Path)> = in_it.collect();
            if found.is_empty() {
                continue;
            }
            let Err(error) = known.check(&copy.path, true) else { continue };
            // It may have been slimmed: then the other files are as they were.
            let now = open(&copy.path).filter(|_| matches!(error, Error::Replaced { .. }));
            let is_same = |(number, path): &(usize, &Path)| {
                let now = now.as_ref().and_then(|now| whole(&now.shards, *number, &own[*number]));
                now.is_some_and(|file| file.path == *path)
            };
            if !found.iter().all(is_same) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Notes that something of a file of a checkpoint is read from a copy, and warns of it once.
    pub fn note(&self, dir: &Path, file: &Path, copy: &Path, why: &dyn Display) {
        let step = Fallback {
            kind: FallbackKind::Copy,
            wanted: file.display().to_string(),
            got: format!("its copy {}", copy.display()),
            reason: why.to_string(),
            remedy: format!("`ringstow verify {}` lists all damage there", dir.display()),
        };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !used.iter().any(|known| known.wanted == step.wanted) {
            used.push(step.clone());
            drop(used); // a logger may wait for a thread that wants the lock
            let Fallback { wanted, got, reason, remedy, .. } = step;
            tracing::warn!("reading {got} instead of {wanted}: {reason}; {remedy}");
        }
    }

    /// Files of which something was read from a copy, with the reason.
    pub fn used(&self) -> Vec<Fallback> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The file of a copy with the same bytes as the checkpoint's own. Its number is mostly the same in both.
fn whole<'a>(copy: &'a Shards, number: usize, own: &ShardFile) -> Option<&'a ShardFile> {
    let is_it = |at: &usize| {
        let there = &copy.files[*at];
        (there.bytes, &there.crc32) == (own.bytes, &own.crc32)
    };
    let same_number = Some(number).filter(|at| *at < copy.files.len()).filter(is_it);
    // One of the two may be slimmed.
    let at = same_number.or_else(|| (0..copy.files.len()).find(is_it))?;
    Fault::in_file(&copy.faults, at).is_none().then(|| &copy.files[at])
}
