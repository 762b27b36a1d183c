//! The caller's handle on a save or load in the background, and the loads of an open checkpoint that return one.

use crate::device::Target;
use crate::error::{Error, Result};
use crate::pipeline::job::{ENDED, Job, Progress, STAGED};
use crate::pipeline::report::{LoadReport, SaveReport};
use crate::store::{Checkpoint, LoadOptions, Loaded};
use crate::sys::at_exit;
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A save in the background.
pub type SaveHandle<T = SaveReport> = Handle<T>;

/// A load in the background.
pub type LoadHandle<T = Loaded> = Handle<T>;

/// A save or load that runs in the background, on threads of its own. Wait on it, poll it, or `.await` it under any
/// runtime.
///
/// - Dropping the handle of a save does not wait, since that would block the runtime of a task. The save goes on: it owns its
///   state, and the end of `main` and [`std::process::exit`] wait for it. Keep the [`Handle::job`] to wait for it or to
///   cancel it.
/// - If a save fails and its result is never read, the error is logged through `tracing`, unless it was cancelled.
/// - Dropping the handle of a load cancels the load.
#[must_use = "only `result` or `.await` returns the error of a failed save"]
#[derive(Debug)]
pub struct Handle<T> {
    job: Arc<Job>,
    outcome: Arc<Outcome<T>>,
    thread: Option<JoinHandle<()>>,
}

/// What runs in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Save,
    Load,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Load => "load",
        }
    }
}

/// The result, until [`Handle::take`] takes it.
#[derive(Debug)]
struct Outcome<T> {
    work: Work,
    ended: Mutex<Option<Result<T>>>,
}

impl<T> Outcome<T> {
    fn set(&self, ended: Result<T>) {
        *self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(ended);
    }

    fn take(&self) -> Option<Result<T>> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }
}

impl<T> Drop for Outcome<T> {
    fn drop(&mut self) {
        if let (Work::Save, Some(Err(error))) = (self.work, self.take())
            && !matches!(error, Error::Cancelled { .. })
        {
            tracing::error!(%error, "a background save failed, and its result was never read");
        }
    }
}

impl<T: Send + 'static> Handle<T> {
    /// Runs `work` on a thread of its own.
    pub(crate) fn start(
        kind: Work,
        path: PathBuf,
        job: Arc<Job>,
        work: impl FnOnce(&Arc<Job>) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let outcome = Arc::new(Outcome { work: kind, ended: Mutex::new(None) });
        let (its_job, its_outcome) = (job.clone(), outcome.clone());
        let run = move || {
            its_job.lower_thread();
            let ended = catch_unwind(AssertUnwindSafe(|| work(&its_job)));
            its_outcome.set(ended.unwrap_or_else(|panic| Err(panicked(kind.name(), panic))));
            its_job.set_ended();
        };
        let (name, doing) = match kind {
            Work::Save => ("ringstow-save", "starting a thread to save"),
            Work::Load => ("ringstow-load", "starting a thread to load"),
        };
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(run)
            .map_err(|e| Error::io(doing, path, e))?;
        Ok(Self { job, outcome, thread: Some(thread) })
    }
}

/// The error for work that has panicked: `"save"`, `"load"` or `"copy"`.
pub(crate) fn panicked(work: &'static str, panic: Box<dyn Any + Send>) -> Error {
    let message = panic.downcast_ref::<&str>().map_or_else(
        || panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        |text| (*text).to_owned(),
    );
    Error::Panicked { work, message }
}

impl<T> Handle<T> {
    /// The job, which outlives the handle: progress, waiting and cancelling.
    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Whether every byte is copied from its tensor: from then on the tensors may change. Always false for a load.
    pub fn staged(&self) -> bool {
        self.job.staged()
    }

    /// Whether it has ended, with success or an error.
    pub fn done(&self) -> bool {
        self.job.ended()
    }

    /// Waits until every byte is copied from its tensor, or the save has failed before that. Returns false if
    /// `timeout` passed first. Blocks the thread; a task awaits [`Handle::until_staged`].
    pub fn wait_staged(&self, timeout: Option<Duration>) -> bool {
        self.job.wait_staged(timeout)
    }

    /// [`Handle::wait_staged`] as a future. It does not borrow the handle: another task may await it.
    pub fn until_staged(&self) -> Staged {
        Staged { job: self.job.clone() }
    }

    /// Waits until it has ended. Returns false if `timeout` passed first. Blocks the thread; a task awaits the handle.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.job.wait_ended(timeout)
    }

    /// The progress so far.
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// Cancels it. Its result is then [`Error::Cancelled`], unless the save has already reached its commit.
    pub fn cancel(&self) {
        self.job.cancel();
    }

    /// Waits until it has ended and returns its result. Blocks the thread; a task awaits the handle.
    ///
    /// # Errors
    /// The error of the save or load; [`Error::Invalid`] if [`Handle::take`] has returned the result already.
    pub fn result(self) -> Result<T> {
        self.job.wait_ended(None);
        self.take().unwrap_or_else(|| Err(Error::invalid("`take` has returned the result already")))
    }

    /// Returns the result once it has ended; `None` before, and in later calls.
    pub fn take(&self) -> Option<Result<T>> {
        self.outcome.take()
    }
}

impl<T> Future for Handle<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.job.wake(context.waker(), ENDED) {
            return Poll::Pending;
        }
        Poll::Ready(self.take().unwrap_or_else(|| Err(Error::invalid("polled after it was ready"))))
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if self.outcome.work == Work::Load {
            self.job.cancel();
        }
        let Some(thread) = self.thread.take() else { return };
        // The saved state may own this handle: then the save's own thread drops it, and cannot join itself.
        let is_own = thread.thread().id() == thread::current().id();
        let left = match (self.job.ended(), self.outcome.work) {
            (true, _) => Some(thread), // it only ends
            (false, Work::Save) => at_exit::wait_for(thread),
            (false, Work::Load) => None,
        };
        if let Some(thread) = left.filter(|_| !is_own) {
            let _ = thread.join();
        }
    }
}

/// The future of [`Handle::until_staged`]. Returns true once every byte is copied from its tensor, false if the save
/// failed before; its result says why.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub struct Staged {
    job: Arc<Job>,
}

impl Future for Staged {
    type Output = bool;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<bool> {
        if self.job.wake(context.waker(), STAGED) {
            return Poll::Pending;
        }
        Poll::Ready(self.job.staged())
    }
}

/// What [`Checkpoint::load_into_async`] gives: names and memory as they were handed over, now filled.
pub type Filled<M> = (Vec<(String, M)>, LoadReport);

impl Checkpoint {
    /// [`Checkpoint::load_names`] in the background.
    ///
    /// # Errors
    /// As for [`load_async`](crate::load_async).
    pub fn load_names_async<S: Into<String>>(
        self: &Arc<Self>,
        names: impl IntoIterator<Item = S>,
        verify: bool,
    ) -> Result<LoadHandle> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let checkpoint = self.clone();
        Handle::start(Work::Load, self.path().into(), Job::of(self.config()), move |job| {
            let options = LoadOptions { verify, job: Some(job), ..LoadOptions::default() };
            checkpoint.load_names(names, options)
        })
    }

    /// [`Checkpoint::load_into`] in the background. The memory is handed over for as long as the load
    /// writes to it, and comes back with the report; of a load that fails it is dropped.
    ///
    /// # Errors
    /// As for [`load_async`](crate::load_async).
    pub fn load_into_async<M: AsMut<[u8]> + Send + 'static>(
        self: &Arc<Self>,
        mut targets: Vec<(String, M)>,
        verify: bool,
    ) -> Result<LoadHandle<Filled<M>>> {
        let checkpoint = self.clone();
        Handle::start(Work::Load, self.path().into(), Job::of(self.config()), move |job| {
            let memory = targets.iter_mut().map(|(name, to)| (&*name, Target::new(to.as_mut())));
            let memory: Vec<(&String, Target)> = memory.collect();
            let report = checkpoint.load_into(
                &memory,
                LoadOptions { verify, job: Some(job), ..LoadOptions::default() },
            )?;
            Ok((targets, report))
        })
    }
}
