//! The steps that wait for their copies, the thread that copies them, and those who wait for it. Who copies and how, the
//! caller knows.

use super::queue::{Added, Pauses, Queue, Stays};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a thread looks within a pause whether the program is exiting.
const LOOK: Duration = Duration::from_millis(500);

/// The steps that wait, for the thread that copies them and those who wait for it.
#[derive(Debug, Default)]
pub struct Line {
    state: Mutex<State>,
    /// A step was added, or the line is closing, or the thread has ended or rests.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: Queue,
    /// Whether ranks copy together, so that a step counts once all of them have added it.
    is_shared: bool,
    /// What the next turn says of steps that were admitted as they were added.
    overtaken: Vec<PathBuf>,
    is_fresh: bool,
    is_running: bool,
    /// Whether the thread waits before it tries a copy again.
    is_resting: bool,
    is_closing: bool,
    /// Whether the line was closing when all ranks began the last copy: it is not tried again.
    was_closing: bool,
}

/// What the thread of a line does next.
#[derive(Debug)]
pub struct Turn {
    /// The step to copy; `None` ends the thread.
    pub step: Option<Added>,
    /// Steps that are not copied any more: newer ones were saved.
    pub overtaken: Vec<PathBuf>,
    /// Whether a step was saved since the turn before: earlier failures count no more.
    pub is_fresh: bool,
}

/// What only the caller knows of other ranks and of the program.
pub trait Around {
    /// Why the ranks could not agree.
    type Error;

    /// How many steps all ranks have added, and whether any of them is closing, of what this rank has and is.
    ///
    /// # Errors
    /// They have lost each other.
    fn agree(&mut self, added: usize, is_closing: bool) -> Result<(usize, bool), Self::Error>;

    /// Whether the program is exiting, and waits for the thread.
    fn is_exiting(&mut self) -> bool;
}

impl State {
    fn admit(&mut self, added: usize) {
        let (mut overtaken, is_fresh) = self.queue.admit(added);
        self.overtaken.append(&mut overtaken);
        self.is_fresh |= is_fresh;
    }
}

impl Line {
    /// An empty one, of one process or of ranks that copy together.
    pub fn new(stays: Stays, is_shared: bool) -> Self {
        let state = State { queue: Queue::new(stays), is_shared, ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds a step that was saved, or one that was found. Tells whether the caller is to start a thread, which counts as
    /// running from now on.
    pub fn add(&self, path: &Path, is_new: bool) -> bool {
        let mut state = self.state();
        state.queue.add(path, is_new);
        if !state.is_shared {
            // Now: what is overtaken waits no more.
            let added = state.queue.added();
            state.admit(added);
        }
        self.changed.notify_all();
        !std::mem::replace(&mut state.is_running, true)
    }

    /// The steps that have yet to be copied, or are being copied.
    pub fn waiting(&self) -> Vec<PathBuf> {
        self.state().queue.all().map(Path::to_owned).collect()
    }

    /// Waits until a step is due, or a copy that failed is to be tried again.
    ///
    /// # Errors
    /// That of [`Around::agree`].
    pub fn next<A: Around>(&self, pauses: Pauses, around: &mut A) -> Result<Turn, A::Error> {
        let mut state = self.state();
        if !state.queue.is_due() {
            if state.was_closing || !state.queue.has_failed_ones() {
                state.queue.clear();
                state.is_running = false;
                self.changed.notify_all();
                return Ok(Turn { step: None, overtaken: Vec::new(), is_fresh: false });
            }
            drop(state);
            self.rest(pauses, around);
            state = self.state();
        }
        let own = (state.queue.added(), state.is_closing);
        drop(state);
        let (added, was_closing) = around.agree(own.0, own.1)?;
        let mut state = self.state();
        state.was_closing = was_closing;
        state.admit(added);
        let overtaken = std::mem::take(&mut state.overtaken);
        let is_fresh = std::mem::take(&mut state.is_fresh);
        Ok(Turn { step: state.queue.take(), overtaken, is_fresh })
    }

    /// Waits until a step is added, the line closes, or the pause is over.
    fn rest<A: Around>(&self, pauses: Pauses, around: &mut A) {
        let mut state = self.state();
        let until = Instant::now() + state.queue.pause(pauses);
        state.is_resting = true;
        self.changed.notify_all();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_closing || state.queue.is_due() {
                break;
            }
            state = self.wait_for(state, left.min(LOOK));
            drop(state);
            let is_exiting = around.is_exiting();
            state = self.state();
            state.is_closing |= is_exiting;
        }
        state.is_resting = false;
    }

    /// Notes that the step in progress has ended, and whether it is worth another try.
    pub fn ended(&self, is_worth_another: bool) {
        self.state().queue.ended(is_worth_another);
    }

    /// After how long the copy that just failed is tried again; `None` if it is not.
    pub fn pause(&self, pauses: Pauses) -> Option<Duration> {
        let state = self.state();
        (!state.was_closing).then(|| state.queue.pause(pauses))
    }

    /// Waits so long until nothing is left to copy, but for further tries of copies that failed. Tells whether that is so.
    pub fn wait_idle(&self, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| {
            !state.is_running || state.is_resting && !state.queue.is_due()
        })
    }

    /// Waits so long until the thread has ended.
    pub fn wait_ended(&self, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| !state.is_running)
    }

    /// Has copies that failed tried a last time, now. Waits for nothing.
    pub fn end_retries(&self) {
        self.state().is_closing = true;
        self.changed.notify_all();
    }

    /// Forgets all steps, after the thread could not start or has broken.
    pub fn give_up(&self) {
        let mut state = self.state();
        (state.is_running, state.is_resting) = (false, false);
        state.queue.clear();
        state.overtaken.clear();
        self.changed.notify_all();
    }

    fn wait_until(&self, timeout: Option<Duration>, is_over: impl Fn(&State) -> bool) -> bool {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.state();
        while !is_over(&state) {
            let left = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            state = self.wait_for(state, left);
        }
        true
    }

    fn wait_for<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::tiers::Alone;

    #[test]
    fn what_was_overtaken_before_the_thread_broke_is_not_told_to_the_next_one() {
        let line = Line::new(Stays { has_rule: true, ..Stays::default() }, false);
        assert!(line.add(Path::new("s1"), true));
        line.add(Path::new("s2"), true);
        line.give_up();
        assert!(line.add(Path::new("s3"), true));
        let Ok(turn) = line.next((Duration::ZERO, Duration::ZERO), &mut Alone);
        assert_eq!(turn.overtaken, Vec::<PathBuf>::new());
        assert_eq!(turn.step.unwrap().path, Path::new("s3"));
    }
}
