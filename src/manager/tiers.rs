//! Copies of a manager's steps in further places, made by a thread.

use super::Shared;
use super::copying::Copying;
use super::line::{Around, Line};
use super::queue::{Added, Pauses, Stays};
use crate::error::{Error, Result};
use crate::handle::panicked;
use crate::store::{RetainOptions, check_apart};
use crate::sys::dir;
use crate::sys::path::absolute_or_object;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Further places for the steps of a [`CheckpointManager`](crate::CheckpointManager).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tiers {
    /// Directories on other disks and, with the cargo feature `object-store`, URLs, the nearest first.
    pub places: Vec<PathBuf>,
    /// What stays in each of them, besides the steps that the manager's [`Retention`](crate::Retention) keeps by another rule than
    /// `last`; without a rule, all. [`Retention::slim`](crate::Retention::slim) has no effect there.
    pub keep: super::Retention,
    /// Bytes a second of a copy at most; 0 for no limit.
    pub rate: u64,
    /// How many of the newest steps, and of the last saves, stay in the manager's root once all places have them: after each
    /// save, older ones that every place has whole are removed there, also those that the manager's
    /// [`Retention`](crate::Retention) keeps. What a link in the root leads to stays. `None` leaves them to the rules.
    pub keep_here: Option<usize>,
}

/// The copies of a manager.
#[derive(Debug)]
pub(super) struct Copies {
    copying: Copying,
    line: Line,
    /// Why a step was not copied, of those that were tried since the last one was saved.
    failure: Mutex<Option<Error>>,
}

/// The pause before a copy that failed is tried again, and the longest one.
pub const PAUSES: Pauses = (Duration::from_secs(30), Duration::from_secs(900));

/// The one process of a manager.
pub(super) struct Alone;

impl Around for Alone {
    type Error = Infallible;

    fn agree(
        &mut self,
        added: usize,
        is_closing: bool,
    ) -> std::result::Result<(usize, bool), Infallible> {
        Ok((added, is_closing))
    }

    fn is_exiting(&mut self) -> bool {
        false
    }
}

impl Copies {
    /// # Errors
    /// [`Error::Invalid`] for a place that is in the root or has it in itself, for rules that keep nothing, and for
    /// [`Tiers::keep_here`] without a place.
    pub fn new(
        root: &Path,
        tiers: Tiers,
        (rule, stays): (Option<RetainOptions>, Stays),
        stripe: &[PathBuf],
    ) -> Result<Self> {
        let mut places: Vec<PathBuf> = Vec::new();
        for place in &tiers.places {
            let place = absolute_or_object(place)?;
            let others =
                [root].into_iter().chain(stripe.iter().chain(&places).map(PathBuf::as_path));
            check_apart(&place, others)?;
            places.push(place);
        }
        rule.as_ref().map_or(Ok(()), RetainOptions::check)?;
        if tiers.keep_here.is_some() && places.is_empty() {
            return Err(Error::invalid(
                "keep_here is for steps that further places have: name places",
            ));
        }
        let copying = Copying { root: root.into(), places, rate: tiers.rate, rule };
        Ok(Self { copying, line: Line::new(stays, false), failure: Mutex::default() })
    }

    /// Copies a step that was saved as soon as the copy in progress has ended. A step that waits for that is passed over,
    /// unless it must get to the places.
    pub fn add(shared: &Arc<Shared>, path: &Path) {
        Self::add_to_line(shared, path, true);
    }

    /// Copies a step that was found, after those that were saved.
    pub fn add_found(shared: &Arc<Shared>, path: &Path) {
        Self::add_to_line(shared, path, false);
    }

    fn add_to_line(shared: &Arc<Shared>, path: &Path, is_new: bool) {
        let Some(copies) = &shared.copies else { return };
        if !copies.line.add(path, is_new) {
            return;
        }
        let worker = shared.clone();
        let work = move || {
            if let Some(copies) = &worker.copies
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| copies.work(&worker)))
            {
                copies.give_up(panicked("copy", panic));
            }
        };
        let thread = std::thread::Builder::new().name("ringstow-copies".into());
        if let Err(error) = thread.spawn(work) {
            copies.give_up(Error::io("starting a thread to copy", &shared.root, error));
        }
    }

    /// Waits until nothing is left to copy, but for no further try of a copy that failed.
    ///
    /// # Errors
    /// Why the last step was not copied.
    pub fn wait(&self) -> Result<()> {
        self.wait_idle();
        self.failure().take().map_or(Ok(()), Err)
    }

    /// Waits until nothing is left to copy, and leaves a failure to [`Copies::wait`].
    pub fn wait_idle(&self) {
        self.line.wait_idle(None);
    }

    pub fn is_idle(&self) -> bool {
        self.line.wait_idle(Some(Duration::ZERO))
    }

    /// Waits until nothing is left to copy, and tries a copy that failed a last time.
    pub fn close(&self) {
        self.line.end_retries();
        self.line.wait_ended(None);
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, shared: &Shared) {
        loop {
            let Ok(turn) = self.line.next(PAUSES, &mut Alone);
            turn.overtaken.iter().for_each(|step| pass_over(step));
            if turn.is_fresh {
                *self.failure() = None;
            }
            let Some(step) = turn.step else { return };
            self.line.ended(self.copy_to_all(shared, &step));
        }
    }

    /// Ends the thread after a panic, so that nobody waits for it.
    fn give_up(&self, error: Error) {
        tracing::error!(%error, "steps are saved, but no longer copied until the next save");
        *self.failure() = Some(error);
        self.line.give_up();
    }

    /// Copies a step to all places; tells whether that is to be tried again.
    fn copy_to_all(&self, shared: &Shared, step: &Added) -> bool {
        let mut is_worth_another = false;
        for place in self.places() {
            let promote = |to: &Path, how| shared.store.promote(&step.path, to, how);
            match self.copying.send(step, place, shared.store.config(), promote) {
                Ok(Some(report)) => tracing::debug!(?report, "a step is copied"),
                Ok(None) => {
                    pass_over(&step.path);
                    return false;
                }
                Err(error) => {
                    let passes = matches!(error, Error::Io { .. } | Error::Busy { .. });
                    is_worth_another |= passes;
                    self.failed(shared, step, place, error, passes);
                }
            }
        }
        is_worth_another && dir::has(&step.path)
    }

    fn failed(&self, shared: &Shared, step: &Added, place: &Path, error: Error, passes: bool) {
        let (path, to) = (step.path.display(), place.display());
        match self.line.pause(PAUSES).filter(|_| passes) {
            Some(pause) => tracing::error!(
                %error,
                "{path} is saved, but not copied to {to}. It is tried again in {} s, or the next step once that is saved",
                pause.as_secs()
            ),
            None => tracing::error!(%error, "{path} is saved, but not copied to {to}"),
        }
        if error.is_damage_in(&step.path) {
            shared.clearing.note_damage(&step.path);
        }
        *self.failure() = Some(error);
    }

    /// The steps that have yet to be copied.
    pub fn awaited(&self) -> Vec<PathBuf> {
        self.line.waiting()
    }

    /// The places, the nearest first.
    pub fn places(&self) -> &[PathBuf] {
        &self.copying.places
    }
}

fn pass_over(path: &Path) {
    let path = path.display();
    tracing::warn!(
        "{path} is not copied on: a newer step was saved before its copy was complete, and comes first"
    );
}
