//! Opening a checkpoint that has copies on other tiers.

use crate::config::Config;
use crate::error::Result;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::copies::Copies;
use crate::store::read::fault::FaultKind;
use crate::sys::dir;
use std::path::{Path, PathBuf};

/// Where the tiers of a run may have a copy of a checkpoint: under the same name, which a link's is not.
pub fn copies_of(path: &Path, tiers: &[PathBuf]) -> Vec<PathBuf> {
    let real = dir::is_link(path).then(|| dir::real(path).ok()).flatten();
    let Some(name) = real.as_deref().unwrap_or(path).file_name() else { return Vec::new() };
    tiers.iter().map(|tier| tier.join(name)).filter(|copy| copy != path).collect()
}

impl Checkpoint {
    /// [`Checkpoint::open`] of a checkpoint that has copies, the nearest first. A file that is missing or cut, a checksum
    /// chunk that is damaged and one on a bad sector are read from the first copy that has them whole: a warning and
    /// [`LoadReport::fallbacks`](crate::LoadReport) say so. A copy that is not of the same save is not read.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], if no copy helps.
    pub fn open_copied(
        path: impl AsRef<Path>,
        copies: &[PathBuf],
        config: &Config,
    ) -> Result<Self> {
        let checkpoint = Self::open_damaged_with(path, config)?.beside(copies);
        checkpoint.check_files()?;
        Ok(checkpoint)
    }

    /// The same checkpoint, with these copies. Files that it lacks are replaced by theirs.
    #[doc(hidden)]
    #[must_use]
    pub fn beside(mut self, copies: &[PathBuf]) -> Self {
        let mut copies = Copies::new(copies);
        for fault in std::mem::take(&mut self.faults) {
            // What is on another node is not lost.
            let is_lost = fault.kind != FaultKind::Elsewhere;
            let (own, open) = (&self.files[fault.file], |path: &Path| self.open_copy(path));
            let shard = is_lost.then(|| copies.shards(fault.file, own, open).next().cloned());
            let Some(shard) = shard.flatten() else {
                self.faults.push(fault);
                continue;
            };
            let why = format!("{} should be {}, is {}", fault.what, fault.expected, fault.got);
            copies.note(self.path(), &own.path, &shard.path, &why);
            let own = std::mem::replace(&mut self.files[fault.file], shard);
            if fault.kind == FaultKind::Length {
                copies.cut.insert(fault.file, own);
            }
        }
        if !self.faults.iter().any(|fault| fault.kind == FaultKind::Missing) {
            self.problem = None;
        }
        self.copies = copies;
        self
    }
}
