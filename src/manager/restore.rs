//! Which step a manager restores, and from where.

use super::tiers::Copies;
use super::{CheckpointManager, Shared};
use crate::error::{Error, Result};
use crate::store::{self, Found, Loaded, Status, again};
use crate::sys::dir;
use std::cell::Cell;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

/// What [`CheckpointManager::restore`] does if a step is damaged or incomplete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDamage {
    /// It returns the error.
    #[default]
    Raise,
    /// It restores the newest earlier step that is intact, with a warning for each that it passes over.
    Previous,
}

/// What [`CheckpointManager::restore`] loaded.
#[derive(Debug)]
pub struct Restored {
    /// The step.
    pub step: u64,
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// Its tensors and values.
    pub loaded: Loaded,
    /// Names below which [`slim`](crate::slim()) has dropped everything: `loaded` lacks them.
    pub dropped: Vec<String>,
    /// Newer steps that are not intact, newest first, and why: empty with [`OnDamage::Raise`].
    pub passed_over: Vec<(PathBuf, Error)>,
}

impl CheckpointManager {
    /// Loads a step, or the newest: all tensors and values, each byte checked. Skips saves that never committed. `None`
    /// if no step was given and nothing was committed yet: start afresh. A warning then names the root, which may be
    /// mistyped. Does not wait for a save in the background,
    /// whose step is not there before its commit.
    ///
    /// # Errors
    /// - [`Error::NoCheckpoint`] if there is no such step.
    /// - [`Error::Invalid`] for a step together with [`OnDamage::Previous`]: no other is loaded in its place.
    /// - The damage of the step; with [`OnDamage::Previous`] that of the newest, if no earlier step is intact.
    /// - [`Error::MissingFiles`] in any case: a disk may not be mounted.
    /// - With either, a failure that is not the checkpoint's, such as a refused permission or a failing mount: an earlier
    ///   step would silently lose progress.
    pub fn restore(&self, step: Option<u64>, on_damage: OnDamage) -> Result<Option<Restored>> {
        let has_gone = Cell::new(false);
        let look = || {
            has_gone.set(false);
            self.restore_listed(step, on_damage, &has_gone)
        };
        again(look, |_| !has_gone.get())
    }

    /// [`CheckpointManager::restore`] of one look. Sets `has_gone` if a step that was listed has been removed since, and
    /// nothing else has it.
    fn restore_listed(
        &self,
        step: Option<u64>,
        on_damage: OnDamage,
        has_gone: &Cell<bool>,
    ) -> Result<Option<Restored>> {
        if let (Some(step), OnDamage::Previous) = (step, on_damage) {
            return Err(Error::invalid(format!(
                "step {step} was named, and no other is restored in its place: pass OnDamage::Raise, or no step"
            )));
        }
        let _in_use = self.shared.in_use.read().unwrap_or_else(PoisonError::into_inner);
        let mut passed_over: Vec<(PathBuf, Error)> = Vec::new();
        let candidates = self.shared.candidates(step)?;
        for (at, (number, Found { path, dropped, created_unix_ms, .. })) in
            candidates.iter().enumerate()
        {
            let (number, dropped) = (*number, dropped.clone());
            // Other copies of the same save.
            let copies = candidates[at + 1..].iter().take_while(|(other, found)| {
                (*other, found.created_unix_ms) == (number, *created_unix_ms)
            });
            let copies: Vec<PathBuf> = copies.map(|(_, found)| found.path.clone()).collect();
            match self.shared.store.load_copied(path, &copies) {
                Ok(loaded) => {
                    if !dropped.is_empty() {
                        let dropped = dropped.join(" and ");
                        tracing::warn!("`slim` has dropped {dropped} from {}", path.display());
                    }
                    self.shared.restored(path);
                    let found = || candidates.iter().map(|(_, found)| found);
                    found().for_each(|found| store::follow(&self.shared.root, found.order));
                    step.and_then(|_| found().next())
                        .iter()
                        .for_each(|one| self.shared.tell_newer(one));
                    let has_all = self.shared.copies.as_ref().is_some_and(|tiers| {
                        let same = &candidates[at + 1..=at + copies.len()];
                        tiers.have_all(same.iter().map(|(_, copy)| copy))
                    });
                    let may_lack = step.is_none() && dropped.is_empty() && !has_all;
                    let is_looked_up =
                        step.is_none() && self.shared.find_out(&candidates, &passed_over);
                    if may_lack && !is_looked_up && path.starts_with(&self.shared.root) {
                        // A kill may have cut its copy short.
                        Copies::add_found(&self.shared, path);
                    }
                    let path = path.clone();
                    return Ok(Some(Restored { step: number, path, loaded, dropped, passed_over }));
                }
                Err(error) if copies.is_empty() && store::has_gone(path) => {
                    has_gone.set(true);
                    return Err(error);
                }
                Err(error)
                    if (on_damage == OnDamage::Previous && is_damage(&error))
                        || (!copies.is_empty() && error.is_of_checkpoint()) =>
                {
                    tracing::warn!("passing over step {number}, {}: {error}", path.display());
                    passed_over.push((path.clone(), error));
                }
                Err(error) => return Err(error),
            }
        }
        match passed_over.into_iter().next() {
            Some((_, newest)) => Err(newest.without_earlier()),
            None => {
                self.shared.tell_empty();
                Ok(None)
            }
        }
    }
}

impl Shared {
    /// Warns that there is nothing to restore: the root may be mistyped.
    fn tell_empty(&self) {
        let root = self.root.display();
        let there = if dir::is_dir(&self.root) { "" } else { " (no such directory)" };
        let tiers = if self.copies.is_some() { " and its tiers" } else { "" };
        tracing::warn!("nothing in {root}{there}{tiers}: starting anew");
    }

    /// Notes which step training goes on from. Files are linked in one directory alone.
    fn restored(&self, path: &Path) {
        if path.starts_with(&self.root) {
            self.previous.iter().for_each(|previous| previous.restored(path));
        }
    }

    /// The steps that were committed in all places, newest first, of one step the nearest first: from a step on, or all.
    ///
    /// # Errors
    /// As for [`Shared::committed`] and [`Copies::committed`].
    pub(super) fn candidates(&self, from: Option<u64>) -> Result<Vec<(u64, Found)>> {
        let Some(copies) = &self.copies else { return self.committed(from) };
        let there =
            copies.committed(self)?.into_iter().filter_map(|found| Some((found.step?, found)));
        let mut there: Vec<_> =
            there.filter(|(step, _)| from.is_none_or(|from| *step == from)).collect();
        let has_it = !there.is_empty();
        let mut all = match self.committed(from) {
            Err(Error::NoCheckpoint { .. }) if has_it => Vec::new(),
            here => here?,
        };
        all.append(&mut there);
        all.sort_by_key(|(_, found)| Reverse(found.order)); // a stable sort: of copies the nearest
        Ok(all)
    }

    /// The steps that were committed, newest first, also damaged ones: from a step on, or all.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if the step is not there; [`Error::Io`] if the root cannot be listed, or the system refuses
    /// to read a directory that may be one of these steps.
    pub(super) fn committed(&self, from: Option<u64>) -> Result<Vec<(u64, Found)>> {
        let all = match self.store.list(&self.root) {
            Err(error) if error.is_not_found() => Vec::new(), // nothing was saved yet
            all => all?,
        };
        let mut steps = Vec::new();
        for found in all.into_iter().rev().filter(Found::was_committed) {
            match found.step {
                Some(step) if from.is_none_or(|from| step == from) => steps.push((step, found)),
                // Only its manifest says which step it is.
                None if found.status == Status::Unreadable => drop(self.store.open(&found.path)?),
                _ => {}
            }
        }
        match from {
            Some(from) if steps.is_empty() => {
                let reason = "no step of this number was committed here; `ringstow ls` lists those that were".into();
                Err(Error::NoCheckpoint { path: self.root.join(format!("step-{from:08}")), reason })
            }
            _ => Ok(steps),
        }
    }
}

/// Whether a step's bytes are not what was written. Files that are missing may be on a disk that is not mounted.
fn is_damage(error: &Error) -> bool {
    error.is_of_checkpoint() && !matches!(error, Error::MissingFiles { .. })
}
