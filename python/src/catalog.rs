//! The checkpoints of a run: which there are, which is the newest, and what goes.

use crate::error::to_python;
use crate::manager::{Rules, keep};
use crate::{config, to_json, wait};
use pyo3::prelude::*;
use ringstow::internals::sys::file_system::FileSystem;
use ringstow::{Before, Best, Disposal, Job, RetainOptions, Retention, StepPattern, Wanted};
use std::path::PathBuf;

fn pattern(text: Option<&str>) -> PyResult<Option<StepPattern>> {
    text.map(str::parse).transpose().map_err(to_python)
}

fn disposal(recycle: bool) -> Disposal {
    if recycle { Disposal::Recycle } else { Disposal::Remove }
}

pub(crate) fn best((metric, direction, count): (String, String, usize)) -> PyResult<Best> {
    Ok(Best { metric, direction: direction.parse().map_err(to_python)?, count })
}

/// A step, or the path of a checkpoint.
#[derive(FromPyObject)]
pub(crate) enum Limit {
    Step(u64),
    Path(PathBuf),
}

/// The newest step in a directory, or of several the nearest copy: a list as [`steps`] returns, of one step or none.
#[pyfunction]
pub(crate) fn latest(
    py: Python<'_>,
    directories: Vec<PathBuf>,
    verify: bool,
    before: Option<Limit>,
    pattern: Option<&str>,
    config: &str,
) -> PyResult<String> {
    let before = before.map(|before| match before {
        Limit::Step(step) => Before::Step(step),
        Limit::Path(path) => Before::Path(path),
    });
    let wanted = Wanted { pattern: self::pattern(pattern)?, before, verify };
    let config = self::config(config)?;
    let find = |job: &_| match &*directories {
        [one] => ringstow::internals::store::latest(one, &wanted, &config, job),
        all => ringstow::internals::manager::latest_of(all, &wanted, &config, job),
    };
    let newest = match verify {
        true => wait::run(py, &Job::of(&config), None, find)?,
        false => py.detach(|| find(&Default::default())).map_err(to_python)?,
    };
    to_json(&newest.as_slice())
}

/// Whether a checkpoint that was listed has been removed since, or is being removed.
#[pyfunction]
pub(crate) fn has_gone(py: Python<'_>, path: PathBuf) -> bool {
    py.detach(|| ringstow::internals::store::has_gone(&path))
}

/// The name of the file system of a path, or of the directory in which it would be, if other hosts may use it.
#[pyfunction]
pub(crate) fn shared_file_system(py: Python<'_>, path: PathBuf) -> Option<String> {
    py.detach(|| FileSystem::shared(&path)).map(|system| system.name)
}

#[pyfunction]
pub(crate) fn steps(
    py: Python<'_>,
    directory: PathBuf,
    pattern: Option<&str>,
    config: &str,
) -> PyResult<String> {
    let (pattern, config) = (self::pattern(pattern)?, self::config(config)?);
    let steps = || ringstow::internals::store::steps(&directory, pattern.as_ref(), &config);
    to_json(&py.detach(steps).map_err(to_python)?)
}

/// Checks that places keep each step that the other settings keep.
#[pyfunction]
pub(crate) fn check_covers(there: (String, usize), others: Vec<(String, usize)>) -> PyResult<()> {
    let others: Vec<_> = others.iter().map(|(name, count)| (&**name, *count)).collect();
    let there = (&*there.0, there.1);
    ringstow::internals::store::check_covers(there, &others).map_err(to_python)
}

#[pyfunction]
pub(crate) fn remove(
    py: Python<'_>,
    path: PathBuf,
    recycle: bool,
    config: &str,
) -> PyResult<String> {
    let config = self::config(config)?;
    let remove =
        || ringstow::internals::store::remove_checkpoint(&path, disposal(recycle), &config);
    to_json(&py.detach(remove).map_err(to_python)?)
}

#[pyfunction]
pub(crate) fn retain(
    py: Python<'_>,
    directory: PathBuf,
    rules: Rules,
    recycle: bool,
    pattern: Option<&str>,
    dry_run: bool,
    config: &str,
) -> PyResult<String> {
    let config = self::config(config)?;
    let (disposal, pattern) = (disposal(recycle), self::pattern(pattern)?);
    let Retention { last, every, every_time, within, best, slim: _ } = keep(rules)?;
    let newest = RetainOptions::new(last.unwrap_or(1));
    let retention = RetainOptions { every, every_time, within, best, disposal, pattern, ..newest };
    let retain = || match dry_run {
        true => ringstow::internals::store::retain_plan(&directory, &retention, &config),
        false => ringstow::internals::store::retain(&directory, &retention, &config),
    };
    to_json(&py.detach(retain).map_err(to_python)?)
}

#[pyfunction]
pub(crate) fn slim(
    py: Python<'_>,
    path: PathBuf,
    drop: Vec<String>,
    config: &str,
) -> PyResult<String> {
    let config = self::config(config)?;
    let slim = || ringstow::internals::store::slim(&path, &drop, &config);
    to_json(&py.detach(slim).map_err(to_python)?)
}

#[pyfunction]
pub(crate) fn prune(
    py: Python<'_>,
    directory: PathBuf,
    recycled: bool,
    no_other_writers: bool,
    dry_run: bool,
    config: &str,
) -> PyResult<String> {
    let config = self::config(config)?;
    let pruning = ringstow::Pruning { no_other_writers, dry_run, recycled };
    let prune = || ringstow::internals::store::prune_with(&directory, pruning, &config);
    to_json(&py.detach(prune).map_err(to_python)?)
}
