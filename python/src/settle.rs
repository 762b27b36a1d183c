//! Waits until no operation is in progress that may have been writing to a tensor while it was copied.
//!
//! torch releases the GIL while an operation writes, and raises the tensor's version only afterwards. So a
//! save that ends its copying in the middle of an operation would find the versions of the call.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// How long one operation of a Python thread may go on.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long threads that are not Python's may go on while those of Python sleep: most of them have
/// nothing to do with tensors, and some never rest.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_millis(250);
/// Between two looks: a sixteenth of the time that was waited so far.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Threads that write to no tensor: this library's and the kernel's.
const OURS: [&str; 2] = ["ringstow", "iou-"];

/// Where a Python thread is: its frame, and the instruction in it.
type Position = (usize, i64);
/// The number that Python has for a thread, and the kernel's.
type Ident = u64;
type Tid = i64;

/// The threads of Python, at one moment.
#[derive(Default)]
struct Threads {
    /// Where they are, except those that wait in this library.
    positions: HashMap<Ident, Position>,
    tids: HashMap<Tid, Ident>,
}

/// Calls `look`, with the GIL, once all operations have ended that were in progress at the time of the
/// call; or after [`PATIENCE`].
pub(crate) fn once_settled<T>(look: impl FnOnce(Python<'_>) -> T) -> T {
    let begun = Instant::now();
    let mut last_of_python = begun;
    let mut still: Option<HashMap<Ident, Position>> = None;
    loop {
        // What is not known is taken for settled.
        let now = Python::attach(seen).unwrap_or_default();
        let still = still.get_or_insert_with(|| now.positions.clone());
        still.retain(|ident, position| now.positions.get(ident) == Some(position));
        // A thread that has moved on has ended its operation, and one that sleeps is in none. That it
        // sleeps is seen before the versions are: it may begin another one at any moment.
        let running = if still.is_empty() { HashSet::new() } else { running() };
        let is_still = |tid: &Tid| now.tids.get(tid).is_some_and(|id| still.contains_key(id));
        if running.iter().any(is_still) {
            last_of_python = Instant::now();
        }
        let waits = running.iter().any(|tid| is_still(tid) || !now.tids.contains_key(tid))
            && begun.elapsed() < PATIENCE
            && last_of_python.elapsed() < PATIENCE_WITH_OTHERS;
        if !waits {
            return Python::attach(look);
        }
        std::thread::sleep((begun.elapsed() / 16).clamp(PAUSE_MIN, PAUSE_MAX));
    }
}

fn seen(py: Python<'_>) -> PyResult<Threads> {
    let Threads { mut positions, mut tids } = Threads::default();
    let frames = py.import("sys")?.getattr("_current_frames")?.call0()?.cast_into::<PyDict>()?;
    for (ident, frame) in frames {
        if !is_ours(&frame)? {
            let position = (frame.as_ptr() as usize, frame.getattr("f_lasti")?.extract()?);
            positions.insert(ident.extract()?, position);
        }
    }
    // Not `threading.enumerate`: that takes a lock, which a signal's handler may have found taken by the
    // very thread that now waits for this save.
    let active = py.import("threading")?.getattr("_active")?.cast_into::<PyDict>()?.copy()?;
    for (_, thread) in active {
        // `None` of one that is just starting.
        if let (Ok(ident), Ok(tid)) =
            (thread.getattr("ident")?.extract(), thread.getattr("native_id")?.extract())
        {
            tids.insert(tid, ident);
        }
    }
    Ok(Threads { positions, tids })
}

/// Tells whether a stack leads through this library, which writes to no tensor that it saves.
fn is_ours(frame: &Bound<'_, PyAny>) -> PyResult<bool> {
    let mut frame = frame.clone();
    while !frame.is_none() {
        let name = frame.getattr("f_globals")?.get_item("__name__");
        let name = name.and_then(|name| name.extract::<String>()).unwrap_or_default();
        if name == "ringstow" || name.starts_with("ringstow.") {
            return Ok(true);
        }
        frame = frame.getattr("f_back")?;
    }
    Ok(false)
}

/// The threads of this process that run, or wait for a page.
fn running() -> HashSet<Tid> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return HashSet::new() };
    let stats =
        tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.filter_map(|stat| running_in(&stat)).collect()
}

/// The thread's number, from its `/proc/self/task/*/stat`, if it runs and is not one of ours.
fn running_in(stat: &str) -> Option<Tid> {
    let (tid, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let runs = rest.starts_with(['R', 'D']) && !OURS.iter().any(|ours| name.starts_with(ours));
    if runs { tid.parse().ok() } else { None }
}
