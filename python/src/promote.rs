//! Copies of checkpoints in object stores and other directories.

use crate::error::to_python;
use crate::{config, to_json, wait};
use pyo3::prelude::*;
use ringstow::{Job, Promotion, Runtime};
use std::path::{Path, PathBuf};

/// Checks that a URL can be understood, and the environment's settings for it.
#[pyfunction]
pub(crate) fn check_url(py: Python<'_>, url: PathBuf) -> PyResult<()> {
    py.detach(|| ringstow::internals::object::Bucket::at(&url)).map(drop).map_err(to_python)
}

/// The run whose steps a directory or a URL has.
#[pyfunction]
pub(crate) fn run_of(py: Python<'_>, place: PathBuf) -> PyResult<Option<String>> {
    py.detach(|| ringstow::internals::store::owner(&place)).map_err(to_python)
}

/// Checks that the steps in a run's directory and in further places are of one run; returns the name of the run that training
/// goes on with, if the directory does not have it.
#[pyfunction]
pub(crate) fn join_run(
    py: Python<'_>,
    root: PathBuf,
    places: Vec<PathBuf>,
    config: &str,
) -> PyResult<Option<String>> {
    let store = ringstow::Store::new(self::config(config)?).map_err(to_python)?;
    let is_other = |place: Option<&Path>| store.is_of_other_run(&root, place);
    py.detach(|| ringstow::internals::store::join(&root, &places, is_other)).map_err(to_python)
}

/// Gives a run that a directory goes on with a new name, there and in the places that have its steps.
#[pyfunction]
pub(crate) fn take_over(
    py: Python<'_>,
    root: PathBuf,
    places: Vec<PathBuf>,
    run: &str,
) -> PyResult<()> {
    py.detach(|| ringstow::internals::store::take_over(&root, &places, run)).map_err(to_python)
}

/// Says which run a place has steps of, whatever it said before.
#[pyfunction]
pub(crate) fn name_run(py: Python<'_>, place: PathBuf, run: &str) -> PyResult<()> {
    py.detach(|| ringstow::internals::store::name_run(&place, run)).map_err(to_python)
}

/// Says that a place has the steps of a run; returns its name.
#[pyfunction]
pub(crate) fn claim(py: Python<'_>, place: PathBuf, run: Option<String>) -> PyResult<String> {
    py.detach(|| ringstow::internals::store::claim(&place, run.as_deref())).map_err(to_python)
}

#[pyfunction]
#[pyo3(signature = (path, to, how, config, *, progress = None))]
pub(crate) fn promote(
    py: Python<'_>,
    path: PathBuf,
    to: PathBuf,
    how: (u64, usize, u64, bool, bool),
    config: &str,
    progress: Option<wait::Progress>,
) -> PyResult<String> {
    let config = self::config(config)?;
    let runtime = Runtime::shared(&config).map_err(to_python)?;
    let (rate, uploads, part_bytes, replace_older, replicas) = how;
    let how = Promotion { rate, uploads, part_bytes, replace_older, replicas };
    let promote = |job: &_| ringstow::internals::store::promote(&runtime, &path, &to, how, job);
    to_json(&wait::run(py, &Job::of(&config), progress.as_ref(), promote)?)
}
