//! What a `CheckpointManager` holds while it saves into a run.

use crate::error::to_python;
use crate::owned::Owned;
use pyo3::prelude::*;
use ringstow::internals::sys::run_lock;
use std::path::PathBuf;

/// A lock on a run's directory, until it is released or dropped.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct RunLock(Owned<run_lock::RunLock>);

#[pymethods]
impl RunLock {
    #[new]
    fn new(py: Python<'_>, root: PathBuf) -> PyResult<Self> {
        let lock = py.detach(|| run_lock::RunLock::take(&root)).map_err(to_python)?;
        Ok(Self(Owned::new(lock)))
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
