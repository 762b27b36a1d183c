//! Which step a manager restores, and from where.

use super::run::{OnDamage, Run};
use super::tiers::Copies;
use super::{CheckpointManager, Shared};
use crate::error::{Error, Result};
use crate::format::manifest::Order;
use crate::store::{self, Direction, Found, Loaded, Status, again};
use crate::sys::dir;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// What [`CheckpointManager::restore`] loaded.
#[derive(Debug)]
pub struct Restored {
    /// The step.
    pub step: u64,
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// Its tensors and values.
    pub loaded: Loaded,
    /// Names below which [`Store::slim`](crate::Store::slim) has dropped everything: `loaded` lacks them.
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
    /// - [`Error::Invalid`] for a step together with [`OnDamage::Previous`]: no other is loaded in its place; or if the root has
    ///   a checkpoint, but none that counts as a step.
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
        let run = self.shared.run();
        let candidates = match step {
            Some(step) => run.named(step)?,
            None => run.candidates(on_damage)?,
        };
        for (at, found) in candidates.iter().enumerate() {
            let number = found.step.unwrap_or_default();
            let copies = candidates[at + 1..].iter().take_while(|copy| copy.order == found.order);
            let copies: Vec<PathBuf> = copies.map(|copy| copy.path.clone()).collect();
            let error = match self.shared.store.load_copied(&found.path, &copies) {
                Ok(loaded) => {
                    self.shared.follow_restore(found, step.is_some(), &candidates, &passed_over);
                    let (path, dropped) = (found.path.clone(), found.dropped.clone());
                    return Ok(Some(Restored { step: number, path, loaded, dropped, passed_over }));
                }
                Err(error) => error,
            };
            let failure = Failure {
                path: &found.path,
                has_copies: !copies.is_empty(),
                is_damage: error.is_damage(),
                is_missing: error.is_of_checkpoint(),
            };
            match failure.verdict(on_damage) {
                Verdict::LookAgain => {
                    has_gone.set(true);
                    return Err(error);
                }
                Verdict::Raise => return Err(error),
                Verdict::PassOver => {
                    tracing::warn!("passing over step {number}, {}: {error}", found.path.display());
                    passed_over.push((found.path.clone(), error));
                }
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

/// What a load that failed means for a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The step was removed since it was listed: the run is looked at again.
    LookAgain,
    /// The restore fails.
    Raise,
    /// The next copy is loaded, or an earlier step.
    PassOver,
}

/// A load of a step, of which further places may have copies, that failed.
#[derive(Debug, Clone, Copy)]
pub struct Failure<'a> {
    /// The step's directory.
    pub path: &'a Path,
    /// Whether further places may have copies of it that were not tried yet.
    pub has_copies: bool,
    /// Whether bytes are not those that were written, or cannot be read.
    pub is_damage: bool,
    /// Whether files are missing, as they also are on a disk that is not mounted.
    pub is_missing: bool,
}

impl Failure<'_> {
    /// Missing files must not cost progress: only damage leads to an earlier step, and either to a copy.
    pub fn verdict(&self, on_damage: OnDamage) -> Verdict {
        match self.has_copies {
            false if store::has_gone(self.path) => Verdict::LookAgain,
            true if self.is_damage || self.is_missing => Verdict::PassOver,
            false if self.is_damage && on_damage == OnDamage::Previous => Verdict::PassOver,
            _ => Verdict::Raise,
        }
    }
}

/// A step that a look at a run and its places has found. Copies of one save have the same order.
#[derive(Debug)]
pub struct Seen {
    /// Its directory.
    pub path: PathBuf,
    /// The greater is the newer.
    pub order: Order,
    /// Whether it can be loaded.
    pub is_whole: bool,
}

/// The whole steps in a run's directory of which one of its places lacks a whole copy.
pub fn lacking(found: &[Seen], places: &[PathBuf]) -> Vec<PathBuf> {
    let in_place = |seen: &Seen, place: &Path| seen.path.parent() == Some(place);
    let has = |place: &PathBuf, order: &Order| {
        found.iter().any(|copy| copy.is_whole && copy.order == *order && in_place(copy, place))
    };
    let is_here = |seen: &&Seen| seen.is_whole && !places.iter().any(|place| in_place(seen, place));
    let lacks = |seen: &&Seen| !places.iter().all(|place| has(place, &seen.order));
    found.iter().filter(is_here).filter(lacks).map(|seen| seen.path.clone()).collect()
}

/// Which of some steps, newest first, has the best number; of equals, the newest. NaN counts as none.
pub fn best_of(
    numbers: impl IntoIterator<Item = Option<f64>>,
    direction: Direction,
) -> Option<usize> {
    let numbers = numbers.into_iter().enumerate();
    let numbers = numbers.filter_map(|(at, number)| Some((number.filter(|n| !n.is_nan())?, at)));
    numbers.min_by(|(a, _), (b, _)| direction.compare(*a, *b)).map(|(_, at)| at) // the first of equals
}

impl Shared {
    /// The steps here and in the places.
    pub(super) fn run(&self) -> Run<'_> {
        let places = self.copies.as_ref().map_or(&[][..], Copies::places);
        Run { root: &self.root, places, config: self.store.config() }
    }

    /// After a step was loaded: says what it lacks and which steps are newer, and has copies made that are missing.
    fn follow_restore(
        self: &Arc<Self>,
        restored: &Found,
        is_named: bool,
        candidates: &[Found],
        passed_over: &[(PathBuf, Error)],
    ) {
        let path = &restored.path;
        if !restored.dropped.is_empty() {
            let dropped = restored.dropped.join(" and ");
            tracing::warn!("`slim` has dropped {dropped} from {}", path.display());
        }
        self.restored(path);
        candidates.iter().for_each(|found| store::follow(&self.root, found.order));
        if is_named {
            return candidates.iter().take(1).for_each(|one| self.tell_newer(one));
        }
        let lacking = self.lacking(candidates);
        let is_lacking = lacking.contains(path);
        if !self.find_out(lacking, passed_over) && restored.dropped.is_empty() && is_lacking {
            // A kill may have cut its copy short.
            Copies::add_found(self, path);
        }
    }

    /// The whole steps in the root that a place lacks, going by what was found.
    fn lacking(&self, found: &[Found]) -> Vec<PathBuf> {
        let Some(copies) = &self.copies else { return Vec::new() };
        let seen = found.iter().map(|found| Seen {
            path: found.path.clone(),
            order: found.order,
            is_whole: found.status == Status::Committed,
        });
        lacking(&seen.collect::<Vec<_>>(), copies.places())
    }

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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::manifest::Age;

    fn seen(path: &str, sequence: u64) -> Seen {
        let age = Age { sequence, created_unix_ms: Some(7) };
        Seen { path: path.into(), order: Order { branch: 0, step: Some(2), age }, is_whole: true }
    }

    #[test]
    fn another_save_of_the_number_at_the_same_time_is_no_copy() {
        let places = [PathBuf::from("/there")];
        let lacks =
            |there| lacking(&[seen("/here/step-2", 2), seen("/there/step-2", there)], &places);
        assert_eq!(lacks(1), [PathBuf::from("/here/step-2")]);
        assert!(lacks(2).is_empty());
    }

    #[test]
    fn missing_files_lead_to_a_copy_and_never_to_an_earlier_step() {
        let step = tempfile::tempdir().unwrap();
        std::fs::write(step.path().join("manifest.json"), "{}").unwrap();
        let verdict = |has_copies, is_damage| {
            let failure =
                Failure { path: step.path(), has_copies, is_damage, is_missing: !is_damage };
            [OnDamage::Raise, OnDamage::Previous].map(|on_damage| failure.verdict(on_damage))
        };
        assert_eq!(verdict(true, false), [Verdict::PassOver; 2]);
        assert_eq!(verdict(false, false), [Verdict::Raise; 2]);
        assert_eq!(verdict(true, true), [Verdict::PassOver; 2]);
        assert_eq!(verdict(false, true), [Verdict::Raise, Verdict::PassOver]);
    }
}
