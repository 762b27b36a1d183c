//! Log records of the library, handed to Python's `logging`.
//!
//! A thread of a save never calls `logging` itself. A signal handler may save while the thread that it
//! interrupted holds the lock of a logging handler; a record of that save, logged by another thread, would
//! wait for that lock for ever. So records of such threads are queued, and [`deliver`] logs them on the
//! thread that waits for the save: it may take the lock again.

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyException;
use pyo3::ffi;
use pyo3::prelude::*;
use ringstow::internals::pipeline::report::TARGET;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire};

/// The newest queued record. No lock, since a forked child would inherit it locked.
static QUEUE: AtomicPtr<Queued> = AtomicPtr::new(ptr::null_mut());

struct Queued {
    level: Level,
    target: String,
    file: Option<String>,
    line: Option<u32>,
    message: String,
    earlier: *mut Queued,
}

struct Logger(pyo3_log::Logger);

/// Logs what the library warns of under the logger `ringstow` from now on.
pub(crate) fn install(py: Python<'_>) -> PyResult<()> {
    const LEVEL: LevelFilter = LevelFilter::Info;
    // Levels are not cached: they may be changed, and warnings are rare.
    let logger = pyo3_log::Logger::new(py, pyo3_log::Caching::Loggers)?.filter(LEVEL);
    // Fails where the module is loaded a second time: the first logger stays.
    if log::set_boxed_logger(Box::new(Logger(logger))).is_ok() {
        log::set_max_level(LEVEL);
    }
    Ok(())
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        // The Python package logs a line of its own for each save and load.
        if record.target() == TARGET || !self.enabled(record.metadata()) {
            return;
        }
        // SAFETY: reads a thread-local value; needs neither the GIL nor a thread of Python's.
        let is_pythons = unsafe { !ffi::PyGILState_GetThisThreadState().is_null() };
        if is_pythons {
            return self.0.log(record);
        }
        push(Box::new(Queued {
            level: record.level(),
            target: record.target().to_owned(),
            file: record.file().map(str::to_owned),
            line: record.line(),
            message: record.args().to_string(),
            earlier: ptr::null_mut(),
        }));
    }

    fn flush(&self) {}
}

fn push(queued: Box<Queued>) {
    let queued = Box::into_raw(queued);
    let mut earlier = QUEUE.load(Acquire);
    loop {
        // SAFETY: this thread alone has the record until it is the newest.
        unsafe { (*queued).earlier = earlier };
        match QUEUE.compare_exchange_weak(earlier, queued, AcqRel, Acquire) {
            Ok(_) => return,
            Err(newer) => earlier = newer,
        }
    }
}

/// Logs the queued records, oldest first.
///
/// # Errors
/// Ctrl-C, or another exception that is no error, while a logging handler ran. Errors of handlers are
/// reported as unraisable.
#[pyfunction(name = "deliver_log")]
pub(crate) fn deliver(py: Python<'_>) -> PyResult<()> {
    if QUEUE.load(Acquire).is_null() {
        return Ok(());
    }
    let mut records = Vec::new();
    let mut next = QUEUE.swap(ptr::null_mut(), AcqRel);
    while !next.is_null() {
        // SAFETY: `push` made it with `Box::into_raw`, and the swap took it from all others.
        let queued = unsafe { Box::from_raw(next) };
        next = queued.earlier;
        records.push(queued);
    }
    let mut interrupted = Ok(());
    for queued in records.into_iter().rev() {
        queued.log();
        match PyErr::take(py) {
            Some(error) if error.is_instance_of::<PyException>(py) => {
                error.write_unraisable(py, None);
            }
            Some(error) => interrupted = Err(error),
            None => {}
        }
    }
    interrupted
}

/// Drops the parent's records, in a forked child.
pub(crate) fn forget_after_fork() {
    // Leaked: the parent may have been adding one.
    QUEUE.store(ptr::null_mut(), std::sync::atomic::Ordering::Release);
}

impl Queued {
    fn log(&self) {
        log::logger().log(
            &Record::builder()
                .level(self.level)
                .target(&self.target)
                .file(self.file.as_deref())
                .line(self.line)
                .args(format_args!("{}", self.message))
                .build(),
        );
    }
}
