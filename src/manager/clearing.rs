//! What goes from a run's directory after a save: steps that no rule keeps, parts of older ones, and steps that all further
//! places have. Rust's manager and Python's both work on this. It never fails a save: what fails is logged and tried again
//! after the next one.

use super::rules::Retention;
use super::slim::Slim;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::{
    Disposal, Evicted, Found, Look, RetainOptions, Retained, Slimmed, evict, is_everywhere,
    older_steps, retain_seen, slim,
};
use crate::sys::dir;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a manager removes, and what it notes about that.
#[derive(Debug)]
pub struct Clearing {
    root: PathBuf,
    config: Config,
    retention: Option<RetainOptions>,
    slim: Option<Slim>,
    eviction: Option<Eviction>,
    known: Mutex<Known>,
}

/// Which steps leave the directory once all places have them.
#[derive(Debug, Clone)]
pub struct Eviction {
    /// The further places.
    pub places: Vec<PathBuf>,
    /// How many of the newest steps, and of the last saves, stay in any case.
    pub keep: usize,
}

/// None of this decides on a removal: [`evict`] checks each place right before.
#[derive(Debug, Default)]
struct Known {
    /// Saves that need no more slimming, by path and time: done, or their parts are not droppable. A later save to the
    /// path may change that.
    settled: HashSet<(PathBuf, Option<u64>)>,
    /// Steps that cannot be copied, since they are damaged: another try would read their bytes again.
    damaged: HashSet<PathBuf>,
    /// Bytes of the newest step; `None` before the first look.
    newest_bytes: Option<u64>,
}

/// What was done after a save.
#[derive(Debug, Default)]
pub struct Cleared {
    /// What was removed by the rules, or why nothing could be; `None` without rules.
    pub retained: Option<Result<Retained>>,
    /// The older steps that lost a part, or why they did not. The root's path stands for an error of the look.
    pub slimmed: Vec<(PathBuf, Result<Slimmed>)>,
    /// Older steps that a place lacks, which are to be copied.
    pub lacking: Vec<PathBuf>,
}

impl Clearing {
    /// What removes and slims the steps in `root`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rule that keeps nothing.
    pub fn new(root: PathBuf, keep: Retention, config: Config) -> Result<Self> {
        let slim = keep.slim.clone();
        let retention = keep.options(Disposal::of(&config));
        retention.as_ref().map_or(Ok(()), RetainOptions::check)?;
        slim.as_ref().map_or(Ok(()), Slim::check)?;
        Ok(Self { root, config, retention, slim, eviction: None, known: Mutex::default() })
    }

    /// Has steps leave once all places have them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a number that keeps nothing.
    pub fn set_eviction(&mut self, eviction: Eviction) -> Result<()> {
        if eviction.keep == 0 {
            return Err(Error::invalid("keep_here is 0, and the newest step stays: 1 or more"));
        }
        self.eviction = Some(eviction);
        Ok(())
    }

    /// The rules by which steps are removed; `None` if nothing is.
    pub fn retention(&self) -> Option<&RetainOptions> {
        self.retention.as_ref()
    }

    /// Whether steps leave the directory once all places have them.
    pub fn evicts(&self) -> bool {
        self.eviction.is_some()
    }

    /// Removes and slims steps on one look at the run. Steps that are `waiting` are to be copied yet: they stay, and whole.
    pub fn after_save(&self, waiting: &[PathBuf]) -> Cleared {
        let mut cleared = Cleared::default();
        if self.retention.is_none() && self.slim.is_none() && self.eviction.is_none() {
            return cleared;
        }
        let mut look = match Look::of_run(&self.root, &self.config) {
            Ok(look) => look,
            Err(error) => {
                self.tell_failure(&error);
                match self.retention {
                    Some(_) => cleared.retained = Some(Err(error)),
                    None => cleared.slimmed.push((self.root.clone(), Err(error))),
                }
                return cleared;
            }
        };
        self.known().newest_bytes = look.newest_bytes();
        cleared.retained = self.retention.as_ref().map(|rules| self.retain(&mut look, rules));
        if let Some(slim) = &self.slim {
            cleared.slimmed = self.slim_older(&look, slim, waiting);
        }
        cleared.lacking = self.evict_seen(&look, waiting);
        cleared
    }

    fn retain(&self, look: &mut Look, rules: &RetainOptions) -> Result<Retained> {
        let done = retain_seen(look, rules, &self.config);
        match &done {
            Ok(done) => {
                for left in done.left.iter().filter(|left| left.failed) {
                    let path = left.path.display();
                    tracing::warn!(
                        "{path} was not removed: {}. The next save tries again",
                        left.reason
                    );
                }
            }
            Err(error) => self.tell_failure(error),
        }
        done
    }

    fn tell_failure(&self, error: &Error) {
        let root = self.root.display();
        tracing::error!(
            "the step is saved, but the old steps in {root} were not all removed: {error}. The next save tries again; \
             `ringstow retain {root}` does it now"
        );
    }

    /// Slims the older steps. A step that was saved without droppable parts stays as it is, with one warning.
    fn slim_older(
        &self,
        look: &Look,
        Slim { after, drop: parts }: &Slim,
        waiting: &[PathBuf],
    ) -> Vec<(PathBuf, Result<Slimmed>)> {
        let steps = match older_steps(look, *after, &self.config) {
            Ok(steps) => steps,
            Err(error) => {
                let root = self.root.display();
                tracing::error!("old steps in {root} were not slimmed: {error}");
                return vec![(self.root.clone(), Err(error))];
            }
        };
        let mut outcomes = Vec::new();
        for step in steps {
            let save = (step.path.clone(), step.created_unix_ms);
            if self.known().settled.contains(&save) || self.is_to_stay_whole(step, waiting) {
                continue;
            }
            let outcome = slim(&step.path, parts, &self.config);
            if is_settled(&step.path, &outcome) {
                self.known().settled.insert(save);
            }
            outcomes.push((step.path.clone(), outcome));
        }
        outcomes
    }

    /// Whether a place is to get a copy of a step yet.
    fn is_to_stay_whole(&self, step: &Found, waiting: &[PathBuf]) -> bool {
        let lacks = |eviction: &Eviction| !is_everywhere(&step.path, &eviction.places);
        waiting.contains(&step.path) || self.eviction.as_ref().is_some_and(lacks)
    }

    /// Removes the steps that all places have, but for the newest. Returns those that a place lacks.
    pub fn evict(&self, waiting: &[PathBuf]) -> Vec<PathBuf> {
        if self.eviction.is_none() {
            return Vec::new();
        }
        match Look::of_run(&self.root, &self.config) {
            Ok(look) => self.evict_seen(&look, waiting),
            Err(error) => self.tell_stay(&error),
        }
    }

    fn evict_seen(&self, look: &Look, waiting: &[PathBuf]) -> Vec<PathBuf> {
        let Some(Eviction { places, keep }) = &self.eviction else { return Vec::new() };
        self.known().damaged.retain(|step| !dir::is_gone(step));
        match evict(look, places, *keep, waiting, &self.config) {
            Ok(done) => self.tell_evicted(done),
            Err(error) => self.tell_stay(&error),
        }
    }

    fn tell_stay(&self, error: &Error) -> Vec<PathBuf> {
        let root = self.root.display();
        tracing::error!("steps stay in {root}, though all tiers may have them: {error}");
        Vec::new()
    }

    fn tell_evicted(&self, done: Evicted) -> Vec<PathBuf> {
        for left in &done.left {
            tracing::warn!("{} was not removed: {}", left.path.display(), left.reason);
        }
        let mut told = HashSet::new();
        let stay = done.stay.into_iter().filter(|step| !self.is_damaged(&step.path));
        let told = stay.inspect(|step| {
            if told.insert(step.reason.clone()) {
                let next = if step.is_lacking { ". It leaves once it is copied there" } else { "" };
                tracing::warn!("{} stays: {}{next}", step.path.display(), step.reason);
            }
        });
        told.filter(|step| step.is_lacking).map(|step| step.path).collect()
    }

    /// The steps that can be copied, oldest first.
    ///
    /// # Errors
    /// As for [`steps`](crate::steps).
    pub fn copyable(&self) -> Result<Vec<PathBuf>> {
        let look = Look::of_run(&self.root, &self.config)?;
        let whole = look.committed(&self.config)?.into_iter().map(|step| step.path.clone());
        Ok(whole.filter(|path| !self.is_damaged(path)).collect())
    }

    /// Whether so many free bytes are enough for the next save, which is expected to need those of the newest step. An
    /// error of the look does not hold the save up: it will meet it itself.
    pub fn has_room(&self, free_bytes: u64) -> bool {
        let known = self.known().newest_bytes;
        let look = || Look::of_run(&self.root, &self.config).ok()?.newest_bytes();
        let needed = known.or_else(look);
        self.known().newest_bytes = needed;
        needed.is_none_or(|needed| free_bytes >= needed)
    }

    /// Notes that a step cannot be copied.
    pub fn note_damage(&self, path: &Path) {
        self.known().damaged.insert(path.into());
    }

    /// Whether a step cannot be copied.
    pub fn is_damaged(&self, path: &Path) -> bool {
        self.known().damaged.contains(path)
    }

    #[cfg(test)]
    pub(super) fn expect(&self, bytes: u64) {
        self.known().newest_bytes = Some(bytes);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs what came of slimming a step; tells whether nothing is left to do.
fn is_settled(path: &Path, outcome: &Result<Slimmed>) -> bool {
    let path = path.display();
    match outcome {
        Ok(slimmed) => {
            for left in &slimmed.left {
                let path = left.path.display();
                tracing::warn!(
                    "{path} was not removed: {}. The next save tries again",
                    left.reason
                );
            }
            slimmed.left.is_empty()
        }
        Err(error @ Error::Invalid { .. }) => {
            tracing::warn!("{path} was not slimmed, and stays as it is: {error}");
            true
        }
        Err(error) => {
            tracing::warn!("{path} was not slimmed: {error}. The next save tries again");
            false
        }
    }
}
