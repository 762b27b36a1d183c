//! Going back to an earlier step, and steps that stay whatever the rules say.

use super::tiers::Copies;
use super::{CheckpointManager, Run, Shared};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::format::manifest::Order;
use crate::store::{Found, Newer, kept, pin, unpin};
use std::path::PathBuf;

impl CheckpointManager {
    /// Removes the steps that are newer than this one, in the root and in all [places](super::Tiers): a training that goes back to it
    /// for good does not need them. Without this call they stay until the rules remove them, and the next save is newer than
    /// they are. Kept ones ([`CheckpointManager::keep`]) stay. Waits for copies in progress. Returns what was removed.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is no such step, and none is removed; the first failure of a removal, once the others
    /// are done.
    pub fn drop_newer(&mut self, step: u64) -> Result<Vec<PathBuf>> {
        self.wait()?;
        let restored = self.shared.run().named(step)?.swap_remove(0);
        let (root, config) = (&self.shared.root, self.shared.store.config());
        let Some(copies) = &self.shared.copies else {
            return self.shared.newer(restored.order)?.remove(config);
        };
        // A copy that has begun goes on without the step here, and would bring it back there.
        let here = Newer::find(root, std::slice::from_ref(root), restored.order, config)?;
        let mut removed = here.remove(config).unwrap_or_default(); // what fails is tried again
        copies.wait_idle();
        removed.extend(self.shared.newer(restored.order)?.remove(config)?);
        // Its copy may have given way to that of a step that is gone.
        if let Some(newest) = self.shared.run().committed()?.first() {
            Copies::add_found(&self.shared, &newest.path);
        }
        Ok(removed)
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
        unpin(&match kept(&self.shared.root, step) {
            Some(kept) => kept,
            None => self.shared.here(step)?,
        })
    }
}

impl Shared {
    /// The path of a step in the root.
    fn here(&self, step: u64) -> Result<PathBuf> {
        let here = Run { places: &[], ..self.run() };
        Ok(here.named(step)?.swap_remove(0).path)
    }

    /// The steps in all places that are newer than one.
    fn newer(&self, order: Order) -> Result<Newer<'_>> {
        let further = self.copies.iter().flat_map(|copies| copies.places());
        let places: Vec<PathBuf> = std::iter::once(&self.root).chain(further).cloned().collect();
        Newer::find(&self.root, &places, order, self.store.config())
    }

    /// Warns that a restored step is not the newest. It is restored even if that cannot be found out.
    pub(super) fn tell_newer(&self, restored: &Found) {
        match self.newer(restored.order) {
            Ok(newer) => newer.warn(),
            Err(error) => tracing::warn!(%error, "nobody knows whether there are newer steps"),
        }
    }
}
