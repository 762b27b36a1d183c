//! Copies of checkpoints in object stores and other directories.

use crate::error::to_python;
use crate::{config, to_json, wait};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringstow::{Job, Promotion, Runtime};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Checks that a URL can be understood, and the environment's settings for it.
#[pyfunction]
pub(crate) fn check_url(py: Python<'_>, url: PathBuf) -> PyResult<()> {
    py.detach(|| ringstow::internals::object::Bucket::at(&url)).map(drop).map_err(to_python)
}

/// Checks that a place is in none of the others, nor one of them in it.
#[pyfunction]
pub(crate) fn check_apart(py: Python<'_>, place: PathBuf, others: Vec<PathBuf>) -> PyResult<()> {
    let others = others.iter().map(PathBuf::as_path);
    py.detach(|| ringstow::internals::store::check_apart(&place, others)).map_err(to_python)
}

/// The run whose steps a directory or a URL has.
#[pyfunction]
pub(crate) fn run_of(py: Python<'_>, place: PathBuf) -> PyResult<Option<String>> {
    py.detach(|| ringstow::internals::store::owner(&place)).map_err(to_python)
}

/// Whether the run files of two checkpoints' directories name the same run.
#[pyfunction]
pub(crate) fn is_one_run(py: Python<'_>, one: PathBuf, other: PathBuf) -> bool {
    py.detach(|| ringstow::internals::store::is_one_run(&one, &other))
}

/// Where the tiers of a run may have a copy of a checkpoint.
#[pyfunction]
pub(crate) fn copies_of(py: Python<'_>, path: PathBuf, tiers: Vec<PathBuf>) -> Vec<OsString> {
    let copies = py.detach(|| ringstow::internals::store::copies_of(&path, &tiers));
    copies.into_iter().map(PathBuf::into_os_string).collect()
}

/// The copies of a directory's checkpoints that were begun there and have not ended: of which, and where to.
#[pyfunction]
pub(crate) fn unfinished(py: Python<'_>, run: PathBuf) -> PyResult<Vec<(OsString, String)>> {
    let found = py.detach(|| ringstow::internals::store::unfinished(&run)).map_err(to_python)?;
    Ok(found.into_iter().map(|one| (one.checkpoint.into_os_string(), one.to)).collect())
}

/// Checks that the steps in a run's directory and in further places are of one run, which training goes on with.
#[pyfunction]
pub(crate) fn join_run(
    py: Python<'_>,
    root: PathBuf,
    places: Vec<PathBuf>,
    config: &str,
) -> PyResult<()> {
    let config = self::config(config)?;
    py.detach(|| ringstow::internals::store::join(&root, &places, &config)).map_err(to_python)
}

/// Notes which run's steps a place has, in place of what was noted.
#[pyfunction]
pub(crate) fn name_run(py: Python<'_>, place: PathBuf, run: &str) -> PyResult<()> {
    py.detach(|| ringstow::internals::store::name_run(&place, run)).map_err(to_python)
}

/// Notes that one of its places has the steps of a directory's run, under its present name; returns that.
#[pyfunction]
pub(crate) fn claim_for(
    py: Python<'_>,
    root: PathBuf,
    places: Vec<PathBuf>,
    place: PathBuf,
) -> PyResult<String> {
    py.detach(|| ringstow::internals::store::claim_for(&root, &places, &place)).map_err(to_python)
}

/// Notes that a place has the steps of a run; returns its name.
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
    how: (u64, usize, u64, bool, bool, bool, f64),
    config: &str,
    progress: Option<wait::Progress>,
) -> PyResult<String> {
    let config = self::config(config)?;
    let runtime = Runtime::shared(&config).map_err(to_python)?;
    let (rate, uploads, part_bytes, replace_older, refuse_link, replicas, seconds) = how;
    let patience = Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("patience={seconds}: {error}")))?;
    let how =
        Promotion { rate, uploads, part_bytes, replace_older, refuse_link, replicas, patience };
    let promote = |job: &_| ringstow::internals::store::promote(&runtime, &path, &to, how, job);
    to_json(&wait::run(py, &Job::of(&config), progress.as_ref(), promote)?)
}
