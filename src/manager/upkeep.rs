//! Steps leave a manager's directory once all of its places have them.

use super::Shared;
use super::eviction::Eviction;
use super::tiers::Copies;
use crate::error::Error;
use crate::store::{Disposal, Found, Status, older_steps};
use crate::sys::{dir, space};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

impl Shared {
    fn eviction(&self) -> Option<(&Copies, &Eviction)> {
        let copies = self.copies.as_ref()?;
        Some((copies, copies.eviction.as_ref()?))
    }

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
        let Some((copies, eviction)) = self.eviction() else { return };
        if eviction.expected_bytes().is_none() {
            eviction.expect(self.newest_bytes());
        }
        if self.has_room(eviction) {
            return;
        }
        // A program that has restored nothing knows of no copies.
        if !eviction.look()
            && let Ok(found) = self.candidates(None)
        {
            self.find_out(&found, &[]);
        }
        self.evict_alone();
        if self.has_room(eviction) || copies.is_idle() {
            return;
        }
        let root = self.root.display();
        tracing::warn!(
            "{root} is full: the save waits until earlier steps are in all places and leave"
        );
        drop(copies.wait_idle());
        self.evict_alone();
    }

    /// Whether there is room for the next save. What cannot be asked does not hold it up: it will say so itself.
    fn has_room(&self, eviction: &Eviction) -> bool {
        match space::free_at(&self.root) {
            Ok(Some(free)) => free >= eviction.expected_bytes().unwrap_or(0),
            Ok(None) | Err(_) => true,
        }
    }

    fn newest_bytes(&self) -> u64 {
        let newest = self.committed(None).ok().and_then(|found| found.into_iter().next());
        newest.and_then(|(_, found)| found.file_bytes).unwrap_or(0)
    }

    /// After a save of this many bytes, removes the steps that all places have, and has those copied that a rule keeps and that
    /// copies have passed over. While nothing is restored.
    pub(super) fn evict_after(self: &Arc<Self>, saved_bytes: u64) {
        let Some((_, eviction)) = self.eviction() else { return };
        eviction.expect(saved_bytes);
        for path in self.evict() {
            Copies::add_found(self, &path);
        }
    }

    /// Removes the steps that all places have, once nothing is restored any more.
    pub(super) fn evict_alone(&self) {
        let _alone = self.in_use.write().unwrap_or_else(PoisonError::into_inner);
        self.evict();
    }

    /// Removes the steps that all places have, but for the newest. Returns the others. A failure is logged: the save went well.
    fn evict(&self) -> Vec<PathBuf> {
        let Some((_, eviction)) = self.eviction() else { return Vec::new() };
        let older = match older_steps(&self.root, eviction.keep, self.store.config()) {
            Ok(older) => older,
            Err(error) => {
                let root = self.root.display();
                tracing::warn!(%error, "steps stay in {root}, though all places may have them");
                return Vec::new();
            }
        };
        let (copied, others): (Vec<_>, Vec<_>) = older
            .into_iter()
            .partition(|step| eviction.has_copied(&step.path, step.created_unix_ms));
        copied.iter().for_each(|step| self.leave(&step.path));
        eviction.forget(dir::is_gone);
        let others = others.into_iter().map(|step| step.path);
        others.filter(|path| !eviction.is_damaged(path)).collect()
    }

    fn leave(&self, path: &Path) {
        match self.store.remove(path, Disposal::of(self.store.config())) {
            Ok(removed) => {
                for left in &removed.left {
                    tracing::warn!("{} was not removed: {}", left.path.display(), left.reason);
                }
                tracing::debug!(path = %path.display(), "a step has left: all places have it");
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%error, "{path} was not removed. The next save tries again");
            }
        }
    }

    /// After a look at all places, notes which steps here are in all of them, and has the others copied, except those that
    /// cannot be loaded. Tells whether steps leave this directory at all.
    pub(super) fn find_out(
        self: &Arc<Self>,
        found: &[(u64, Found)],
        passed_over: &[(PathBuf, Error)],
    ) -> bool {
        let Some((copies, eviction)) = self.eviction() else { return false };
        eviction.look();
        passed_over.iter().for_each(|(path, _)| eviction.note_damage(path));
        let is_here = |found: &Found| found.path.starts_with(&self.root);
        let is_whole_here =
            |(_, step): &&(u64, Found)| is_here(step) && step.status == Status::Committed;
        for (number, step) in found.iter().filter(is_whole_here) {
            let same = found.iter().filter(|(other, copy)| {
                (other, copy.created_unix_ms) == (number, step.created_unix_ms) && !is_here(copy)
            });
            if copies.have_all(same.map(|(_, copy)| copy)) {
                eviction.note(&step.path, step.created_unix_ms);
            } else if !eviction.is_damaged(&step.path) {
                Copies::add_found(self, &step.path);
            }
        }
        true
    }
}
