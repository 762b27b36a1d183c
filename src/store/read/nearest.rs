//! Opening a checkpoint that has copies on other tiers.

use crate::config::Config;
use crate::error::Result;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::copies::Copies;
use crate::store::read::fault::FaultKind;
use std::path::{Path, PathBuf};

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
            Err(error) if copies.is_empty() || !error.is_of_checkpoint() => return Err(error),
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
            let open = |path: &Path| self.open_copy(path);
            let shard = is_lost.then(|| copies.shards(fault.file, open).next().cloned());
            match shard.flatten() {
                Some(shard) => {
                    let why =
                        format!("{} should be {}, is {}", fault.what, fault.expected, fault.got);
                    copies.note(self.path(), &self.files[fault.file].path, &shard.path, &why);
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
