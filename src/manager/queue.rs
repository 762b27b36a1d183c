//! Which step is copied next. Does no I/O.

use crate::error::Error;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// A step to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Added {
    pub path: PathBuf,
    /// Whether it was just saved, and not found.
    pub is_new: bool,
}

/// The steps that wait for their copies, and how the thread that copies them is.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Steps that were saved: the newest, and before it those that are not passed over. They go first.
    new: VecDeque<PathBuf>,
    /// Steps that were found, and those whose copies failed and are due again.
    older: VecDeque<Added>,
    /// Steps whose copies failed, until they are due again.
    failed: Vec<Added>,
    current: Option<Added>,
    pub is_running: bool,
    /// Whether the thread waits before it tries a copy again.
    pub is_resting: bool,
    pub is_closing: bool,
    /// Why a step was not copied, of those that were tried since the last one was saved.
    pub failure: Option<Error>,
}

impl Queue {
    /// Adds a step that was saved. Returns the one that it overtakes: it waits, and need not get to the places. Steps whose
    /// copies failed are due again, or are overtaken.
    pub fn add(&mut self, path: &Path, stays: impl Fn(&Path) -> bool) -> Option<PathBuf> {
        self.failure = None;
        self.failed.retain(|step| stays(&step.path));
        self.retry();
        self.older.retain(|step| step.path != path);
        let is_overtaken = self.new.back().is_some_and(|waiting| !stays(waiting));
        let overtaken = if is_overtaken { self.new.pop_back() } else { None };
        self.new.retain(|waiting| waiting != path);
        self.new.push_back(path.into());
        overtaken.filter(|overtaken| overtaken != path)
    }

    /// Adds a step that was found, unless it is here already. Returns whether it was not.
    pub fn add_found(&mut self, path: &Path) -> bool {
        let is_unknown = !self.has(path);
        if is_unknown {
            self.older.push_back(Added { path: path.into(), is_new: false });
        }
        is_unknown
    }

    /// Whether a step has yet to be copied, or is being copied.
    pub fn has(&self, path: &Path) -> bool {
        self.all().any(|step| step == path)
    }

    /// The steps that have yet to be copied, or are being copied.
    pub fn all(&self) -> impl Iterator<Item = &Path> {
        let found = self.older.iter().chain(&self.failed).chain(&self.current);
        self.new.iter().chain(found.map(|step| &step.path)).map(PathBuf::as_path)
    }

    /// The next step, which is in progress from now on.
    pub fn take(&mut self) -> Option<Added> {
        let new = self.new.pop_front().map(|path| Added { path, is_new: true });
        self.current = new.or_else(|| self.older.pop_front());
        self.current.clone()
    }

    /// Notes that the step in progress has ended, and whether it is worth another try.
    pub fn ended(&mut self, is_worth_another: bool) {
        self.failed.extend(self.current.take().filter(|_| is_worth_another));
    }

    /// Makes the steps whose copies failed due again.
    pub fn retry(&mut self) {
        self.older.extend(self.failed.drain(..));
    }

    pub fn has_failed_ones(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Forgets all steps, or after a panic the one in progress.
    pub fn clear(&mut self) {
        (self.new, self.older, self.failed, self.current) = Default::default();
    }

    /// Whether a step waits that is due.
    pub fn is_due(&self) -> bool {
        !self.new.is_empty() || !self.older.is_empty()
    }

    /// Whether nothing is copied, except further tries of copies that failed.
    pub fn is_idle(&self) -> bool {
        !self.is_running || self.is_resting && !self.is_due()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(steps: &[&str], stays: &[&str]) -> (Queue, Vec<PathBuf>) {
        let mut queue = Queue::default();
        let stays = |path: &Path| stays.iter().any(|step| Path::new(step) == path);
        let overtaken = steps.iter().filter_map(|step| queue.add(Path::new(step), stays)).collect();
        (queue, overtaken)
    }

    fn taken(queue: &mut Queue) -> Vec<PathBuf> {
        let step = || queue.take().inspect(|_| queue.ended(false)).map(|step| step.path);
        std::iter::from_fn(step).collect()
    }

    #[test]
    fn newer_step_overtakes_one_that_need_not_stay() {
        let (mut waiting, overtaken) = queue(&["1", "2", "3", "4"], &["2"]);
        assert_eq!(overtaken, [Path::new("1"), Path::new("3")]);
        assert_eq!(taken(&mut waiting), [Path::new("2"), Path::new("4")]);
    }

    #[test]
    fn step_that_is_saved_again_waits_once() {
        let (mut waiting, overtaken) = queue(&["1", "1"], &[]);
        assert!(overtaken.is_empty());
        assert_eq!(taken(&mut waiting), [Path::new("1")]);
        let (mut waiting, _) = queue(&["1", "2", "1"], &["1", "2"]);
        assert_eq!(taken(&mut waiting), [Path::new("2"), Path::new("1")]);
    }

    #[test]
    fn new_steps_go_before_those_that_were_found() {
        let (mut waiting, _) = queue(&[], &[]);
        assert!(waiting.add_found(Path::new("1")) && waiting.add_found(Path::new("2")));
        assert_eq!(waiting.take().unwrap().path, Path::new("1"));
        assert!(!waiting.add_found(Path::new("1")), "it is in progress");
        assert!(!waiting.add_found(Path::new("2")), "it waits");
        waiting.ended(false);
        waiting.add(Path::new("3"), |_| false);
        assert_eq!(taken(&mut waiting), [Path::new("3"), Path::new("2")]);
        assert!(waiting.add_found(Path::new("1")), "its copy has ended");
    }

    #[test]
    fn failed_step_is_due_again_with_the_next_save_unless_that_overtakes_it() {
        for (stays, again) in [(true, &["2", "1"][..]), (false, &["2"])] {
            let (mut waiting, _) = queue(&["1"], &[]);
            waiting.take().unwrap();
            waiting.ended(true);
            assert!(waiting.has_failed_ones() && waiting.has(Path::new("1")) && !waiting.is_due());
            waiting.add(Path::new("2"), |_| stays);
            assert_eq!(taken(&mut waiting), again.iter().map(Path::new).collect::<Vec<_>>());
        }
    }
}
