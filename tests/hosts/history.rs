//! What programs on both hosts did, and what must be there afterwards.

use crate::job::{Job, Outcome};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// One program. Those of one round ran at the same time; rounds follow each other.
#[derive(Debug)]
pub struct Event {
    pub round: usize,
    pub host: usize,
    pub job: Job,
    pub at: PathBuf,
    pub outcome: Outcome,
}

impl Event {
    /// Whether what it saved may be there.
    fn may_be_there(&self) -> bool {
        !matches!(&self.outcome, Outcome::Refused(kind, _) if kind != "NotDurable")
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { round, host, job, at, outcome } = self;
        write!(f, "round {round}, host {host}: {job:?} at {}: {outcome:?}", at.display())
    }
}

#[derive(Debug, Default)]
pub struct History(pub Vec<Event>);

impl History {
    /// All paths that were saved to.
    pub fn paths(&self) -> BTreeSet<&Path> {
        let saves = self.0.iter().filter(|event| event.job.saves().is_some());
        saves.map(|event| event.at.as_path()).collect()
    }

    fn saves(&self, path: &Path) -> impl Iterator<Item = (&Event, i64)> {
        let here = self.0.iter().filter(move |event| event.at == path);
        here.filter_map(|event| Some((event, event.job.saves()?)))
    }

    /// The rounds whose removals took this checkpoint, or may have taken it.
    fn removals(&self, path: &Path, certain: bool) -> impl Iterator<Item = usize> {
        let took = move |event: &&Event| match (&event.job, &event.outcome) {
            (Job::Remove | Job::Retain(_), Outcome::Done(seen)) => {
                seen.removed.iter().any(|removed| removed == path)
            }
            (Job::Remove, _) => !certain && event.at == path,
            (Job::Retain(_), _) => !certain && path.starts_with(&event.at),
            _ => false,
        };
        self.0.iter().filter(took).map(|event| event.round)
    }

    /// Checks what a host found at a path after the end: the state that it loaded, or `None` if no checkpoint is there.
    pub fn check(&self, path: &Path, found: Option<i64>) {
        let is_done = |event: &Event| matches!(event.outcome, Outcome::Done(_));
        let last_done = self
            .saves(path)
            .filter(|(event, _)| is_done(event))
            .map(|(event, _)| event.round)
            .max();
        let Some(id) = found else {
            if let Some(saved) = last_done {
                let removed = self.removals(path, false).any(|round| round >= saved);
                assert!(removed, "LOST: {} of round {saved} is gone", path.display());
            }
            return;
        };
        let (event, _) = self
            .saves(path)
            .find(|(_, saved)| *saved == id)
            .expect("MIXED: nobody saved this here");
        assert!(!matches!(event.outcome, Outcome::Refused(..)), "REFUSED, and there: {event}");
        assert!(
            last_done.is_none_or(|last| last <= event.round),
            "LOST: {} has state {id} of round {}, and a later one was saved",
            path.display(),
            event.round
        );
        let removed = self.removals(path, true).max();
        assert!(
            removed.is_none_or(|removed| removed <= event.round),
            "BACK: state {id} of {} was removed in round {removed:?}",
            path.display()
        );
    }

    /// All paths that a model was exported to.
    pub fn models(&self) -> BTreeSet<&Path> {
        let exports = self.0.iter().filter(|event| event.job.exports().is_some());
        exports.map(|event| event.at.as_path()).collect()
    }

    /// Checks what a host found at a path after the end: the model that it read, or `None` if it was refused.
    /// Nobody removes a model, and no export replaces one.
    pub fn check_model(&self, path: &Path, found: Option<i64>) {
        let here = |event: &&Event| event.at == path && event.job.exports().is_some();
        for event in self.0.iter().filter(here) {
            let is_found = event.job.exports() == found;
            match &event.outcome {
                Outcome::Done(_) => assert!(is_found, "LOST: {found:?} instead of {event}"),
                Outcome::Refused(kind, _) => {
                    assert!(!is_found || kind == "NotDurable", "REFUSED, and there: {event}");
                }
                Outcome::Killed => {}
            }
        }
    }

    /// Checks what programs saw meanwhile. A host may see an earlier state late, and none that was refused.
    pub fn check_seen(&self) {
        for event in &self.0 {
            match &event.outcome {
                Outcome::Done(seen) => {
                    if let Some(id) = seen.loaded {
                        let wrote = |job: &Job| job.saves().or(job.exports()) == Some(id);
                        let here = |save: &&Event| save.at == event.at && wrote(&save.job);
                        let save = self.0.iter().find(here);
                        let save = save.expect("MIXED: nobody wrote this here");
                        assert!(save.round <= event.round);
                        assert!(
                            !matches!(save.outcome, Outcome::Refused(..)),
                            "REFUSED, and loaded: {event}"
                        );
                    }
                    if let Some(newest) = &seen.newest {
                        let began =
                            self.saves(newest).filter(|(save, _)| save.round <= event.round);
                        let mut there = began.filter(|(save, _)| save.may_be_there());
                        assert!(there.next().is_some(), "REFUSED, and the newest: {event}");
                    }
                }
                Outcome::Refused(kind, text) => {
                    assert!(
                        !["Corrupt", "Format", "Panicked"].contains(&&**kind),
                        "UNCLEAR: {event}"
                    );
                    assert!(text.len() > 20, "UNCLEAR: {event}");
                }
                Outcome::Killed => {}
            }
        }
    }
}
