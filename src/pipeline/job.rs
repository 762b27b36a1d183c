//! The state of a running save or load that other threads see: progress, cancellation, end.

use super::trace::{Interval, Trace, What};
use crate::config::{Config, Priority};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Progress of one save or load. Shared by the threads that work on it and those that wait for it.
#[derive(Debug, Default)]
pub struct Job {
    total: AtomicU64,
    /// Whether the total is that of several loads.
    total_of_all: AtomicBool,
    staged: AtomicU64,
    written: AtomicU64,
    stop: Arc<AtomicBool>,
    trace: OnceLock<Trace>,
    /// That of the thread that works on it in the background.
    priority: Priority,
    /// Whether a program goes on meanwhile, and waits for the copies alone.
    is_background: bool,
    /// Whether an operation is in progress that will write the trace.
    is_traced: AtomicBool,
    phase: Mutex<Phase>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct Phase {
    staged: bool,
    ended: bool,
    wakers: Vec<Waker>,
}

/// Whether the phase that a thread or task waits for is reached.
type Reached = fn(&Phase) -> bool;

/// The phase that [`Job::wait_staged`] waits for.
pub(crate) const STAGED: Reached = |phase| phase.staged || phase.ended;
/// The phase that [`Job::wait_ended`] waits for.
pub(crate) const ENDED: Reached = |phase| phase.ended;

/// Progress of a save or load, in bytes of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied from tensors.
    pub staged: u64,
    /// Bytes written to the files. Durable only once the save has succeeded.
    pub written: u64,
    /// Bytes in total; 0 until the save or load is planned.
    pub total: u64,
}

impl Job {
    /// A job that traces each block. The save or load with this job writes the trace to `path` when it ends, in the
    /// trace format of Chrome and Perfetto.
    pub fn tracing(path: impl AsRef<Path>) -> Self {
        let job = Self::default();
        job.trace.get_or_init(|| Trace::new(path.as_ref()));
        job
    }

    /// Traces to the configuration's file, unless the job has a trace already.
    pub(crate) fn trace_to(&self, config: &Config) {
        if let Some(path) = &config.trace {
            self.trace.get_or_init(|| Trace::new(path));
        }
    }

    /// A job for a save or load with this configuration.
    pub fn of(config: &Config) -> Arc<Self> {
        Arc::new(Self::new(config, false))
    }

    /// A job for a save with this configuration, beside which the program goes on.
    pub fn in_background(config: &Config) -> Arc<Self> {
        Arc::new(Self::new(config, true))
    }

    fn new(config: &Config, is_background: bool) -> Self {
        let job = config.trace.as_ref().map_or_else(Self::default, Self::tracing);
        Self { priority: config.priority(), is_background, ..job }
    }

    /// Whether the program goes on meanwhile.
    pub(crate) fn is_background(&self) -> bool {
        self.is_background
    }

    /// Gives the calling thread the priority of the configuration, for good. For a thread that was started to work on this
    /// job.
    #[doc(hidden)]
    pub fn lower_thread(&self) {
        self.priority.try_apply();
    }

    /// Traces a step of block number `block` from `from` until now.
    pub(crate) fn note(&self, what: What, from: Instant, block: Option<usize>, bytes: u64) {
        if self.trace.get().is_some() {
            self.note_span(what, (from, Instant::now()), block, bytes);
        }
    }

    /// Like [`Job::note`], for a step that ended earlier.
    pub(crate) fn note_span(&self, what: What, span: Interval, block: Option<usize>, bytes: u64) {
        if let Some(trace) = self.trace.get() {
            trace.add(what, span, block, bytes);
        }
    }

    /// Traces a transfer that has just ended, and how long it waited before the engine started it.
    pub(crate) fn note_transfer(
        &self,
        what: What,
        (queued, started): (Instant, Option<Instant>),
        block: usize,
        bytes: u64,
    ) {
        let Some(started) = started else { return };
        self.note_span(What::Queued, (queued, started), Some(block), bytes);
        self.note(what, started, Some(block), bytes);
    }

    /// Runs a save or load, then writes its trace, if the job or the configuration asks for one. If it is a part of another
    /// operation that is traced, that one writes it. If writing the trace fails, this only logs a warning.
    pub(crate) fn traced<T>(&self, config: &Config, work: impl FnOnce() -> T) -> T {
        self.trace_to(config);
        if self.is_traced.swap(true, Relaxed) {
            return work();
        }
        let done = work();
        self.is_traced.store(false, Relaxed);
        if let Some(trace) = self.trace.get()
            && let Err(error) = trace.write()
        {
            let path = trace.path().display();
            tracing::warn!(%error, %path, "the trace could not be written");
        }
        done
    }

    /// The progress so far.
    pub fn progress(&self) -> Progress {
        Progress {
            staged: self.staged.load(Relaxed),
            written: self.written.load(Relaxed),
            total: self.total.load(Relaxed),
        }
    }

    /// Cancels it. It ends with [`Error::Cancelled`](crate::Error::Cancelled) unless it has reached its commit.
    pub fn cancel(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Whether it should stop, because it was cancelled or another thread failed.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// The flag behind [`Job::stopped`], for requests that wait in a queue.
    pub(crate) fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Sets the total of an operation of several loads, whose own totals no longer count.
    pub(crate) fn set_total_of_all(&self, bytes: u64) {
        self.total_of_all.store(false, Relaxed);
        self.set_total(bytes);
        self.total_of_all.store(true, Relaxed);
    }

    pub(crate) fn set_total(&self, bytes: u64) {
        if self.total_of_all.load(Relaxed) {
            return;
        }
        self.total.store(bytes, Relaxed);
        self.written.store(0, Relaxed); // a retried load starts over
    }

    pub(crate) fn add_staged(&self, bytes: u64) {
        self.staged.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn set_staged(&self) {
        self.reach(|phase| phase.staged = true);
    }

    /// Marks the job as ended, and wakes all waiting threads and tasks. For callers that run a job on their own thread.
    pub fn set_ended(&self) {
        self.reach(|phase| phase.ended = true);
    }

    /// Sets a phase, and wakes all waiting threads and tasks. A task that waits for a later phase registers again.
    fn reach(&self, note: impl FnOnce(&mut Phase)) {
        let wakers = {
            let mut phase = self.phase();
            note(&mut phase);
            std::mem::take(&mut phase.wakers)
        };
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether every byte is copied from its tensor.
    pub fn staged(&self) -> bool {
        self.phase().staged
    }

    /// Whether it has ended, with success or an error.
    pub fn ended(&self) -> bool {
        self.phase().ended
    }

    /// Waits until every byte is copied from its tensor, or the job has failed before that. Returns false if `timeout`
    /// passed first.
    pub fn wait_staged(&self, timeout: Option<Duration>) -> bool {
        self.wait(timeout, STAGED)
    }

    /// Waits until the job has ended. Returns false if `timeout` passed first.
    pub fn wait_ended(&self, timeout: Option<Duration>) -> bool {
        self.wait(timeout, ENDED)
    }

    /// Registers `waker` to be called when the phase is reached, or earlier. Returns false, and registers nothing,
    /// if it is reached.
    pub(crate) fn wake(&self, waker: &Waker, reached: Reached) -> bool {
        let mut phase = self.phase();
        if reached(&phase) {
            return false;
        }
        if !phase.wakers.iter().any(|known| known.will_wake(waker)) {
            phase.wakers.push(waker.clone());
        }
        true
    }

    fn wait(&self, timeout: Option<Duration>, reached: Reached) -> bool {
        // No deadline if it is beyond the clock's range.
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut phase = self.phase();
        while !reached(&phase) {
            phase = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(phase).expect("no panic while it is held"),
                Some(Duration::ZERO) => return false,
                Some(left) => {
                    self.changed.wait_timeout(phase, left).expect("no panic while it is held").0
                }
            };
        }
        true
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().expect("no panic while it is held")
    }
}
