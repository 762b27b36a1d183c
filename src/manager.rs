//! Saves the steps of a training, keeps those that its rules say, and resumes from the newest that is intact.
//!
//! A manager decides when to save, remove and load; `Store` does the work. It never removes anything of which no
//! newer step is committed, nor what it is restoring.

mod base;
mod clearing;
mod copying;
mod going_back;
mod line;
mod queue;
mod restore;
mod rules;
mod run;
mod slim;
mod tiers;
mod upkeep;

use crate::api::Store;
use crate::error::{Error, Result};
use crate::handle::SaveHandle;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::state::StateDict;
use crate::store::{Direction, Disposal, Found, Retained, Slimmed, check_own_name, check_run};
use crate::sys::path::absolute;
use crate::sys::run_lock::RunLock;
pub use base::Previous;
pub use clearing::{Cleared, Clearing, Eviction};
pub use copying::Copying;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

pub use line::{Around, Line};
pub use queue::{Added, Pauses, Stays};
pub use restore::{Failure, Restored, Seen, Verdict, best_of, lacking};
pub use rules::Retention;
use rules::{besides, check_keeps, room};
pub use run::{OnDamage, Run, latest_of, newest_of, usual_path};
pub use slim::Slim;
use tiers::Copies;
pub use tiers::{PAUSES, Tiers};

/// What a save of a [`CheckpointManager`] did.
#[derive(Debug)]
pub struct Saved {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// The save.
    pub report: SaveReport,
    /// What was removed after the commit, or why nothing could be, which is also logged; `None` without rules.
    pub retained: Option<Result<Retained>>,
    /// The older steps that lost a part after the commit, or why they did not, which is also logged: see [`Retention::slim`].
    /// Includes each older step once after a start, whose killed slimming it finishes. The root's path stands for an error
    /// of the listing.
    pub slimmed: Vec<(PathBuf, Result<Slimmed>)>,
}

/// The steps of one training, in one directory: `root/step-00001000`. Only what was saved under its own name is a step: a
/// copy in the root, and a step that somebody has renamed, is never counted, replaced or removed. The newest step is the one
/// with the highest number, unless the run has gone back: what is saved after that is newer.
///
/// One process saves to a root at a time. A save in the background, and the removal of old steps after it, go on while
/// the training does.
///
/// ```
/// use ringstow::{CheckpointManager, Retention, OnDamage, StateDict};
///
/// # fn main() -> ringstow::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let root = dir.path().join("run");
/// let keep = Retention { last: Some(2), best: Some("loss:min:1".parse()?), ..Retention::default() };
/// let mut manager = CheckpointManager::found(&root, keep)?;
/// for step in 1..=5 {
///     let mut state = StateDict::new();
///     state.value("step", step);
///     manager.save_async(step, state, [("loss", 1.0 / step as f64)])?;
/// }
/// manager.wait()?;
/// let restored = manager.restore(None, OnDamage::Previous)?.expect("five steps were saved");
/// assert_eq!(restored.step, 5);
/// # Ok(())
/// # }
/// ```
///
/// Dropping the manager waits for a save in progress and the copies of its step, so that a program that leaves `main` does
/// not lose it. If one fails, the error is logged.
#[derive(Debug)]
pub struct CheckpointManager {
    shared: Arc<Shared>,
    /// The save in the background whose end nobody has waited for.
    saving: Option<(SaveHandle<Saved>, PathBuf)>,
    /// From the first save on.
    run: Option<RunLock>,
    /// The steps that were there when this manager first saved, by number: a save replaces them where they are.
    found: Option<BTreeMap<u64, PathBuf>>,
}

/// What the thread of a background save needs, too.
#[derive(Debug)]
struct Shared {
    store: Store,
    root: PathBuf,
    slim: Option<Slim>,
    clearing: Clearing,
    previous: Option<Previous>,
    copies: Option<Copies>,
    /// Held for reading by a restore, and for writing by a removal: nothing goes that is being restored.
    in_use: RwLock<()>,
}

impl CheckpointManager {
    /// A manager of the steps in `root`, which need not exist yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rule that keeps nothing; [`Error::Io`] if the current directory of a relative `root`
    /// cannot be found.
    pub fn new(store: Store, root: impl AsRef<Path>, keep: Retention) -> Result<Self> {
        Self::with(store, root.as_ref(), keep, None)
    }

    /// [`CheckpointManager::new`] with saves that take the step before as their [base](StateDict::base): tensors that have
    /// not changed are linked, not written. The files of a base that cannot be used are written, and the report says why.
    ///
    /// A linked file is one copy on the disk, and damage to it is damage to all steps that share it. With `full_every`,
    /// every save of that number writes all files anew.
    ///
    /// # Errors
    /// As for [`CheckpointManager::new`]; [`Error::Invalid`] if `full_every` is 0.
    pub fn linking(
        store: Store,
        root: impl AsRef<Path>,
        keep: Retention,
        full_every: Option<u64>,
    ) -> Result<Self> {
        if full_every == Some(0) {
            return Err(Error::invalid("full_every is 0: 1 writes all files at each save"));
        }
        Self::with(store, root.as_ref(), keep, Some(Previous::new(full_every)))
    }

    fn with(
        store: Store,
        root: &Path,
        keep: Retention,
        previous: Option<Previous>,
    ) -> Result<Self> {
        let slim = keep.slim.clone();
        let mut config = store.config().clone();
        let (places, rate) = (std::mem::take(&mut config.tiers), config.promotion_rate);
        let (has_tiers, store) = (!places.is_empty(), Store::new(config)?);
        let (root, in_use) = (absolute(root)?, RwLock::new(()));
        let config = store.config().clone();
        let clearing = Clearing::new(root.clone(), keep, config)?;
        let copies = None;
        let shared = Shared { store, root, slim, clearing, previous, copies, in_use };
        let manager = Self { shared: Arc::new(shared), saving: None, run: None, found: None };
        match has_tiers {
            true => manager.tiers(Tiers { places, rate, ..Tiers::default() }),
            false => Ok(manager),
        }
    }

    /// Copies each step to further places once it is committed, in the background, as [`Store::promote`](crate::Store::promote) does. If
    /// saves are faster, steps in between are passed over, except those that [`Retention::every`] keeps.
    /// [`CheckpointManager::restore`] then takes the newest step of all places, each file from the nearest copy, and what is
    /// damaged there from the next. A failed copy is logged and tried again. Without this call, these are the places of
    /// [`Config::tiers`](crate::Config::tiers).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a place that is in the root or has it in itself, for a rule that keeps nothing, for
    /// [`Tiers::keep_here`] without a place, for [`Tiers::keep`] that removes what [`Tiers::keep_here`] or the manager's
    /// rules keep, and once a step is saved.
    pub fn tiers(mut self, tiers: Tiers) -> Result<Self> {
        let Some(shared) = Arc::get_mut(&mut self.shared) else {
            return Err(Error::invalid("tiers are named before the first save"));
        };
        let retention = tiers.keep.clone().options(Disposal::Remove);
        let own = shared.clearing.retention();
        let retention = retention.map(|there| besides(there, own));
        if let (Some(there), Some(keep_here)) = (&retention, tiers.keep_here) {
            check_keeps(there, own, keep_here)?;
        }
        let every = own.and_then(|retention| retention.every);
        let stays = Stays { has_rule: own.is_some(), evicts: tiers.keep_here.is_some(), every };
        let (stripe, keep_here) = (&*shared.store.config().stripe, tiers.keep_here);
        let copies = Copies::new(&shared.root, tiers, (retention, stays), stripe)?;
        if let Some(keep) = keep_here {
            shared.clearing.set_eviction(Eviction { places: copies.places().to_vec(), keep })?;
        }
        shared.copies = Some(copies);
        Ok(self)
    }

    /// Waits for the save in the background, and until its step is in all [tiers](CheckpointManager::tiers).
    ///
    /// # Errors
    /// That of the save, or why the last step was not copied.
    pub fn wait_promoted(&mut self) -> Result<()> {
        self.wait()?;
        self.shared.copies.as_ref().map_or(Ok(()), Copies::wait)
    }

    /// [`CheckpointManager::new`] with the configuration that is [found](crate::Config::found).
    ///
    /// # Errors
    /// As for [`CheckpointManager::new`] and [`Config::found`](crate::Config::found).
    pub fn found(root: impl AsRef<Path>, keep: Retention) -> Result<Self> {
        Self::new(Store::found()?, root, keep)
    }

    /// The directory of the steps.
    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    /// Saves a step, and removes those that the rules do not keep. Notes `step`, `metrics` and [`Slim::drop`] in `state`. First waits for
    /// the save in the background.
    ///
    /// # Errors
    /// [`Error::RunBusy`] if another manager has saved into the root and is not dropped yet, in this process or another.
    /// That of the save in the background; then this one was not begun. As for [`save`](crate::save) and
    /// [`StateDict::metrics`]. A failed removal is no error: see [`Saved::retained`].
    pub fn save<K: Into<String>>(
        &mut self,
        step: u64,
        state: &mut StateDict<'_>,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<Saved> {
        self.wait()?;
        self.own_run()?;
        self.shared.make_room();
        self.shared.note(step, state, metrics)?;
        let path = self.path(step)?;
        let saved = self.shared.store.save(state, &path);
        let report = saved.map_err(|error| self.shared.failed(&path, error))?;
        Ok(self.shared.clean_up(path, report))
    }

    /// [`CheckpointManager::save`] in the background. At most one save is in progress: first waits for the one before.
    /// Returns the job, by which to wait until the tensors are staged; see [`save_async`](crate::save_async) for when they
    /// may change.
    ///
    /// # Errors
    /// That of the save before; then this one was not begun. As for [`save_async`](crate::save_async) and
    /// [`StateDict::metrics`]. [`CheckpointManager::wait`] returns any other error.
    pub fn save_async<K: Into<String>>(
        &mut self,
        step: u64,
        mut state: StateDict<'static>,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<Arc<Job>> {
        self.wait()?;
        self.own_run()?;
        self.shared.make_room();
        self.shared.note(step, &mut state, metrics)?;
        let (shared, path) = (self.shared.clone(), self.path(step)?);
        let to = path.clone();
        let saving =
            self.shared.store.save_then(state, &to, move |report| shared.clean_up(path, report))?;
        let job = saving.job().clone();
        self.saving = Some((saving, to));
        Ok(job)
    }

    /// Whether a save, or the removal of old steps after it, is in progress in the background: the next call waits for it.
    pub fn is_saving(&self) -> bool {
        self.saving.as_ref().is_some_and(|(saving, _)| !saving.done())
    }

    /// Waits for the save in the background, and for the removal of old steps after it. `None` if there is none, or a
    /// call has waited for it.
    ///
    /// # Errors
    /// That of the save.
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        let Some((saving, path)) = self.saving.take() else { return Ok(None) };
        let saved = saving.result();
        saved.map(Some).map_err(|error| self.shared.failed(&path, error))
    }

    /// The steps, oldest first, including those that cannot be loaded. Empty if nothing was saved yet.
    ///
    /// # Errors
    /// As for [`steps`](crate::steps).
    pub fn steps(&self) -> Result<Vec<Found>> {
        let mut steps = self.shared.store.steps(&self.shared.root, None)?;
        steps.retain(|found| found.step.is_some());
        Ok(steps)
    }

    /// The newest step that can be loaded; `None` if nothing was committed yet. With [`Tiers`], of all places, the nearest copy
    /// that is whole by itself.
    ///
    /// # Errors
    /// As for [`latest`](crate::latest); [`Error::Invalid`] if the root has a checkpoint, but none that counts as a step; what a
    /// place says that cannot be asked.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.shared.run().newest()?.map(|found| found.path))
    }

    /// The best step by a metric; of equals, the newer. `None` if no step that can be loaded has a number for it. With
    /// [`Tiers`], of all places, the nearest copy.
    ///
    /// # Errors
    /// As for [`steps`](crate::steps); what a place says that cannot be asked.
    pub fn best(&self, metric: &str, direction: Direction) -> Result<Option<Found>> {
        let newest_first = self.shared.run().loadable()?;
        let numbers = newest_first.iter().map(|found| found.metrics.get(metric).copied());
        let best = best_of(numbers, direction);
        Ok(best.and_then(|at| newest_first.into_iter().nth(at)))
    }

    /// Keeps other managers from saving into the root, from the first save on.
    fn own_run(&mut self) -> Result<()> {
        match &self.run {
            Some(held) => held.check(),
            None => {
                check_run(&self.shared.root)?;
                self.run = Some(RunLock::take(&self.shared.root, || Ok(()))?);
                Ok(())
            }
        }
    }

    /// Where a save of this step goes: over the earlier checkpoint of it, whatever its name.
    ///
    /// # Errors
    /// As for [`check_own_name`].
    fn path(&mut self, step: u64) -> Result<PathBuf> {
        if self.found.is_none() {
            match self.steps() {
                Ok(steps) => {
                    let steps = steps.into_iter();
                    self.found =
                        Some(steps.filter_map(|found| Some((found.step?, found.path))).collect());
                }
                // It says nothing about the save, which may go well.
                Err(error) => {
                    tracing::warn!("cannot list the steps in {}: {error}", self.root().display());
                }
            }
        }
        let found = self.found.as_ref().and_then(|found| found.get(&step)).cloned();
        let path = found.unwrap_or_else(|| usual_path(self.root(), step));
        check_own_name(&path).map(|()| path)
    }
}

impl Shared {
    /// Notes what a save needs to know.
    fn note<K: Into<String>>(
        &self,
        step: u64,
        state: &mut StateDict<'_>,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<()> {
        self.slim.iter().for_each(|slim| slim.make_droppable(state));
        if let Some(base) = self.base() {
            state.base(base);
        }
        state.step(step).metrics(metrics).map(drop)
    }

    /// The error of a save to `path`, with what the rules have to do with it; copies a step that may not survive a crash.
    fn failed(self: &Arc<Self>, path: &Path, error: Error) -> Error {
        self.rescue(path, &error);
        error.needing_room(&room(self.clearing.retention()))
    }

    /// Removes the steps that no rule keeps, and parts of older ones, after a commit.
    fn clean_up(self: &Arc<Self>, path: PathBuf, report: SaveReport) -> Saved {
        self.previous.iter().for_each(|previous| previous.saved(&path));
        let _alone = self.in_use.write().unwrap_or_else(PoisonError::into_inner);
        let Cleared { retained, slimmed, lacking } = self.clearing.after_save(&self.awaited());
        // After the look at the places: the copy of this step removes there what their rules no longer keep.
        Copies::add(self, &path);
        lacking.iter().for_each(|path| Copies::add_found(self, path));
        Saved { path, report, retained, slimmed }
    }
}

impl Drop for CheckpointManager {
    /// Waits for the save in progress and the copies of its step. A copy that failed is tried a last time. Blocks the thread: a task
    /// drops its manager where it may block.
    fn drop(&mut self) {
        if let Some((saving, _)) = self.saving.take() {
            saving.wait(None);
        }
        if let Some(copies) = &self.shared.copies {
            copies.close();
            drop(self.shared.evict_alone());
        }
    }
}

#[cfg(test)]
mod tests;
