//! Copies of a manager's steps in further places, made by a thread.

use super::Shared;
use super::eviction::Eviction;
use super::queue::{Added, Queue};
use crate::error::{Error, Result};
use crate::handle::panicked;
use crate::store::{
    Found, Promotion, Retention, Status, check_apart, claim_for, join, pinned, was_removed,
};
use crate::sys::dir;
use crate::sys::path::absolute_or_object;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Further places for the steps of a [`CheckpointManager`](crate::CheckpointManager).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tiers {
    /// Directories on other disks and, with the cargo feature `object-store`, URLs, the nearest first.
    pub places: Vec<PathBuf>,
    /// What stays in each of them, besides the steps that [`Keep::every`](crate::Keep::every) and
    /// [`Keep::best`](crate::Keep::best) of the manager keep; without a rule, all. [`Keep::slim`](crate::Keep::slim) has no
    /// effect there.
    pub keep: super::Keep,
    /// Bytes a second of a copy at most; 0 for no limit.
    pub rate: u64,
    /// How many of the newest steps, and of the last saves, stay in the manager's root once all places have them: after each
    /// save, older ones that every place has whole are removed there, also those that [`Keep::every`](crate::Keep::every) and
    /// [`Keep::best`](crate::Keep::best) keep. What a link in the root leads to stays. `None` leaves them to the rules.
    pub keep_here: Option<usize>,
}

/// The copies of a manager.
#[derive(Debug)]
pub(super) struct Copies {
    places: Vec<PathBuf>,
    retention: Option<Retention>,
    rate: u64,
    /// What removes steps from the root that all places have.
    pub(super) eviction: Option<Eviction>,
    /// What stays in the root by its rules.
    stays: Stays,
    queue: Mutex<Queue>,
    /// A step was added, or the manager is closing, or the thread has ended or rests.
    changed: Condvar,
}

/// Which steps are not passed over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stays {
    /// Whether there is a rule that removes steps.
    pub has_rule: bool,
    /// Steps that this number divides stay for good.
    pub every: Option<u64>,
}

/// The pause before a copy that failed is tried again, and the longest one.
const PAUSES: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(900));

impl Copies {
    /// # Errors
    /// [`Error::Invalid`] for a place that is in the root or has it in itself, for rules that keep nothing, and for
    /// [`Tiers::keep_here`] without a place.
    pub fn new(
        root: &Path,
        tiers: Tiers,
        (retention, stays): (Option<Retention>, Stays),
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
        retention.as_ref().map_or(Ok(()), Retention::check)?;
        if tiers.keep_here.is_some() && places.is_empty() {
            return Err(Error::invalid(
                "keep_here is for steps that further places have: name places",
            ));
        }
        let eviction = tiers.keep_here.map(Eviction::new).transpose()?;
        let (queue, changed) = Default::default();
        Ok(Self { places, retention, rate: tiers.rate, eviction, stays, queue, changed })
    }

    /// Copies a step that was saved as soon as the copy in progress has ended. A step that waits for that is passed over,
    /// unless it must get to the places.
    pub fn add(shared: &Arc<Shared>, path: &Path) {
        let Some(copies) = &shared.copies else { return };
        let mut queue = copies.queue();
        if let Some(overtaken) = queue.add(path, |waiting| copies.stays(waiting)) {
            pass_over(&overtaken);
        }
        copies.run(shared, queue);
    }

    /// Copies a step that was found, after those that were saved.
    pub fn add_found(shared: &Arc<Shared>, path: &Path) {
        let Some(copies) = &shared.copies else { return };
        let mut queue = copies.queue();
        if queue.add_found(path) {
            copies.run(shared, queue);
        }
    }

    /// Has the thread take up what was queued.
    fn run(&self, shared: &Arc<Shared>, mut queue: MutexGuard<'_, Queue>) {
        if queue.is_running {
            return self.changed.notify_all();
        }
        let worker = shared.clone();
        let work = move || {
            if let Some(copies) = &worker.copies
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| copies.work(&worker)))
            {
                copies.give_up(panicked("copy", panic));
            }
        };
        match std::thread::Builder::new().name("ringstow-copies".into()).spawn(work) {
            Ok(_) => queue.is_running = true,
            Err(error) => {
                queue.clear();
                queue.failure = Some(Error::io("starting a thread to copy", &shared.root, error));
            }
        }
    }

    /// Waits until nothing is left to copy, but for no further try of a copy that failed.
    ///
    /// # Errors
    /// Why the last step was not copied.
    pub fn wait(&self) -> Result<()> {
        self.wait_idle().failure.take().map_or(Ok(()), Err)
    }

    /// Waits until nothing is left to copy, and leaves a failure to [`Copies::wait`].
    pub fn wait_idle(&self) -> MutexGuard<'_, Queue> {
        let ended = self.changed.wait_while(self.queue(), |queue| !queue.is_idle());
        ended.unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_idle(&self) -> bool {
        self.queue().is_idle()
    }

    /// Waits until nothing is left to copy, and tries a copy that failed a last time.
    pub fn close(&self) {
        let mut queue = self.queue();
        queue.is_closing = true;
        self.changed.notify_all();
        drop(self.changed.wait_while(queue, |queue| queue.is_running));
    }

    /// The committed steps of all places.
    ///
    /// # Errors
    /// A place that cannot be listed: it may have the newest step. [`Error::Invalid`] for steps of another run.
    pub fn committed(&self, shared: &Shared) -> Result<Vec<Found>> {
        join(&shared.root, &self.places, shared.store.config())?;
        let mut all = Vec::new();
        for place in &self.places {
            let steps = shared.store.steps(place, None)?.into_iter();
            all.extend(steps.filter(|found| found.step.is_some() && found.was_committed()));
        }
        Ok(all)
    }

    /// Whether each place has one of these copies of a step, whole.
    pub fn have_all<'a>(&self, copies: impl Iterator<Item = &'a Found>) -> bool {
        let whole = copies.filter(|copy| copy.status == Status::Committed);
        let in_place: Vec<Option<&Path>> = whole.map(|copy| copy.path.parent()).collect();
        self.places.iter().all(|place| in_place.contains(&Some(place.as_path())))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, shared: &Shared) {
        let mut pause = PAUSES.0;
        loop {
            let mut queue = self.queue();
            let Some(step) = queue.take() else {
                if queue.is_closing || !queue.has_failed_ones() {
                    queue.clear();
                    queue.is_running = false;
                    return self.changed.notify_all();
                }
                (queue, pause) = self.rest(queue, pause);
                queue.retry();
                continue;
            };
            drop(queue);
            let is_worth_another = self.copy_to_all(shared, &step, pause);
            self.queue().ended(is_worth_another);
        }
    }

    /// Ends the thread after a panic, so that nobody waits for it.
    fn give_up(&self, error: Error) {
        tracing::error!(%error, "steps are saved, but no longer copied until the next save");
        let mut queue = self.queue();
        queue.clear();
        (queue.is_running, queue.is_resting, queue.failure) = (false, false, Some(error));
        self.changed.notify_all();
    }

    /// Waits until another step is there, the manager closes, or the pause is over. Returns the pause before the next try.
    fn rest<'a>(
        &self,
        mut queue: MutexGuard<'a, Queue>,
        pause: Duration,
    ) -> (MutexGuard<'a, Queue>, Duration) {
        queue.is_resting = true;
        self.changed.notify_all();
        let rests = |queue: &mut Queue| !queue.is_due() && !queue.is_closing;
        let rested = self.changed.wait_timeout_while(queue, pause, rests);
        let mut queue = rested.unwrap_or_else(PoisonError::into_inner).0;
        queue.is_resting = false;
        let next = if queue.is_due() { PAUSES.0 } else { (pause * 2).min(PAUSES.1) };
        (queue, next)
    }

    /// Copies a step to all places; tells whether that is to be tried again, after this pause.
    fn copy_to_all(&self, shared: &Shared, step: &Added, pause: Duration) -> bool {
        let mut is_worth_another = false;
        for place in &self.places {
            if let Err(error) = self.copy(shared, step, place) {
                if was_removed(&step.path, shared.store.config()) {
                    pass_over(&step.path);
                    return false;
                }
                let passes = matches!(error, Error::Io { .. } | Error::Busy { .. });
                is_worth_another |= passes;
                self.failed(step, place, error, Some(pause).filter(|_| passes));
            }
        }
        is_worth_another && dir::has(&step.path)
    }

    /// Copies a step to a place, as far as its files are here.
    fn copy(&self, shared: &Shared, step: &Added, place: &Path) -> Result<()> {
        claim_for(&shared.root, &self.places, place)?;
        let to = place.join(step.path.file_name().unwrap_or_default());
        // A run that went back saves a step again.
        let (rate, defaults) = (self.rate, Promotion::default());
        let how = Promotion { rate, replace_older: true, refuse_link: true, ..defaults };
        let report = match shared.store.promote(&step.path, &to, how) {
            // What the rules no longer keep there makes room.
            Err(error) if error.is_disk_full() && self.retention.is_some() => {
                self.clear(shared, place);
                shared.store.promote(&step.path, &to, how)?
            }
            promoted => promoted?,
        };
        tracing::debug!(?report, "a step is copied");
        if report.missing > 0 {
            let to = to.display();
            tracing::warn!(
                "{to} is not committed: other nodes have still to send {} files",
                report.missing
            );
            return Ok(());
        }
        // After a step that was found, another one may be there because the newest is damaged.
        if step.is_new {
            self.clear(shared, place);
        }
        Ok(())
    }

    /// Removes what the rules no longer keep in a place.
    fn clear(&self, shared: &Shared, place: &Path) {
        let Some(retention) = &self.retention else { return };
        let retention = Retention { pinned: pinned(&shared.root), ..retention.clone() };
        if let Err(error) = shared.store.retain(place, &retention) {
            tracing::warn!(place = %place.display(), %error, "old steps could not be removed there");
        }
    }

    fn failed(&self, step: &Added, place: &Path, error: Error, pause: Option<Duration>) {
        let mut queue = self.queue();
        let (path, to) = (step.path.display(), place.display());
        match pause.filter(|_| !queue.is_closing) {
            Some(pause) => tracing::error!(
                %error,
                "{path} is saved, but not copied to {to}. It is tried again in {} s, or the next step once that is saved",
                pause.as_secs()
            ),
            None => tracing::error!(%error, "{path} is saved, but not copied to {to}"),
        }
        if let Some(eviction) = self.eviction.as_ref().filter(|_| error.is_damage_in(&step.path)) {
            eviction.note_damage(&step.path);
        }
        queue.failure = Some(error);
    }

    /// Whether a step is to get to the places, however many newer ones wait: it stays for good by its number, which its name
    /// ends in, or here until it is copied.
    fn stays(&self, path: &Path) -> bool {
        let divides = |every| number_of(path).is_some_and(|number| number.is_multiple_of(every));
        // Without a rule, nothing else removes it here.
        self.stays.every.is_some_and(divides) || self.eviction.is_some() && !self.stays.has_rule
    }

    /// Whether a step has yet to be copied.
    pub fn awaits(&self, path: &Path) -> bool {
        self.queue().has(path)
    }

    /// The steps that have yet to be copied.
    pub fn awaited(&self) -> Vec<PathBuf> {
        self.queue().all().map(Path::to_owned).collect()
    }

    /// The places, the nearest first.
    pub fn places(&self) -> &[PathBuf] {
        &self.places
    }
}

fn pass_over(path: &Path) {
    let path = path.display();
    tracing::warn!(
        "{path} is not copied on: another step is newer, and the copies are slower than the saves"
    );
}

/// The number that a step's name ends in.
fn number_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_string_lossy();
    name.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
