//! Going back to an earlier step, and steps that stay whatever the rules say.

use super::{CheckpointManager, Shared};
use crate::error::{Error, Result};
use crate::store::{Disposal, Found, pin, remove_step, unpin};
use std::path::{Path, PathBuf};

impl CheckpointManager {
    /// Removes the steps that are newer than this one, in the root and in all [places](super::Tiers): a training that goes back to it
    /// for good does not need them. Without this call they stay until the rules remove them, and the next save is newer than
    /// they are. Kept ones ([`CheckpointManager::keep`]) stay. Returns what was removed.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is no such step, and none is removed; the first failure of a removal, once the others
    /// are done.
    pub fn drop_newer(&mut self, step: u64) -> Result<Vec<PathBuf>> {
        self.wait()?;
        let shared = &self.shared;
        shared.candidates(Some(step))?;
        let all = shared.candidates(None)?;
        let kept = crate::store::pinned(&shared.root);
        let is_kept = |path: &Path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| kept.iter().any(|kept| kept == name))
        };
        let (mut removed, mut failure) = (Vec::new(), None);
        for (_, found) in newer(&all, step).filter(|(_, found)| !is_kept(&found.path)) {
            let reason = format!("the run goes back to step {step}");
            let disposal = Disposal::of(shared.store.config());
            match remove_step(&found.path, &reason, disposal, shared.store.config()) {
                Ok(_) => removed.push(found.path.clone()),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(removed), Err)
    }

    /// Keeps a step until [`CheckpointManager::release`]: no rule removes it, or parts of it, and it does not leave the root.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if the root does not have it; [`Error::Io`].
    pub fn keep(&mut self, step: u64) -> Result<()> {
        self.wait()?;
        pin(&self.shared.here(step)?)
    }

    /// Lets a step go that was [kept](CheckpointManager::keep): from now on the rules decide. Says whether it was kept.
    ///
    /// # Errors
    /// As for [`CheckpointManager::keep`].
    pub fn release(&mut self, step: u64) -> Result<bool> {
        self.wait()?;
        unpin(&self.shared.here(step)?)
    }
}

impl Shared {
    /// The path of a step in the root.
    fn here(&self, step: u64) -> Result<PathBuf> {
        let newest = self.committed(Some(step))?.into_iter().next();
        newest.map(|(_, found)| found.path).ok_or_else(|| Error::NoCheckpoint {
            path: self.root.clone(),
            reason: format!("it has no step {step}"),
        })
    }

    /// Notes what is there: what is saved from now on is newer.
    pub(super) fn follows(&self, all: &[(u64, Found)]) {
        let newest = all.iter().map(|(_, found)| found.order).max();
        newest.iter().for_each(|newest| self.managed.follows(*newest));
    }

    /// Warns that the restored step is not the newest.
    pub(super) fn tell_newer(&self, step: u64, all: &[(u64, Found)]) {
        let mut numbers: Vec<u64> = newer(all, step).map(|(number, _)| *number).collect();
        numbers.dedup();
        if let Some(newest) = numbers.first() {
            let others = numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            tracing::warn!(
                "step {step} is restored, and {} has newer ones: {others}. Until the next save, a restart goes on from step \
                 {newest}; drop_newer removes them",
                self.root.display()
            );
        }
    }
}

/// Those of these steps, newest first, that are newer than this one.
fn newer(all: &[(u64, Found)], step: u64) -> impl Iterator<Item = &(u64, Found)> {
    let own =
        all.iter().filter(move |(number, _)| *number == step).map(|(_, found)| found.order).max();
    all.iter().filter(move |(number, found)| *number != step && Some(found.order) > own)
}
