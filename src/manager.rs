//! Saves the steps of a training, keeps those that its rules say, and resumes from the newest that is intact.
//!
//! A manager decides when to save, remove and load; `Store` does the work. It never removes anything of which no
//! newer step is committed, nor what it is restoring.

mod base;
mod eviction;
mod queue;
mod slim;
mod tiers;
mod upkeep;

use crate::api::Store;
use crate::error::{Error, Result};
use crate::handle::SaveHandle;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::state::StateDict;
use crate::store::{
    Best, Direction, Disposal, Found, Loaded, Retained, Retention, Slimmed, Status, Wanted,
};
use crate::sys::dir;
use crate::sys::path::absolute;
use base::Previous;
use slim::Slimming;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

pub use slim::Slim;
pub use tiers::Tiers;
use tiers::{Copies, Stays};

/// Which steps a [`CheckpointManager`] keeps. A step stays if one rule keeps it. Without a rule, all stay. The newest
/// step always stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keep {
    /// How many of the newest steps.
    pub last: Option<usize>,
    /// Steps that this number divides.
    pub every: Option<u64>,
    /// The best steps by a metric.
    pub best: Option<Best>,
    /// Which of the steps that stay lose a part, such as the optimizer's state. Removes no step.
    pub slim: Option<Slim>,
}

impl Keep {
    /// The retention that carries these rules out; `None` if nothing is ever removed.
    fn retention(self, disposal: Disposal) -> Option<Retention> {
        let Self { last, every: keep_every, best: keep_best, slim: _ } = self;
        let has_rule = last.is_some() || keep_every.is_some() || keep_best.is_some();
        let newest = Retention::new(last.unwrap_or(1));
        has_rule.then_some(Retention { keep_every, keep_best, disposal, ..newest })
    }
}

/// What [`CheckpointManager::restore`] does if a step is damaged or incomplete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDamage {
    /// It returns the error.
    #[default]
    Raise,
    /// It restores the newest earlier step that is intact, with a warning for each that it passes over.
    Previous,
}

/// What a save of a [`CheckpointManager`] did.
#[derive(Debug)]
pub struct Saved {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// The save.
    pub report: SaveReport,
    /// What was removed after the commit, or why nothing could be, which is also logged; `None` without rules.
    pub retained: Option<Result<Retained>>,
    /// The older steps that lost a part after the commit, or why they did not, which is also logged: see [`Keep::slim`].
    /// Includes each older step once after a start, whose killed slimming it finishes. The root's path stands for an error
    /// of the listing.
    pub slimmed: Vec<(PathBuf, Result<Slimmed>)>,
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

/// The steps of one training, in one directory: `root/step-00001000`. Steps are found again by the number in their
/// manifests, whatever their directories are called.
///
/// One process saves to a root at a time. A save in the background, and the removal of old steps after it, go on while
/// the training does.
///
/// ```
/// use ringstow::{CheckpointManager, Keep, OnDamage, StateDict};
///
/// # fn main() -> ringstow::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let root = dir.path().join("run");
/// let keep = Keep { last: Some(2), best: Some("loss:min:1".parse()?), ..Keep::default() };
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
}

/// What the thread of a background save needs, too.
#[derive(Debug)]
struct Shared {
    store: Store,
    root: PathBuf,
    retention: Option<Retention>,
    slim: Option<Slim>,
    slimming: Mutex<Slimming>,
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
    pub fn new(store: Store, root: impl AsRef<Path>, keep: Keep) -> Result<Self> {
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
        keep: Keep,
        full_every: Option<u64>,
    ) -> Result<Self> {
        if full_every == Some(0) {
            return Err(Error::invalid("full_every is 0: 1 writes all files at each save"));
        }
        Self::with(store, root.as_ref(), keep, Some(Previous::new(full_every)))
    }

    fn with(store: Store, root: &Path, keep: Keep, previous: Option<Previous>) -> Result<Self> {
        let slim = keep.slim.clone();
        let mut config = store.config().clone();
        let (places, rate) = (std::mem::take(&mut config.tiers), config.promotion_rate);
        let (has_tiers, store) = (!places.is_empty(), Store::new(config)?);
        let retention = keep.retention(Disposal::of(store.config()));
        retention.as_ref().map_or(Ok(()), Retention::check)?;
        slim.as_ref().map_or(Ok(()), Slim::check)?;
        let (root, in_use) = (absolute(root)?, RwLock::new(()));
        let slimming = Mutex::default();
        let copies = None;
        let shared = Shared { store, root, retention, slim, slimming, previous, copies, in_use };
        let manager = Self { shared: Arc::new(shared), saving: None };
        match has_tiers {
            true => manager.tiers(Tiers { places, rate, ..Tiers::default() }),
            false => Ok(manager),
        }
    }

    /// Copies each step to further places once it is committed, in the background, as [`promote`](crate::promote()) does. If
    /// saves are faster, steps in between are passed over, except those that [`Keep::every`] keeps.
    /// [`CheckpointManager::restore`] then takes the newest step of all places, each file from the nearest copy, and what is
    /// damaged there from the next. A failed copy is logged and tried again. Without this call, these are the places of
    /// [`Config::tiers`](crate::Config::tiers).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a place that is in the root or has it in itself, for a rule that keeps nothing, for
    /// [`Tiers::keep_here`] without a place, and once a step is saved.
    pub fn tiers(mut self, tiers: Tiers) -> Result<Self> {
        let Some(shared) = Arc::get_mut(&mut self.shared) else {
            return Err(Error::invalid("tiers are named before the first save"));
        };
        let retention = tiers.keep.clone().retention(Disposal::Remove);
        let own = shared.retention.as_ref();
        let retention = retention.map(|there| besides(there, own));
        if let (Some(there), Some(own), Some(_)) = (&retention, own, tiers.keep_here) {
            check_keeps(there, own)?;
        }
        let every = shared.retention.as_ref().and_then(|retention| retention.keep_every);
        let stays = Stays { has_rule: shared.retention.is_some(), every };
        let stripe = &*shared.store.config().stripe;
        let copies = Copies::new(&shared.root, tiers, (retention, stays), stripe)?;
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
    pub fn found(root: impl AsRef<Path>, keep: Keep) -> Result<Self> {
        Self::new(Store::found()?, root, keep)
    }

    /// The directory of the steps.
    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    /// Saves a step, and removes those that the rules do not keep. Notes `step`, `metrics` and [`Slim::parts`] in `state`. First waits for
    /// the save in the background.
    ///
    /// # Errors
    /// That of the save in the background; then this one was not begun. As for [`save`](crate::save) and
    /// [`StateDict::metrics`]. A failed removal is no error: see [`Saved::retained`].
    pub fn save<K: Into<String>>(
        &mut self,
        step: u64,
        state: &mut StateDict<'_>,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<Saved> {
        self.wait()?;
        self.shared.make_room();
        self.shared.note(step, state, metrics)?;
        let path = self.path(step);
        let saved = self.shared.store.save(state, &path);
        let report = saved.inspect_err(|error| self.shared.rescue(&path, error))?;
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
        self.shared.make_room();
        self.shared.note(step, &mut state, metrics)?;
        let (shared, path) = (self.shared.clone(), self.path(step));
        let to = path.clone();
        let saving =
            self.shared.store.save_then(state, &to, move |report| shared.clean_up(path, report))?;
        let job = saving.job().clone();
        self.saving = Some((saving, to));
        Ok(job)
    }

    /// Waits for the save in the background, and for the removal of old steps after it. `None` if there is none, or a
    /// call has waited for it.
    ///
    /// # Errors
    /// That of the save.
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        let Some((saving, path)) = self.saving.take() else { return Ok(None) };
        let saved = saving.result();
        saved.map(Some).inspect_err(|error| self.shared.rescue(&path, error))
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
    /// As for [`latest`](crate::latest); what a place says that cannot be asked.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        if self.shared.copies.is_none() {
            return self.shared.store.latest(&self.shared.root, &Wanted::default());
        }
        let found = self.shared.candidates(None)?;
        let whole = found.iter().find(|(_, found)| found.status == Status::Committed);
        match (whole, found.first()) {
            (Some((_, found)), _) => Ok(Some(found.path.clone())),
            (None, None) => Ok(None),
            // Says what is wrong with it: training must not begin anew.
            (None, Some((_, newest))) => {
                crate::store::Checkpoint::open(&newest.path).map(|_| Some(newest.path.clone()))
            }
        }
    }

    /// The best step by a metric; of equals, the newer. `None` if no step that can be loaded has a number for it. With
    /// [`Tiers`], of all places, the nearest copy.
    ///
    /// # Errors
    /// As for [`steps`](crate::steps); what a place says that cannot be asked.
    pub fn best(&self, metric: &str, direction: Direction) -> Result<Option<Found>> {
        let number = |found: &Found| {
            let number = found.metrics.get(metric).copied();
            number.filter(|number| found.status == Status::Committed && !number.is_nan())
        };
        let newest_first: Vec<Found> = match self.shared.copies {
            None => self.steps()?.into_iter().rev().collect(),
            Some(_) => self.shared.candidates(None)?.into_iter().map(|(_, found)| found).collect(),
        };
        let newest_first = newest_first.into_iter();
        let numbered = newest_first.filter_map(|found| Some((number(&found)?, found)));
        let best = numbered.min_by(|(a, _), (b, _)| direction.compare(*a, *b)); // the first of equals
        Ok(best.map(|(_, found)| found))
    }

    /// Loads a step, or the newest: all tensors and values, each byte checked. Skips saves that never committed. `None`
    /// if no step was given and nothing was committed yet: start afresh. Does not wait for a save in the background,
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
            None => Ok(None),
        }
    }

    /// Where a save of this step goes: over an earlier checkpoint of it, if that has one of the usual names.
    fn path(&self, step: u64) -> PathBuf {
        let own = self.shared.root.join(format!("step-{step:08}"));
        let short = self.shared.root.join(format!("step-{step}"));
        if !dir::has(&own) && dir::has(&short) { short } else { own }
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
        self.slim.iter().for_each(|slim| slim.set_apart(state));
        if let Some(base) = self.base() {
            state.base(base);
        }
        state.step(step).metrics(metrics).map(drop)
    }

    /// Removes the steps that no rule keeps, and parts of older ones, after a commit.
    fn clean_up(self: &Arc<Self>, path: PathBuf, report: SaveReport) -> Saved {
        Copies::add(self, &path);
        self.previous.iter().for_each(|previous| previous.saved(&path));
        let _alone = self.in_use.write().unwrap_or_else(PoisonError::into_inner);
        let retained =
            self.retention.as_ref().map(|retention| self.store.retain(&self.root, retention));
        if let Some(Err(error)) = &retained {
            let path = path.display();
            tracing::warn!(%path, %error, "the step is committed, and old steps could not be removed");
        }
        let slimmed = self.slim();
        self.evict_after(report.file_bytes);
        Saved { path, report, retained, slimmed }
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
    fn candidates(&self, from: Option<u64>) -> Result<Vec<(u64, Found)>> {
        let Some(copies) = &self.copies else { return self.committed(from) };
        let there =
            copies.committed(self)?.into_iter().filter_map(|found| Some((found.step?, found)));
        let mut there: Vec<_> =
            there.filter(|(step, _)| from.is_none_or(|from| *step <= from)).collect();
        let has_it = there.iter().any(|(step, _)| from.is_none_or(|from| *step == from));
        let mut all = match self.committed(from) {
            Err(Error::NoCheckpoint { .. }) if has_it => Vec::new(),
            here => here?,
        };
        all.append(&mut there);
        all.sort_by_key(|(step, found)| Reverse((*step, found.created_unix_ms)));
        Ok(all)
    }

    /// The steps that were committed, newest first, also damaged ones: from a step on, or all.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if the step is not there; [`Error::Io`] if the root cannot be listed, or the system refuses
    /// to read a directory that may be one of these steps.
    fn committed(&self, from: Option<u64>) -> Result<Vec<(u64, Found)>> {
        let all = match self.store.list(&self.root) {
            Err(error) if error.is_not_found() => Vec::new(), // nothing was saved yet
            all => all?,
        };
        let mut steps = Vec::new();
        for found in all.into_iter().rev().filter(Found::was_committed) {
            match found.step {
                Some(step) if from.is_none_or(|from| step <= from) => steps.push((step, found)),
                // Only its manifest says which step it is.
                None if found.status == Status::Unreadable => drop(self.store.open(&found.path)?),
                _ => {}
            }
        }
        match from {
            Some(from) if steps.first().is_none_or(|(step, _)| *step != from) => {
                let reason = "no step of this number was committed here; `ringstow ls` lists those that were".into();
                Err(Error::NoCheckpoint { path: self.root.join(format!("step-{from:08}")), reason })
            }
            _ => Ok(steps),
        }
    }
}

impl Drop for CheckpointManager {
    /// Waits for the save in progress and the copies of its step. A copy that failed is tried a last time.
    fn drop(&mut self) {
        drop(self.saving.take());
        if let Some(copies) = &self.shared.copies {
            copies.close();
            self.shared.evict_alone();
        }
    }
}

/// The rules for places, which also keep there what these keep here for good.
fn besides(there: Retention, own: Option<&Retention>) -> Retention {
    let Some(own) = own else { return there };
    let keep_every = there.keep_every.or(own.keep_every);
    let keep_best = there.keep_best.clone().or_else(|| own.keep_best.clone());
    Retention { keep_every, keep_best, ..there }
}

/// Checks that places keep what is to be kept for good: it leaves the root.
///
/// # Errors
/// [`Error::Invalid`].
fn check_keeps(there: &Retention, own: &Retention) -> Result<()> {
    let has_every = own.keep_every.is_none_or(|own| {
        there.keep_every.is_some_and(|there| there > 0 && own.is_multiple_of(there))
    });
    let has_best = own.keep_best.as_ref().is_none_or(|own| {
        let is_same =
            |there: &&Best| (&there.metric, there.direction) == (&own.metric, own.direction);
        there.keep_best.as_ref().filter(is_same).is_some_and(|there| there.count >= own.count)
    });
    if has_every && has_best {
        return Ok(());
    }
    Err(Error::invalid(
        "with keep_here, steps that `every` and `best` of the manager's rules keep are in the further places alone, and          `every` or `best` of Tiers.keep would remove some of them: leave these out there, which means the same ones",
    ))
}

/// Whether a step's bytes are not what was written. Files that are missing may be on a disk that is not mounted.
fn is_damage(error: &Error) -> bool {
    error.is_of_checkpoint() && !matches!(error, Error::MissingFiles { .. })
}

#[cfg(test)]
mod tests;
