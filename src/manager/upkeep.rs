//! Steps leave a manager's directory once all of its places have them.

use super::Shared;
use super::eviction::Eviction;
use super::tiers::Copies;
use crate::store::{Disposal, Found, Status, older_steps};
use crate::sys::space;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

impl Shared {
    fn eviction(&self) -> Option<(&Copies, &Eviction)> {
        let copies = self.copies.as_ref()?;
        Some((copies, copies.eviction.as_ref()?))
    }

    /// Before a save for which there is no room, waits for copies, and removes what they allow. Expects a save of the size of
    /// the newest step.
    pub(super) fn make_room(self: &Arc<Self>) {
        let Some((copies, eviction)) = self.eviction() else { return };
        // What cannot be asked does not hold a save up: it will say so itself.
        let has_room = || match space::free_at(&self.root) {
            Ok(Some(free)) => free >= eviction.expected_bytes(),
            Ok(None) | Err(_) => true,
        };
        if has_room() {
            return;
        }
        self.evict_alone();
        if has_room() || copies.is_idle() {
            return;
        }
        let root = self.root.display();
        tracing::warn!(
            "{root} is full: the save waits until earlier steps are in all places and leave"
        );
        drop(copies.wait_idle());
        self.evict_alone();
    }

    /// After a save of this many bytes, removes the steps that all places have, and has those copied that a rule keeps and that
    /// copies have passed over. While nothing is restored.
    pub(super) fn evict_after(self: &Arc<Self>, saved_bytes: u64) {
        let Some((_, eviction)) = self.eviction() else { return };
        eviction.expect(saved_bytes);
        for path in self.evict() {
            Copies::await_copy(self, &path);
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
        for step in copied {
            if self.leaves(&step.path) {
                eviction.forget(&step.path, step.created_unix_ms);
            }
        }
        others.into_iter().map(|step| step.path).collect()
    }

    /// Removes a step; tells whether it is gone.
    fn leaves(&self, path: &Path) -> bool {
        match self.store.remove(path, Disposal::of(self.store.config())) {
            Ok(removed) => {
                for left in &removed.left {
                    tracing::warn!("{} was not removed: {}", left.path.display(), left.reason);
                }
                tracing::debug!(path = %path.display(), "a step has left: all places have it");
                true
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%error, "{path} was not removed. The next save tries again");
                false
            }
        }
    }

    /// After a look at all places, notes which steps here are in all of them, and has the others copied. Tells whether steps
    /// leave this directory at all.
    pub(super) fn find_out(self: &Arc<Self>, found: &[(u64, Found)]) -> bool {
        let Some((copies, eviction)) = self.eviction() else { return false };
        let is_here = |found: &Found| found.path.starts_with(&self.root);
        let mut here = found.iter().filter(|(_, found)| is_here(found)).peekable();
        if let Some((_, newest)) = here.peek() {
            eviction.expect(newest.file_bytes.unwrap_or(0));
        }
        for (number, step) in here.filter(|(_, step)| step.status == Status::Committed) {
            let same = found.iter().filter(|(other, copy)| {
                (other, copy.created_unix_ms) == (number, step.created_unix_ms) && !is_here(copy)
            });
            match copies.have_all(same.map(|(_, copy)| copy)) {
                true => eviction.note(&step.path, step.created_unix_ms),
                false => Copies::await_copy(self, &step.path),
            }
        }
        true
    }
}
