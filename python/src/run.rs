//! What a manager does with the run that it saves to.

use crate::error::to_python;
use crate::{config, to_json};
use pyo3::prelude::*;
use ringstow::Disposal;
use ringstow::internals::format::manifest::{Age, Order};
use ringstow::internals::store;
use std::path::PathBuf;

/// Says that this process manages a run.
#[pyclass(frozen)]
pub(crate) struct Managed(store::Managed);

#[pymethods]
impl Managed {
    #[new]
    fn new(root: PathBuf) -> Self {
        Self(store::Managed::run(&root))
    }

    /// Notes the order of a step of the run that is in another place.
    fn follows(&self, order: (u64, u64, u64, u64)) {
        let (branch, step, sequence, created) = order;
        let age = Age { sequence, created_unix_ms: Some(created) };
        self.0.follows(Order { branch, step: Some(step), age });
    }
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

#[pyfunction]
pub(crate) fn pinned(py: Python<'_>, run: PathBuf) -> Vec<String> {
    py.detach(|| store::pinned(&run))
}

#[pyfunction]
pub(crate) fn remove_step(
    py: Python<'_>,
    path: PathBuf,
    reason: &str,
    config: &str,
) -> PyResult<String> {
    let config = self::config(config)?;
    let disposal = Disposal::of(&config);
    let remove = || store::remove_step(&path, reason, disposal, &config);
    to_json(&py.detach(remove).map_err(to_python)?)
}
