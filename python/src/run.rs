//! What a manager does with the run that it saves to.

use crate::config;
use crate::error::to_python;
use crate::logging;
use crate::owned::Owned;
use pyo3::prelude::*;
use ringstow::Error;
use ringstow::internals::format::manifest::{Age, Order};
use ringstow::internals::store;
use ringstow::internals::sys::run_lock;
use std::ffi::OsString;
use std::path::PathBuf;

/// A lock on a run's directory, until it is released or dropped.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct RunLock(Owned<run_lock::RunLock>);

#[pymethods]
impl RunLock {
    #[new]
    fn new(py: Python<'_>, root: PathBuf) -> PyResult<Self> {
        let mut interrupt = None;
        let waits = || {
            let seen = Python::attach(|py| logging::deliver(py).and_then(|()| py.check_signals()));
            seen.map_err(|raised| {
                interrupt = Some(raised);
                Error::invalid("interrupted")
            })
        };
        let take = || store::check_run(&root).and_then(|()| run_lock::RunLock::take(&root, waits));
        let lock = py.detach(take);
        interrupt.map_or(Ok(()), Err)?;
        Ok(Self(Owned::new(lock.map_err(to_python)?)))
    }

    /// Checks that no other host's manager has taken the run.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.lock().as_ref().map_or(Ok(()), run_lock::RunLock::check))
            .map_err(to_python)
    }

    /// Whether this process holds the lock of a run.
    #[staticmethod]
    fn is_own(root: PathBuf) -> bool {
        run_lock::RunLock::is_own(&root)
    }

    /// Lets others save there.
    fn release(&self) {
        drop(self.0.take());
    }
}

/// What Python has of an [`Order`].
pub(crate) type Numbers = (u64, u64, u64, u64);

pub(crate) fn order((branch, step, sequence, created): Numbers) -> Order {
    Order { branch, step: Some(step), age: Age { sequence, created_unix_ms: Some(created) } }
}

/// Adds a line of JSON to the history of a run.
#[pyfunction]
pub(crate) fn add_to_history(py: Python<'_>, run: PathBuf, line: &str) -> PyResult<()> {
    py.detach(|| store::add_to_history(&run, line)).map_err(to_python)
}

/// Notes the order of a step of the run that may be in another place.
#[pyfunction]
pub(crate) fn follow(root: PathBuf, newest: Numbers) {
    store::follow(&root, order(newest));
}

/// Warns of the steps in some places of a run that are newer than a restored one, or removes them.
#[pyfunction]
pub(crate) fn go_back(
    py: Python<'_>,
    root: PathBuf,
    places: Vec<PathBuf>,
    restored: Numbers,
    drop_newer: bool,
    config: &str,
) -> PyResult<()> {
    let config = self::config(config)?;
    let go_back = || {
        let newer = store::Newer::find(&root, &places, order(restored), &config)?;
        if drop_newer {
            return newer.remove(&config).map(drop);
        }
        newer.warn();
        Ok(())
    };
    py.detach(go_back).map_err(to_python)
}

/// Whether a step is gone because it was removed.
#[pyfunction]
pub(crate) fn was_removed(py: Python<'_>, path: PathBuf, config: &str) -> PyResult<bool> {
    let config = self::config(config)?;
    Ok(py.detach(|| store::was_removed(&path, &config)))
}

#[pyfunction]
pub(crate) fn check_own_name(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    py.detach(|| store::check_own_name(&path)).map_err(to_python)
}

#[pyfunction]
pub(crate) fn pin(py: Python<'_>, step: PathBuf) -> PyResult<()> {
    py.detach(|| store::pin(&step)).map_err(to_python)
}

#[pyfunction]
pub(crate) fn unpin(py: Python<'_>, step: PathBuf) -> PyResult<bool> {
    py.detach(|| store::unpin(&step)).map_err(to_python)
}

/// Where the step of this number is that is kept, also if somebody has removed it.
#[pyfunction]
pub(crate) fn kept(py: Python<'_>, run: PathBuf, step: u64) -> Option<OsString> {
    py.detach(|| store::kept(&run, step)).map(PathBuf::into_os_string)
}

#[pyfunction]
pub(crate) fn pinned(py: Python<'_>, run: PathBuf) -> Vec<String> {
    py.detach(|| store::pinned(&run))
}
