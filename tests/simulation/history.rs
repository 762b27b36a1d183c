//! What the programs did and when, and the promises that must hold whatever the order of their calls.
//!
//! A program may be refused, or killed, at any moment. So for each path the history knows what is *surely* there at a
//! time, and what is *possibly* there.

use crate::calls::Id;
use crate::program::{Job, Order};
use ringstow::Error;
use std::collections::BTreeSet;
use std::fmt;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};

/// A time after all others.
const NEVER: u64 = u64::MAX;

/// How an order ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    Done(Seen),
    Refused(Refusal),
    Killed,
}

/// What a program saw or did.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    /// The state that it loaded.
    pub loaded: Option<i64>,
    /// The newest checkpoint.
    pub newest: Option<PathBuf>,
    /// The checkpoints that it removed.
    pub removed: Vec<PathBuf>,
    /// Those at which it failed, and which it may have removed.
    pub failed: Vec<PathBuf>,
}

#[derive(Debug, Clone)]
pub struct Refusal {
    pub why: Why,
    pub text: String,
}

/// What an error says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    Busy,
    /// There is no checkpoint.
    Nothing,
    /// It is committed.
    NotDurable,
    /// The checkpoint is damaged or incomplete, or ringstow is wrong.
    Damage,
    Other,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let why = match &error {
            Error::Busy { .. } => Why::Busy,
            Error::NoCheckpoint { .. } | Error::NotCommitted { .. } => Why::Nothing,
            Error::NotDurable { .. } => Why::NotDurable,
            Error::Corrupt { .. } | Error::Format { .. } | Error::MissingFiles { .. } => {
                Why::Damage
            }
            error if error.io_error().is_some_and(|cause| cause.kind() == NotFound) => Why::Nothing,
            _ => Why::Other,
        };
        Self { why, text: error.to_string() }
    }
}

/// One order of one program.
#[derive(Debug)]
pub struct Event {
    program: Id,
    order: Order,
    began: u64,
    /// [`NEVER`] while it runs.
    ended: u64,
    /// `None` while it runs.
    outcome: Option<Outcome>,
    /// Whether one of the program's calls failed.
    has_failed: bool,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, order: Order { job, at }, began, .. } = self;
        write!(f, "{began}: program {program}: {job:?} at {}", at.display())?;
        match &self.outcome {
            Some(outcome) => write!(f, ", {}: {outcome:?}", self.ended),
            None => write!(f, ", runs"),
        }
    }
}

impl Event {
    fn why(&self) -> Option<Why> {
        match &self.outcome {
            Some(Outcome::Refused(refusal)) => Some(refusal.why),
            _ => None,
        }
    }

    /// A save that returned: what it saved is there.
    fn is_saved(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Done(_)))
    }

    /// An order that found nothing to do.
    fn has_not_begun(&self) -> bool {
        !self.has_failed && matches!(self.why(), Some(Why::Busy | Why::Nothing))
    }

    /// A save that was refused: nothing of it is ever there.
    fn is_refused(&self) -> bool {
        self.why().is_some_and(|why| why != Why::NotDurable)
    }
}

#[derive(Debug, Default)]
pub struct History(Vec<Event>);

impl History {
    /// Notes that a program begins an order; returns the event's number.
    pub fn begin(&mut self, program: Id, order: &Order, began: u64) -> usize {
        let (order, ended, outcome, has_failed) = (order.clone(), NEVER, None, false);
        self.0.push(Event { program, order, began, ended, outcome, has_failed });
        self.0.len() - 1
    }

    pub fn end(&mut self, event: usize, ended: u64, outcome: Outcome, has_failed: bool) {
        let event = &mut self.0[event];
        (event.ended, event.outcome, event.has_failed) = (ended, Some(outcome), has_failed);
    }

    pub fn events(&self) -> &[Event] {
        &self.0
    }

    /// How many saves returned, and how many did not.
    pub fn counts(&self) -> [usize; 2] {
        let saves = self.0.iter().filter(|event| event.order.job.saves().is_some());
        let (saved, not): (Vec<_>, Vec<_>) = saves.partition(|event| event.is_saved());
        [saved.len(), not.len()]
    }

    /// All paths that were saved to.
    pub fn paths(&self) -> BTreeSet<PathBuf> {
        let saves = self.0.iter().filter(|event| event.order.job.saves().is_some());
        saves.map(|event| event.order.at.clone()).collect()
    }

    fn saves(&self, path: &Path) -> impl Iterator<Item = &Event> {
        let is_here =
            move |event: &&Event| event.order.at == path && event.order.job.saves().is_some();
        self.0.iter().filter(is_here)
    }

    /// Whether this event removed what was there; `Some(false)`: perhaps.
    fn removes(&self, event: &Event, path: &Path) -> Option<bool> {
        let above = |event: &Event| path.starts_with(&event.order.at) && path != event.order.at;
        match (&event.order.job, &event.outcome) {
            (Job::Remove | Job::Retain(_), Some(Outcome::Done(seen))) => {
                let is_in = |list: &[PathBuf]| list.iter().any(|other| other == path);
                match is_in(&seen.removed) {
                    true => Some(true),
                    false => is_in(&seen.failed).then_some(false),
                }
            }
            (Job::Remove | Job::Retain(_), _) if event.has_not_begun() => None,
            (Job::Remove, _) => (event.order.at == path).then_some(false),
            (Job::Retain(keep), _) if above(event) => {
                (self.newer(path, event.began, event.ended) >= *keep).then_some(false)
            }
            _ => None,
        }
    }

    /// How many steps newer than this one are possibly there at some time of an interval.
    fn newer(&self, path: &Path, from: u64, to: u64) -> usize {
        let paths = self.paths();
        let newer = paths.iter().filter(|other| step(other) > step(path));
        newer.filter(|other| self.saves(other).any(|save| self.is_possible(save, from, to))).count()
    }

    /// Whether a save's checkpoint is possibly there at some time of an interval.
    fn is_possible(&self, save: &Event, from: u64, to: u64) -> bool {
        let path = &save.order.at;
        let was_removed = || {
            self.0.iter().any(|event| {
                event.began > save.ended
                    && event.ended < from
                    && self.removes(event, path) == Some(true)
            })
        };
        let was_replaced = || {
            self.saves(path)
                .any(|later| later.is_saved() && later.began > save.ended && later.ended < from)
        };
        save.began < to && !save.is_refused() && !was_replaced() && !was_removed()
    }

    /// Whether a checkpoint is surely there during all of an interval, whatever the event `but` did.
    fn is_sure(&self, path: &Path, from: u64, to: u64, but: Option<&Event>) -> bool {
        self.saves(path).any(|save| {
            let may_be_gone = || {
                self.0.iter().any(|event| {
                    event.ended > save.began
                        && event.began < to
                        && !but.is_some_and(|but| std::ptr::eq(but, event))
                        && self.removes(event, path).is_some()
                })
            };
            save.is_saved() && save.ended < from && !may_be_gone()
        })
    }

    /// Checks what was found at a path at some time of an interval: the number of a state, or nothing.
    fn check_found(
        &self,
        path: &Path,
        found: Option<i64>,
        from: u64,
        to: u64,
    ) -> Result<(), String> {
        let Some(number) = found else {
            return match self.is_sure(path, from, to, None) {
                true => Err(format!("LOST: nothing is at {}", path.display())),
                false => Ok(()),
            };
        };
        let save = self.saves(path).find(|save| save.order.job.saves() == Some(number));
        match save {
            None => Err(format!("MIXED: nobody saved state {number} to {}", path.display())),
            Some(save) if !self.is_possible(save, from, to) => {
                Err(format!("BACK: state {number} is at {} ({save})", path.display()))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks which step was found to be the newest at some time of an interval.
    fn check_newest(
        &self,
        dir: &Path,
        found: Option<&Path>,
        from: u64,
        to: u64,
    ) -> Result<(), String> {
        let is_there = |path: &Path| self.saves(path).any(|save| self.is_possible(save, from, to));
        if let Some(path) = found.filter(|path| !is_there(path)) {
            return Err(format!("BACK: {} is the newest", path.display()));
        }
        let paths = self.paths();
        let mut newer = paths.iter().filter(|path| path.starts_with(dir) && *path != dir);
        let missed = newer.find(|path| {
            found.is_none_or(|found| step(path) > step(found)) && self.is_sure(path, from, to, None)
        });
        match missed {
            Some(path) => Err(format!("BACK: the newest is {found:?}, not {}", path.display())),
            None => Ok(()),
        }
    }

    /// Checks what the observer found at a path at this time.
    pub fn check_at(&self, path: &Path, found: Option<i64>, now: u64) -> Result<(), String> {
        self.check_found(path, found, now, now)
    }

    /// Checks all that ended since this time.
    pub fn check_since(&self, time: u64) -> Result<(), String> {
        let mut ended =
            self.0.iter().filter(|event| event.outcome.is_some() && event.ended >= time);
        ended.try_for_each(|event| self.check(event).map_err(|why| format!("{why}, in {event}")))
    }

    fn check(&self, event: &Event) -> Result<(), String> {
        let (at, began, ended) = (&event.order.at, event.began, event.ended);
        match (&event.order.job, event.outcome.as_ref()) {
            (_, None | Some(Outcome::Killed)) => Ok(()),
            (job, Some(Outcome::Refused(refusal))) => self.check_refused(event, job, refusal),
            (Job::Load, Some(Outcome::Done(seen))) => {
                self.check_found(at, seen.loaded, began, ended)
            }
            (Job::Latest, Some(Outcome::Done(seen))) => {
                self.check_newest(at, seen.newest.as_deref(), began, ended)
            }
            (Job::Retain(keep), Some(Outcome::Done(seen))) => {
                let stays = |path: &&PathBuf| {
                    self.newer(path, began, ended) < *keep
                        && self.is_sure(path, began, ended, Some(event))
                };
                match seen.removed.iter().find(stays) {
                    Some(path) => Err(format!("REMOVED: {} is among the newest", path.display())),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn check_refused(&self, event: &Event, job: &Job, refusal: &Refusal) -> Result<(), String> {
        let (at, began, ended) = (&event.order.at, event.began, event.ended);
        let is_expected = match (job, refusal.why) {
            (_, Why::Damage) => return Err("DAMAGE: none was made".into()),
            (Job::Load | Job::Prune, Why::Nothing) => {
                return self.check_found(at, None, began, ended);
            }
            (Job::Remove, Why::Busy) => true,
            (job, Why::Busy) if job.saves().is_some() => true,
            (Job::Remove, Why::Nothing) => return self.check_found(at, None, began, ended),
            (Job::Rank(..), _) => true,
            // The ranks' failures are not its own.
            (Job::SaveByRanks(..), _) => true,
            _ => event.has_failed,
        };
        match is_expected && refusal.text.len() > 20 {
            true => Ok(()),
            false => Err("UNEXPECTED".into()),
        }
    }
}

/// The number of a step; 0 for what is none.
pub fn step(path: &Path) -> u64 {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix("step-").and_then(|number| number.parse().ok()).unwrap_or(0)
}
