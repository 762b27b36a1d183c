//! The coordinator's side of a save by several ranks.

use crate::error::to_python;
use crate::logging::deliver;
use crate::owned::Owned;
use crate::to_json;
use crate::wait::without_gil;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringstow::internals::format::receipt::{Merged, merge_packed};
use ringstow::internals::store::{self, await_all_written};
use ringstow::{Error, Metrics, RankShare, Result};
use serde_json::value::RawValue;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The receipts of all ranks, merged, until they are committed.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Receipts(Mutex<Option<Merged>>);

#[pymethods]
impl Receipts {
    #[new]
    fn new(py: Python<'_>, receipts: Vec<Bound<'_, PyBytes>>) -> PyResult<Self> {
        let receipts: Vec<&[u8]> = receipts.iter().map(|receipt| receipt.as_bytes()).collect();
        let merged = py.detach(|| merge_packed(&receipts)).map_err(to_python)?;
        Ok(Self(Mutex::new(Some(merged))))
    }
}

impl Receipts {
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut Option<Merged>) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A hold on a checkpoint's directory, until it is committed or abandoned.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Session(Owned<ringstow::Session>);

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (path, world_size, config, part_of=None, step=None, metrics=Metrics::new()))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        world_size: u32,
        config: &str,
        part_of: Option<(u32, u32, String)>,
        step: Option<u64>,
        metrics: Metrics,
    ) -> PyResult<Self> {
        let config = crate::config(config)?;
        let part_of = part_of.map(|(rank, ranks, save)| RankShare { rank, ranks, save });
        let begin = || -> Result<_> {
            let session = ringstow::Session::begin(path, world_size, &config)?;
            let session = part_of.into_iter().fold(session, ringstow::Session::rank_share);
            step.into_iter().fold(session, ringstow::Session::step).metrics(metrics)
        };
        Ok(Self(Owned::new(py.detach(begin).map_err(to_python)?)))
    }

    /// Commits once this host sees what the ranks of these receipts wrote.
    fn commit(
        &self,
        py: Python<'_>,
        receipts: &Receipts,
        state: String,
        names: Vec<String>,
    ) -> PyResult<String> {
        self.await_all_written(py, receipts)?;
        let Some(session) = self.0.take() else {
            return Err(to_python(Error::invalid(
                "the save was given up before its commit: another one has begun, or it was closed",
            )));
        };
        let commit = || -> Result<_> {
            let merged = receipts.look(Option::take);
            let merged =
                merged.ok_or_else(|| Error::invalid("the receipts were committed before"))?;
            let state = RawValue::from_string(state)
                .map_err(|e| Error::invalid(format!("the state's tree is no JSON: {e}")))?;
            session.commit_merged(merged, state, &names)
        };
        to_json(&py.detach(commit).map_err(to_python)?)
    }

    fn abandon(&self, py: Python<'_>) {
        let session = self.0.take();
        py.detach(|| drop(session));
    }
}

impl Session {
    /// Ends early if there is no session any more, and by Ctrl-C. Delivers log records meanwhile.
    fn await_all_written(&self, py: Python<'_>, receipts: &Receipts) -> PyResult<()> {
        let path = self.0.lock().as_ref().map(|session| session.path().to_path_buf());
        let Some(path) = path else { return Ok(()) };
        let mut raised = Ok(());
        let goes_on = || {
            raised = Python::attach(|py| deliver(py).and_then(|()| py.check_signals()));
            raised.is_ok()
        };
        let sees = |merged: &mut Option<Merged>| match (self.0.lock().as_ref(), merged) {
            (Some(session), Some(merged)) => session.sees(merged),
            _ => true,
        };
        without_gil(py, || await_all_written(&path, goes_on, || receipts.look(sees)));
        raised
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// Tells the other ranks of the save in progress at `path` to stop writing: this one will not try again.
#[pyfunction]
pub(crate) fn give_up(py: Python<'_>, path: PathBuf, rank: u32, why: String) {
    py.detach(|| store::give_up(&path, rank, &why));
}

/// Which rank has given up the save in progress at `path`, and why; None if none has.
#[pyfunction]
pub(crate) fn given_up(py: Python<'_>, path: PathBuf) -> Option<String> {
    py.detach(|| store::given_up(&path))
}
