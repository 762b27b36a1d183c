//! Steps leave a manager's directory once all of its places have them.

use super::Shared;
use super::eviction::Eviction;
use super::tiers::Copies;
use crate::error::Error;
use crate::store::{Found, Status, evict, is_everywhere};
use crate::sys::{dir, space};
use std::collections::HashSet;
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
        self.evict_alone().iter().for_each(|path| Copies::add_found(self, path));
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

    /// After a save of this many bytes, removes the steps that all places have. Returns those that are to be copied. While
    /// nothing is restored.
    pub(super) fn evict_after(&self, saved_bytes: u64) -> Vec<PathBuf> {
        let Some((_, eviction)) = self.eviction() else { return Vec::new() };
        eviction.expect(saved_bytes);
        self.evict()
    }

    /// Removes the steps that all places have, once nothing is restored any more. Returns those that are to be copied.
    pub(super) fn evict_alone(&self) -> Vec<PathBuf> {
        let _alone = self.in_use.write().unwrap_or_else(PoisonError::into_inner);
        self.evict()
    }

    /// Removes the steps that all places have, but for the newest. Returns those that a place lacks. A failure is logged: the
    /// save went well.
    fn evict(&self) -> Vec<PathBuf> {
        let Some((copies, eviction)) = self.eviction() else { return Vec::new() };
        eviction.forget(|step| dir::is_gone(step));
        let (config, awaited) = (self.store.config(), copies.awaited());
        let done = match evict(&self.root, copies.places(), eviction.keep, &awaited, config) {
            Ok(done) => done,
            Err(error) => {
                let root = self.root.display();
                tracing::warn!(%error, "steps stay in {root}, though all places may have them");
                return Vec::new();
            }
        };
        for left in &done.left {
            tracing::warn!("{} was not removed: {}", left.path.display(), left.reason);
        }
        let mut told = HashSet::new();
        let stay = done.stay.into_iter().filter(|step| !eviction.is_damaged(&step.path));
        let told = stay.inspect(|step| {
            if told.insert(step.reason.clone()) {
                let next = if step.is_lacking { ". It leaves once it is copied there" } else { "" };
                tracing::warn!("{} stays: {}{next}", step.path.display(), step.reason);
            }
        });
        told.filter(|step| step.is_lacking).map(|step| step.path).collect()
    }

    /// After a look at all places, has the steps here copied that a place lacks, except those that cannot be loaded. Tells
    /// whether steps leave this directory at all.
    pub(super) fn find_out(
        self: &Arc<Self>,
        found: &[(u64, Found)],
        passed_over: &[(PathBuf, Error)],
    ) -> bool {
        let Some((copies, eviction)) = self.eviction() else { return false };
        passed_over.iter().for_each(|(path, _)| eviction.note_damage(path));
        let is_here = |found: &Found| found.path.starts_with(&self.root);
        let is_whole_here =
            |(_, step): &&(u64, Found)| is_here(step) && step.status == Status::Committed;
        for (number, step) in found.iter().filter(is_whole_here) {
            let same = found.iter().filter(|(other, copy)| {
                (other, copy.created_unix_ms) == (number, step.created_unix_ms) && !is_here(copy)
            });
            if !copies.have_all(same.map(|(_, copy)| copy)) && !eviction.is_damaged(&step.path) {
                Copies::add_found(self, &step.path);
            }
        }
        true
    }

    /// Whether a step is to stay whole here, since a place lacks it yet.
    pub(super) fn awaits(&self, path: &Path) -> bool {
        let Some(copies) = &self.copies else { return false };
        let leaves = copies.eviction.is_some();
        copies.awaits(path) || leaves && !is_everywhere(path, copies.places())
    }
}
