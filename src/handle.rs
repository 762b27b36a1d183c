//! A save in the background, as the one who started it sees it.

use crate::error::{Error, Result};
use crate::pipeline::job::{Job, Progress};
use crate::pipeline::report::SaveReport;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A save that runs in the background. Wait on it, poll it, or `.await` it: no runtime is forced.
///
/// Dropping it waits for the save to end, so that a program that leaves `main` loses none; a
/// failure nobody asked for is then logged through `tracing`.
#[must_use = "a save that fails says so only to who asks: call `result`"]
#[derive(Debug)]
pub struct SaveHandle<T = SaveReport> {
    job: Arc<Job>,
    outcome: Arc<Mutex<Option<Result<T>>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> SaveHandle<T> {
    /// Runs `save` on a thread of its own.
    pub(crate) fn start(
        path: PathBuf,
        job: Arc<Job>,
        save: impl FnOnce(&Arc<Job>) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let outcome = Arc::<Mutex<Option<_>>>::default();
        let (its_job, its_outcome) = (job.clone(), Arc::clone(&outcome));
        let run = move || {
            let saved = catch_unwind(AssertUnwindSafe(|| save(&its_job))).unwrap_or_else(|panic| {
                let what = panic.downcast_ref::<&str>().map_or_else(
                    || panic.downcast_ref::<String>().cloned().unwrap_or_default(),
                    |text| (*text).to_owned(),
                );
                Err(Error::invalid(format!("the save panicked: {what}")))
            });
            *its_outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(saved);
            its_job.set_ended();
        };
        let thread = thread::Builder::new()
            .name("ringstow-save".into())
            .spawn(run)
            .map_err(|e| Error::io("starting a thread to save", path, e))?;
        Ok(Self { job, outcome, thread: Some(thread) })
    }
}

impl<T> SaveHandle<T> {
    /// How far it is, and whether to stop: what all handles share.
    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Whether every byte has left its tensor: from then on the tensors may be changed.
    pub fn staged(&self) -> bool {
        self.job.staged()
    }

    /// Whether the save has ended, well or not.
    pub fn done(&self) -> bool {
        self.job.ended()
    }

    /// Waits until every byte has left its tensor, or the save has ended without that. False if
    /// `timeout` passed first.
    pub fn wait_staged(&self, timeout: Option<Duration>) -> bool {
        self.job.wait_staged(timeout)
    }

    /// Waits until the save has ended. False if `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.job.wait_ended(timeout)
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// Asks the save to stop; [`result`](Self::result) then gives [`Error::Cancelled`], unless it
    /// had got to its commit.
    pub fn cancel(&self) {
        self.job.cancel();
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What the save failed with.
    pub fn result(self) -> Result<T> {
        self.job.wait_ended(None);
        self.take().expect("it is taken only here, by value, or by a poll that was ready")
    }

    /// The outcome, the first time after the end.
    pub fn take(&self) -> Option<Result<T>> {
        self.outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }
}

impl<T> Future for SaveHandle<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.job.wake_at_end(context.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(self.take().unwrap_or_else(|| Err(Error::invalid("polled after it was ready"))))
    }
}

impl<T> Drop for SaveHandle<T> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(Err(error)) = self.take() {
            tracing::error!(%error, "a save in the background failed, and nobody asked for its result");
        }
    }
}
