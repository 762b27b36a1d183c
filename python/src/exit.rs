//! What the interpreter's exit has to do: wait for saves in progress, and fail if one failed unnoticed.

use crate::wait::until;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringstow::Job;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// How long the exit waits for threads that only have to take the GIL once more.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);

/// The saves and loads of this process. Locked by holders of the GIL only, so that no forked child
/// inherits it locked.
static JOBS: Mutex<Vec<Running>> = Mutex::new(Vec::new());
/// How many threads wait without the GIL, and will take it again.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// The thread that ends the interpreter, from then on.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

struct Running {
    job: Weak<Job>,
    end: End,
}

/// What the exit does with a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Wait,
    Cancel,
}

/// A thread that waits without the GIL.
///
/// Python before 3.14 ends a thread that takes the GIL during finalization with `pthread_exit`, which
/// aborts the process where Rust is on the stack: <https://github.com/python/cpython/issues/87135>.
pub(crate) struct Waiting(());

impl Waiting {
    pub(crate) fn begin() -> Self {
        WAITING.fetch_add(1, SeqCst);
        Self(())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, SeqCst);
    }
}

/// Notes a job, so that the exit ends it.
pub(crate) fn note(_py: Python<'_>, job: &Arc<Job>, end: End) {
    let mut jobs = jobs();
    jobs.retain(|running| running.job.strong_count() > 0);
    jobs.push(Running { job: Arc::downgrade(job), end });
}

/// Refuses to begin anything on a thread that the exit does not wait for any more.
pub(crate) fn refuse_late(what: &str) -> PyResult<()> {
    let is_late = ENDING.get().is_some_and(|ending| *ending != std::thread::current().id());
    match is_late {
        true => Err(PyRuntimeError::new_err(format!(
            "cannot {what}: the interpreter is exiting. Wait in the main thread for the thread that does this"
        ))),
        false => Ok(()),
    }
}

/// Waits for all saves of this process, cancels its loads, and lets the threads that wait for them go on
/// before the interpreter is torn down. Ctrl-C cancels the saves, too.
#[pyfunction]
pub(crate) fn end_jobs(py: Python<'_>) -> PyResult<()> {
    ENDING.get_or_init(|| std::thread::current().id());
    let ending: Vec<(Arc<Job>, End)> = std::mem::take(&mut *jobs())
        .iter()
        .filter_map(|running| Some((running.job.upgrade()?, running.end)))
        .collect();
    ending.iter().filter(|(_, end)| *end == End::Cancel).for_each(|(job, _)| job.cancel());
    let waited = ending.iter().try_for_each(|(job, _)| {
        until(py, None, true, |slice| job.wait_ended(Some(slice))).map(drop)
    });
    py.detach(|| {
        if waited.is_err() {
            ending.iter().for_each(|(job, _)| job.cancel());
            ending.iter().for_each(|(job, _)| assert!(job.wait_ended(None)));
        }
        let deadline = Instant::now() + PATIENCE;
        while WAITING.load(SeqCst) > 0 && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
        }
    });
    waited
}

/// In a forked child: its parent's jobs and waiting threads are not there.
pub(crate) fn forget_after_fork() {
    jobs().clear();
    WAITING.store(0, SeqCst);
}

fn jobs() -> MutexGuard<'static, Vec<Running>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the process exit with 1 where it would exit with 0. Called when Python's exit begins: Python
/// itself has no way to change the exit code from then on.
#[pyfunction]
pub(crate) fn fail_exit() {
    // SAFETY: C functions, with a handler that is there until the process ends.
    unsafe { register() };
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn register() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), arg: *mut c_void) -> c_int;
        fn exit(code: c_int) -> !;
    }

    extern "C" fn fail(code: c_int, _: *mut c_void) {
        if code == 0 {
            // SAFETY: glibc goes on with the handlers that are left, and exits with this code.
            unsafe { exit(1) }
        }
    }

    // SAFETY: the signature is that of <stdlib.h>. Where there is no memory for it, the code stays 0.
    let _ = unsafe { on_exit(fail, std::ptr::null_mut()) };
}

/// Elsewhere a handler is not told the code: any becomes 1, and what was registered before is not run.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
unsafe fn register() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
        fn fflush(stream: *mut c_void) -> c_int;
        fn _exit(code: c_int) -> !;
    }

    extern "C" fn fail() {
        // SAFETY: all streams are flushed, as exit does after its handlers.
        unsafe {
            fflush(std::ptr::null_mut());
            _exit(1)
        }
    }

    // SAFETY: the signature is that of <stdlib.h>.
    let _ = unsafe { atexit(fail) };
}
