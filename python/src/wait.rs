//! Waiting without the GIL, in slices, so that Ctrl-C is seen and log records are delivered.

use crate::error::to_python;
use crate::exit::{End, Waiting, note, refuse_late};
use crate::logging;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use ringstow::{Error, Job, Result};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

/// How long Ctrl-C may go unseen.
const SLICE: Duration = Duration::from_millis(50);

/// Repeats `wait`, which waits for at most the time it is given and says whether what it waits for
/// has come, until that is so or `timeout` seconds have passed. Delivers log records meanwhile, if `logs`.
pub(crate) fn until(
    py: Python<'_>,
    timeout: Option<f64>,
    logs: bool,
    wait: impl Fn(Duration) -> bool + Send + Sync,
) -> PyResult<bool> {
    let deadline = deadline(timeout)?;
    loop {
        let left = deadline.map_or(SLICE, |d| d.saturating_duration_since(Instant::now()));
        let waiting = Waiting::begin();
        let has_come = py.detach(|| wait(left.min(SLICE)));
        drop(waiting);
        if logs {
            logging::deliver(py)?;
        }
        if has_come {
            return Ok(true);
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(false);
        }
    }
}

/// `None` for no time-out, and for one beyond what the clock can say.
fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    if seconds.is_nan() {
        return Err(PyValueError::new_err("timeout is not a number"));
    }
    let wait = Duration::try_from_secs_f64(seconds.max(0.0)).ok();
    Ok(wait.and_then(|wait| Instant::now().checked_add(wait)))
}

/// A function of Python's that shows how far a job is: it takes the bytes done and their total.
pub(crate) type Progress = Py<PyAny>;

/// How often progress is shown.
const TICK_S: f64 = 0.1;

/// Waits for the end of a job. Shows its progress meanwhile; an error of that is the caller's.
fn until_ended(py: Python<'_>, job: &Job, progress: Option<&Progress>) -> PyResult<bool> {
    let wait = |slice| job.wait_ended(Some(slice));
    let Some(progress) = progress else { return until(py, None, true, wait) };
    loop {
        let done = job.progress();
        progress.call1(py, (done.written, done.total))?;
        if until(py, Some(TICK_S), true, wait)? {
            return Ok(true);
        }
    }
}

/// Runs `work` on a thread of its own; Ctrl-C cancels its job, and is raised once it has stopped, and so does
/// the interpreter's exit.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    job: &Arc<Job>,
    progress: Option<&Progress>,
    work: impl FnOnce(&Arc<Job>) -> Result<T> + Send,
) -> PyResult<T> {
    let work = |job: &Arc<Job>, sender: Sender<()>| {
        drop(sender); // otherwise this thread would wait for a message, and see no Ctrl-C
        work(job)
    };
    run_beside(py, job, progress, work, |()| Ok(()))
}

/// [`run`]; and on this thread `beside`, with what `work` sends as soon as it can. If that fails, the job is cancelled.
pub(crate) fn run_beside<T: Send, M: Send>(
    py: Python<'_>,
    job: &Arc<Job>,
    progress: Option<&Progress>,
    work: impl FnOnce(&Arc<Job>, Sender<M>) -> Result<T> + Send,
    beside: impl FnOnce(M) -> PyResult<()>,
) -> PyResult<T> {
    refuse_late("read a checkpoint")?;
    note(py, job, End::Cancel);
    let (send, receive) = mpsc::channel();
    let done = std::thread::scope(|scope| {
        // Ends the job also if the work panics, or no thread begins it.
        let ended = SetEnded(job);
        let worker = move || {
            let _ended = ended;
            job.lower_thread();
            work(job, send)
        };
        // `thread::scope`'s own `spawn` panics if the system starts no more threads.
        let worker = std::thread::Builder::new().spawn_scoped(scope, worker).map_err(no_thread)?;
        let sent = without_gil(py, move || receive.recv().ok());
        let beside = sent.map_or(Ok(()), beside);
        let waited = beside.and_then(|()| until_ended(py, job, progress));
        if waited.is_err() {
            job.cancel();
        }
        let outcome = without_gil(py, || worker.join());
        waited.map(|_| outcome)
    })?;
    logging::deliver(py)?;
    match done {
        Ok(outcome) => outcome.map_err(to_python),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn no_thread(error: io::Error) -> PyErr {
    let error = Error::io("starting a thread", "", error);
    PyOSError::new_err((error.errno(), error.without_path()))
}

/// Runs what takes no longer than to cancel a job.
pub(crate) fn without_gil<T: Send>(py: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    let _waiting = Waiting::begin();
    py.detach(wait)
}

struct SetEnded<'a>(&'a Job);

impl Drop for SetEnded<'_> {
    fn drop(&mut self) {
        self.0.set_ended();
    }
}
