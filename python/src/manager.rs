//! The decisions of a manager, which are those of the library's own: Python says what only it and its ranks know.

use crate::error::to_python;
use crate::run::{Numbers, order};
use crate::{config, to_json, wait};
use pyo3::prelude::*;
use ringstow::internals::manager::{
    self, Added, Around, Eviction, Failure, Pauses, Seen, Stays, Verdict,
};
use ringstow::{Config, Error, Job, OnDamage, Retention, Runtime, Slim};
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

fn texts(paths: Vec<PathBuf>) -> Vec<OsString> {
    paths.into_iter().map(PathBuf::into_os_string).collect()
}

/// What `last`, `every`, `every_time`, `within` and `best` of a retention are.
pub(crate) type Rules = (
    Option<usize>,
    Option<u64>,
    Option<Duration>,
    Option<Duration>,
    Option<(String, String, usize)>,
);

pub(crate) fn keep((last, every, every_time, within, best): Rules) -> PyResult<Retention> {
    let best = best.map(crate::catalog::best).transpose()?;
    Ok(Retention { last, every, every_time, within, best, slim: None })
}

/// A Retained, why something failed, and the steps that a place lacks.
type Cleared = (Option<String>, Option<Py<PyAny>>, Vec<OsString>);

/// What goes from a run's directory after a save.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Clearing(manager::Clearing);

#[pymethods]
impl Clearing {
    #[new]
    fn new(
        root: PathBuf,
        rules: Rules,
        slim: Option<(usize, Vec<String>)>,
        eviction: Option<(Vec<PathBuf>, usize)>,
        config: &str,
    ) -> PyResult<Self> {
        let slim = slim.map(|(after, parts)| Slim { after, drop: parts });
        let keep = Retention { slim, ..keep(rules)? };
        let made = manager::Clearing::new(root, keep, self::config(config)?);
        let mut clearing = made.map_err(to_python)?;
        if let Some((places, keep)) = eviction {
            clearing.set_eviction(Eviction { places, keep }).map_err(to_python)?;
        }
        Ok(Self(clearing))
    }

    /// Removes and slims steps.
    fn after_save(&self, py: Python<'_>, waiting: Vec<PathBuf>) -> PyResult<Cleared> {
        let cleared = py.detach(|| self.0.after_save(&waiting));
        let (retained, mut failure) = match cleared.retained {
            Some(Ok(retained)) => (Some(to_json(&retained)?), None),
            Some(Err(error)) => (None, Some(error)),
            None => (None, None),
        };
        for (_, outcome) in cleared.slimmed {
            // A step whose parts are not apart stays as it is.
            let failed = outcome.err().filter(|error| !matches!(error, Error::Invalid { .. }));
            failure = failure.or(failed);
        }
        let failure = failure.map(|error| to_python(error).into_value(py).into_any());
        Ok((retained, failure, texts(cleared.lacking)))
    }

    fn evict(&self, py: Python<'_>, waiting: Vec<PathBuf>) -> Vec<OsString> {
        texts(py.detach(|| self.0.evict(&waiting)))
    }

    fn has_room(&self, py: Python<'_>, free_bytes: u64) -> bool {
        py.detach(|| self.0.has_room(free_bytes))
    }

    fn copyable(&self, py: Python<'_>) -> PyResult<Vec<OsString>> {
        py.detach(|| self.0.copyable()).map(texts).map_err(to_python)
    }

    fn note_damage(&self, path: PathBuf) {
        self.0.note_damage(&path);
    }

    fn is_damaged(&self, path: PathBuf) -> bool {
        self.0.is_damaged(&path)
    }
}

/// The steps of a run, in its directory and in further places; as JSON.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct RunSteps {
    root: PathBuf,
    places: Vec<PathBuf>,
    config: Config,
}

impl RunSteps {
    fn look<T: Send + Serialize>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(manager::Run<'_>) -> ringstow::Result<T> + Send,
    ) -> PyResult<String> {
        let run = manager::Run { root: &self.root, places: &self.places, config: &self.config };
        to_json(&py.detach(|| look(run)).map_err(to_python)?)
    }
}

#[pymethods]
impl RunSteps {
    #[new]
    fn new(root: PathBuf, places: Vec<PathBuf>, config: &str) -> PyResult<Self> {
        Ok(Self { root, places, config: self::config(config)? })
    }

    fn candidates(&self, py: Python<'_>, previous: bool) -> PyResult<String> {
        self.look(py, |run| run.candidates(on_damage(previous)))
    }

    fn committed(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |run| run.committed())
    }

    fn loadable(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |run| run.loadable())
    }

    /// A list of none or one.
    fn newest(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |run| Ok(Vec::from_iter(run.newest()?)))
    }

    fn named(&self, py: Python<'_>, step: u64) -> PyResult<String> {
        self.look(py, |run| run.named(step))
    }

    fn there(&self, py: Python<'_>) -> PyResult<String> {
        self.look(py, |run| run.there())
    }
}

/// The newest step of which tiers have all files together, and its copies.
#[pyfunction]
pub(crate) fn newest_of(
    py: Python<'_>,
    tiers: Vec<PathBuf>,
    config: &str,
) -> PyResult<(OsString, Vec<OsString>)> {
    let config = self::config(config)?;
    let found = py.detach(|| manager::newest_of(&tiers, &config)).map_err(to_python)?;
    Ok((found.0.into_os_string(), texts(found.1)))
}

/// Where a step is saved, unless the run has it under another name.
#[pyfunction]
pub(crate) fn usual_path(root: PathBuf, step: u64) -> OsString {
    manager::usual_path(&root, step).into_os_string()
}

fn on_damage(previous: bool) -> OnDamage {
    if previous { OnDamage::Previous } else { OnDamage::Raise }
}

/// What a manager remembers of the steps that it saved, to link their files.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Previous(manager::Previous);

#[pymethods]
impl Previous {
    #[new]
    fn new(full_every: Option<u64>) -> Self {
        Self(manager::Previous::new(full_every))
    }

    /// The last step, and whether the next save is to share no file with earlier ones.
    fn next(&self) -> (Option<OsString>, bool) {
        let (path, is_full) = self.0.next();
        (path.map(PathBuf::into_os_string), is_full)
    }

    fn saved(&self, path: PathBuf) {
        self.0.saved(&path);
    }

    fn restored(&self, path: PathBuf) {
        self.0.restored(&path);
    }
}

/// What follows a load that failed: "again", "raise" or "pass".
#[pyfunction]
pub(crate) fn after_failure(
    py: Python<'_>,
    path: PathBuf,
    has_copies: bool,
    is_damage: bool,
    is_missing: bool,
    previous: bool,
) -> &'static str {
    let failure = Failure { path: &path, has_copies, is_damage, is_missing };
    match py.detach(|| failure.verdict(on_damage(previous))) {
        Verdict::LookAgain => "again",
        Verdict::Raise => "raise",
        Verdict::PassOver => "pass",
    }
}

/// The whole steps in a run's directory of which a place lacks a whole copy.
#[pyfunction]
pub(crate) fn lacking(found: Vec<(PathBuf, Numbers, bool)>, places: Vec<PathBuf>) -> Vec<OsString> {
    let seen = found.into_iter().map(|(path, numbers, is_whole)| Seen {
        path,
        order: order(numbers),
        is_whole,
    });
    texts(manager::lacking(&seen.collect::<Vec<_>>(), &places))
}

/// Which of some steps, newest first, has the best number; of equals, the newest.
#[pyfunction]
pub(crate) fn best_of(numbers: Vec<Option<f64>>, mode: &str) -> PyResult<Option<usize>> {
    Ok(manager::best_of(numbers, mode.parse().map_err(to_python)?))
}

/// How the steps of a run get to its tiers.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Copying {
    copying: manager::Copying,
    config: Config,
}

#[pymethods]
impl Copying {
    #[new]
    fn new(
        root: PathBuf,
        tiers: Vec<PathBuf>,
        rate: u64,
        rules: Rules,
        config: &str,
    ) -> PyResult<Self> {
        let copying = manager::Copying::new(root, tiers, rate, keep(rules)?);
        Ok(Self { copying, config: self::config(config)? })
    }

    /// Copies a step to a tier. Returns a PromotionReport; None if a rule has removed the step.
    fn send(
        &self,
        py: Python<'_>,
        step: PathBuf,
        is_new: bool,
        tier: PathBuf,
        progress: Option<wait::Progress>,
    ) -> PyResult<Option<String>> {
        let runtime = Runtime::shared(&self.config).map_err(to_python)?;
        let step = Added { path: step, is_new };
        let send = |job: &_| {
            self.copying.send(&step, &tier, &self.config, |to, how| {
                ringstow::internals::store::promote(&runtime, &step.path, to, how, job)
            })
        };
        let sent = wait::run(py, &Job::of(&self.config), progress.as_ref(), send)?;
        sent.map(|report| to_json(&report)).transpose()
    }

    /// Removes what the rules no longer keep in a tier.
    fn clear(&self, py: Python<'_>, tier: PathBuf) {
        py.detach(|| self.copying.clear(&tier, &self.config));
    }
}

/// The steps that wait for their copies.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct CopyLine(manager::Line);

/// What Python knows of its ranks and of the program.
struct Caller {
    agree: Option<Py<PyAny>>,
    is_exiting: Py<PyAny>,
}

impl Around for Caller {
    type Error = PyErr;

    fn agree(&mut self, added: usize, is_closing: bool) -> PyResult<(usize, bool)> {
        let Some(agree) = &self.agree else { return Ok((added, is_closing)) };
        Python::attach(|py| agree.call1(py, (added, is_closing))?.extract(py))
    }

    fn is_exiting(&mut self) -> bool {
        Python::attach(|py| self.is_exiting.call0(py)?.is_truthy(py)).unwrap_or(false)
    }
}

fn pauses((first, longest): (f64, f64)) -> Pauses {
    (Duration::from_secs_f64(first), Duration::from_secs_f64(longest))
}

/// The next step and whether it was just saved; those that are overtaken; whether a step was saved since the turn before.
type Turn = (Option<(OsString, bool)>, Vec<OsString>, bool);

#[pymethods]
impl CopyLine {
    #[new]
    fn new(has_rule: bool, evicts: bool, every: Option<u64>, is_shared: bool) -> Self {
        Self(manager::Line::new(Stays { has_rule, evicts, every }, is_shared))
    }

    fn add(&self, path: PathBuf, is_new: bool) -> bool {
        self.0.add(&path, is_new)
    }

    fn waiting(&self) -> Vec<OsString> {
        texts(self.0.waiting())
    }

    fn next(
        &self,
        py: Python<'_>,
        pauses: (f64, f64),
        agree: Option<Py<PyAny>>,
        is_exiting: Py<PyAny>,
    ) -> PyResult<Turn> {
        let mut around = Caller { agree, is_exiting };
        let turn = py.detach(|| self.0.next(self::pauses(pauses), &mut around))?;
        let step = turn.step.map(|step| (step.path.into_os_string(), step.is_new));
        Ok((step, texts(turn.overtaken), turn.is_fresh))
    }

    fn ended(&self, is_worth_another: bool) {
        self.0.ended(is_worth_another);
    }

    fn pause_s(&self, pauses: (f64, f64)) -> Option<f64> {
        self.0.pause(self::pauses(pauses)).map(|pause| pause.as_secs_f64())
    }

    fn wait_idle(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait::until(py, timeout, false, |time| self.0.wait_idle(Some(time)))
    }

    fn wait_ended(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait::until(py, timeout, false, |time| self.0.wait_ended(Some(time)))
    }

    fn end_retries(&self) {
        self.0.end_retries();
    }

    fn give_up(&self) {
        self.0.give_up();
    }
}
