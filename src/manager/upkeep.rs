//! What a manager does besides saves and loads: it copies steps on, and makes room.

use super::Shared;
use super::tiers::Copies;
use crate::error::Error;
use crate::sys::space;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

impl Shared {
    /// Copies a step that is committed, and may not survive a crash where it is.
    pub(super) fn rescue(self: &Arc<Self>, path: &Path, error: &Error) {
        if matches!(error, Error::NotDurable { .. }) && self.copies.is_some() {
            tracing::warn!("{} may not survive a crash: copying it on", path.display());
            Copies::add_found(self, path);
        }
    }

    /// Before a save for which there is no room, waits for copies, and removes what they allow. Expects a save of the size of
    /// the newest step.
    pub(super) fn make_room(self: &Arc<Self>) {
        let Some(copies) = self.copies.as_ref().filter(|_| self.clearing.evicts()) else { return };
        if self.has_room() {
            return;
        }
        self.evict_alone().iter().for_each(|path| Copies::add_found(self, path));
        if self.has_room() || copies.is_idle() {
            return;
        }
        let root = self.root.display();
        tracing::warn!(
            "{root} is full: the save waits until earlier steps are in all places and leave"
        );
        copies.wait_idle();
        self.evict_alone();
    }

    /// Whether there is room for the next save. What cannot be asked does not hold it up: it will say so itself.
    fn has_room(&self) -> bool {
        let free = space::free_at(&self.root).ok().flatten();
        free.is_none_or(|free| self.clearing.has_room(free))
    }

    /// Removes the steps that all places have, once nothing is restored any more. Returns those that are to be copied.
    pub(super) fn evict_alone(&self) -> Vec<PathBuf> {
        let _alone = self.in_use.write().unwrap_or_else(PoisonError::into_inner);
        self.clearing.evict(&self.awaited())
    }

    /// The steps that have yet to be copied.
    pub(super) fn awaited(&self) -> Vec<PathBuf> {
        self.copies.as_ref().map(Copies::awaited).unwrap_or_default()
    }

    /// After a look at all places, has the steps copied that one of them lacks, except those that cannot be loaded. Tells
    /// whether steps leave this directory at all.
    pub(super) fn find_out(
        self: &Arc<Self>,
        lacking: Vec<PathBuf>,
        passed_over: &[(PathBuf, Error)],
    ) -> bool {
        if !self.clearing.evicts() {
            return false;
        }
        passed_over.iter().for_each(|(path, _)| self.clearing.note_damage(path));
        let whole = lacking.iter().filter(|path| !self.clearing.is_damaged(path));
        whole.for_each(|path| Copies::add_found(self, path));
        true
    }
}
