//! Which step is copied next. Does no I/O, and decides alike wherever the same is added and ends in the same order: ranks that
//! copy together each have one.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The pause before a copy that failed is tried again, and the longest one.
pub type Pauses = (Duration, Duration);

/// A step to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// Its directory.
    pub path: PathBuf,
    /// Whether it was just saved, and not found.
    pub is_new: bool,
}

/// Which steps are never passed over, however many newer ones wait.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stays {
    /// Whether there is a rule that removes steps.
    pub has_rule: bool,
    /// Whether steps leave the run's directory once all places have them.
    pub evicts: bool,
    /// Steps that this number divides stay for good.
    pub every: Option<u64>,
}

impl Stays {
    /// Whether a step is to get to the places: it stays for good by its number, which its name ends in, or here until it is
    /// copied.
    pub fn stays(&self, path: &Path) -> bool {
        let divides = |every| number_of(path).is_some_and(|number| number.is_multiple_of(every));
        // Without a rule, nothing else removes it here.
        self.every.is_some_and(divides) || self.evicts && !self.has_rule
    }
}

/// The steps that wait for their copies.
#[derive(Debug, Default)]
pub struct Queue {
    stays: Stays,
    /// Steps that were added, and that not all ranks may know yet.
    pending: VecDeque<Added>,
    /// How many were admitted of those that were added.
    admitted: usize,
    /// Steps that were saved, oldest first. They go first.
    new: VecDeque<PathBuf>,
    /// Steps that were found, which are never passed over, and those whose copies failed and are due again.
    older: VecDeque<Added>,
    /// Steps whose copies failed, until they are due again.
    failed: Vec<Added>,
    current: Option<Added>,
    /// How often failed copies were tried again since a step was added.
    tries: u32,
}

impl Queue {
    pub fn new(stays: Stays) -> Self {
        Self { stays, ..Self::default() }
    }

    /// Adds a step, which waits until it is admitted.
    pub fn add(&mut self, path: &Path, is_new: bool) {
        self.pending.push_back(Added { path: path.into(), is_new });
    }

    /// How many steps were added.
    pub fn added(&self) -> usize {
        self.admitted + self.pending.len()
    }

    /// Admits so many of the steps that were added. Returns those that need not be copied any more, and whether one of the
    /// admitted was saved. Steps whose copies failed are due again, or are overtaken.
    pub fn admit(&mut self, added: usize) -> (Vec<PathBuf>, bool) {
        let (mut overtaken, mut has_new) = (Vec::new(), false);
        while self.admitted < added
            && let Some(step) = self.pending.pop_front()
        {
            (self.admitted, self.tries) = (self.admitted + 1, 0);
            if step.is_new {
                has_new = true;
                overtaken.append(&mut self.admit_saved(step.path));
            } else if !self.knows(&step.path) {
                self.older.push_back(step);
            }
        }
        (overtaken, has_new)
    }

    fn admit_saved(&mut self, path: PathBuf) -> Vec<PathBuf> {
        self.older.extend(self.failed.drain(..));
        let stays = self.stays;
        let gives_way = |waiting: &Path| overtakes(&path, waiting) && !stays.stays(waiting);
        // What was found is older, also if its number is higher: the run may have gone back.
        let is_overtaken = |step: &Added| step.is_new && gives_way(&step.path);
        let tried = self.older.iter().filter(|step| is_overtaken(step)).map(|step| &step.path);
        let new = self.new.iter().filter(|step| gives_way(step));
        let overtaken = new.chain(tried).filter(|step| **step != path).cloned().collect();
        self.new.retain(|step| *step != path && !gives_way(step));
        self.older.retain(|step| step.path != path && !is_overtaken(step));
        self.new.push_back(path);
        overtaken
    }

    /// Whether a step was admitted, and has yet to be copied or is being copied.
    fn knows(&self, path: &Path) -> bool {
        let older = self.older.iter().chain(&self.failed).chain(&self.current);
        older.map(|step| &step.path).chain(&self.new).any(|step| step == path)
    }

    /// The steps that have yet to be copied, or are being copied.
    pub fn all(&self) -> impl Iterator<Item = &Path> {
        let older = self.pending.iter().chain(&self.older).chain(&self.failed).chain(&self.current);
        self.new.iter().chain(older.map(|step| &step.path)).map(PathBuf::as_path)
    }

    /// The next step, which is in progress from now on. If none is due, the pause of those whose copies failed is over.
    pub fn take(&mut self) -> Option<Added> {
        if self.new.is_empty() && self.older.is_empty() {
            self.tries += 1;
            self.older.extend(self.failed.drain(..));
        }
        let new = self.new.pop_front().map(|path| Added { path, is_new: true });
        self.current = new.or_else(|| self.older.pop_front());
        self.current.clone()
    }

    /// Notes that the step in progress has ended, and whether it is worth another try.
    pub fn ended(&mut self, is_worth_another: bool) {
        self.failed.extend(self.current.take().filter(|_| is_worth_another));
    }

    /// How long to wait before copies that failed are tried again.
    pub fn pause(&self, (first, longest): Pauses) -> Duration {
        first.saturating_mul(2_u32.saturating_pow(self.tries)).min(longest)
    }

    pub fn has_failed_ones(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Forgets all steps, or after a panic the one in progress.
    pub fn clear(&mut self) {
        self.admitted += self.pending.len();
        (self.pending, self.new, self.older, self.failed, self.current) = Default::default();
    }

    /// Whether a step waits that is due.
    pub fn is_due(&self) -> bool {
        !(self.new.is_empty() && self.older.is_empty() && self.pending.is_empty())
    }
}

/// Whether a step need not be copied, since that one was saved after it: the same, or a later one of its kind, as step-2 of
/// step-1. After going back, a later save has a lower number, and both are copied.
fn overtakes(later: &Path, step: &Path) -> bool {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (later, step) = (name(later), name(step));
    kind(&later) == kind(&step) && numbers(&later) >= numbers(&step)
}

/// A name without its numbers.
fn kind(name: &str) -> Vec<&str> {
    name.split(|c: char| c.is_ascii_digit()).filter(|text| !text.is_empty()).collect()
}

/// The numbers in a name, however long: each as its length and its digits.
fn numbers(name: &str) -> Vec<(usize, &str)> {
    let digits = name.split(|c: char| !c.is_ascii_digit()).filter(|text| !text.is_empty());
    digits.map(|text| text.trim_start_matches('0')).map(|text| (text.len(), text)).collect()
}

/// The number that a step's name ends in.
fn number_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_string_lossy();
    name.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of saved steps, those of which stay whose number is even, and what was overtaken.
    fn queue(steps: &[&str], every: Option<u64>) -> (Queue, Vec<PathBuf>) {
        let mut queue = Queue::new(Stays { has_rule: true, evicts: false, every });
        steps.iter().for_each(|step| queue.add(Path::new(step), true));
        let overtaken = queue.admit(steps.len()).0;
        (queue, overtaken)
    }

    fn save(queue: &mut Queue, step: &str) -> Vec<PathBuf> {
        queue.add(Path::new(step), true);
        queue.admit(queue.added()).0
    }

    fn find(queue: &mut Queue, step: &str) {
        queue.add(Path::new(step), false);
        queue.admit(queue.added());
    }

    fn taken(queue: &mut Queue) -> Vec<PathBuf> {
        let step = || queue.take().inspect(|_| queue.ended(false)).map(|step| step.path);
        std::iter::from_fn(step).collect()
    }

    fn paths<'a>(steps: &[&'a str]) -> Vec<&'a Path> {
        steps.iter().map(|step| Path::new(*step)).collect()
    }

    #[test]
    fn newer_step_overtakes_one_that_need_not_stay() {
        let (mut waiting, overtaken) = queue(&["s1", "s2", "s3", "s5"], Some(2));
        assert_eq!(overtaken, paths(&["s1", "s3"]));
        assert_eq!(taken(&mut waiting), paths(&["s2", "s5"]));
    }

    #[test]
    fn step_from_which_the_run_goes_back_and_those_of_other_names_are_copied_all_the_same() {
        let (mut waiting, overtaken) = queue(&["step-9", "best", "step-10", "step-7"], None);
        assert_eq!(overtaken, paths(&["step-9"]));
        assert_eq!(taken(&mut waiting), paths(&["best", "step-10", "step-7"]));
        let long = ["s99999999999999999999999", "s100000000000000000000000"];
        assert_eq!(queue(&long, None).1, paths(&long[..1]));
    }

    #[test]
    fn step_that_is_saved_again_waits_once() {
        let (mut waiting, overtaken) = queue(&["s1", "s1"], None);
        assert!(overtaken.is_empty());
        assert_eq!(taken(&mut waiting), paths(&["s1"]));
        let (mut waiting, _) = queue(&["s2", "s4", "s2"], Some(2));
        assert_eq!(taken(&mut waiting), paths(&["s4", "s2"]));
    }

    #[test]
    fn new_steps_go_before_those_that_were_found_which_are_never_passed_over() {
        let (mut waiting, _) = queue(&[], None);
        find(&mut waiting, "s1");
        find(&mut waiting, "s2");
        assert_eq!(waiting.take().unwrap().path, Path::new("s1"));
        find(&mut waiting, "s1"); // it is in progress
        find(&mut waiting, "s2"); // it waits
        waiting.ended(false);
        assert!(save(&mut waiting, "s3").is_empty());
        assert_eq!(taken(&mut waiting), paths(&["s3", "s2"]));
        find(&mut waiting, "s1"); // its copy has ended
        assert_eq!(taken(&mut waiting), paths(&["s1"]));
    }

    #[test]
    fn failed_step_is_due_again_with_the_next_save_unless_that_overtakes_it() {
        for (every, again) in [(Some(1), &["s2", "s1"][..]), (None, &["s2"])] {
            let (mut waiting, _) = queue(&["s1"], every);
            waiting.take().unwrap();
            waiting.ended(true);
            assert!(
                waiting.has_failed_ones() && waiting.knows(Path::new("s1")) && !waiting.is_due()
            );
            save(&mut waiting, "s2");
            assert_eq!(taken(&mut waiting), paths(again));
        }
    }

    #[test]
    fn step_counts_once_all_ranks_have_added_it() {
        let (mut waiting, _) = queue(&["s1"], None);
        waiting.add(Path::new("s2"), true);
        assert_eq!((waiting.added(), waiting.admit(1)), (2, (Vec::new(), false)));
        assert_eq!(waiting.take().unwrap().path, Path::new("s1"));
        assert_eq!(waiting.all().count(), 2);
    }

    #[test]
    fn pauses_double_until_a_step_is_saved() {
        let (second, pauses) =
            (Duration::from_secs(1), (Duration::from_secs(1), Duration::from_secs(3)));
        let (mut waiting, _) = queue(&["s1"], None);
        let fail = |waiting: &mut Queue| {
            waiting.take().unwrap();
            waiting.ended(true);
            waiting.pause(pauses)
        };
        assert_eq!([0; 3].map(|_| fail(&mut waiting)), [second, 2 * second, 3 * second]);
        save(&mut waiting, "s2");
        assert_eq!(fail(&mut waiting), second);
    }
}
