//! Tensors that somebody may write to while a save reads them: what each one's version was at the call,
//! and whether it still is that once the last byte has been copied.

use pyo3::intern;
use pyo3::prelude::*;
use ringstow::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::lazy::Raised;
use crate::settle::once_settled;

/// A tensor, the name that it is saved under, and the version that it had.
pub(crate) struct Watched {
    pub name: String,
    pub tensor: Py<PyAny>,
    pub version: u64,
}

/// Tensors to be looked at again. Let go of as soon as they have been, since they keep memory.
#[derive(Default)]
pub(crate) struct WatchList(Mutex<Vec<Watched>>);

/// The same, for Python.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Watch {
    pub(crate) list: Arc<WatchList>,
}

#[pymethods]
impl Watch {
    #[new]
    fn new(py: Python<'_>, tensors: Vec<(String, Py<PyAny>)>) -> Self {
        let watched = |(name, tensor): (String, Py<PyAny>)| {
            let version = version_of(tensor.bind(py))?;
            Some(Watched { name, tensor, version })
        };
        Self { list: Arc::new(WatchList::new(tensors.into_iter().filter_map(watched).collect())) }
    }

    /// The names of those that have been changed.
    fn changed(&self, py: Python<'_>) -> Vec<String> {
        self.list.changed(py)
    }
}

/// The version of a tensor of torch's, which every operation in place that autograd knows of raises.
/// `None` of what has none: inference tensors, and all that is no tensor.
pub(crate) fn version_of(tensor: &Bound<'_, PyAny>) -> Option<u64> {
    let version = tensor.getattr_opt(intern!(tensor.py(), "_version"));
    version.ok().flatten()?.extract().ok()
}

impl WatchList {
    pub fn new(watched: Vec<Watched>) -> Self {
        Self(Mutex::new(watched))
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    pub fn changed(&self, py: Python<'_>) -> Vec<String> {
        let is_changed =
            |watched: &&Watched| version_of(watched.tensor.bind(py)) != Some(watched.version);
        self.lock().iter().filter(is_changed).map(|watched| watched.name.clone()).collect()
    }

    /// What a save calls once it has copied the last byte: fails if a tensor has been changed since the
    /// call. Python then gets a `TornSaveError`.
    pub fn check(&self, path: &Path, raised: &Raised) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        once_settled(|py| {
            let changed = self.changed(py);
            // Here, since what is dropped without the GIL waits for whoever takes it next.
            self.clear();
            if changed.is_empty() {
                return Ok(());
            }
            let error = torn(py, path, changed).unwrap_or_else(|failure| failure);
            let said = Error::invalid(error.to_string());
            raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            Err(said)
        })
    }

    fn clear(&self) {
        let watched = std::mem::take(&mut *self.lock());
        drop(watched);
    }

    /// Nobody waits for the GIL with this lock held: whoever takes it has the GIL already.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WatchList {
    /// Of a save that failed before its check.
    fn drop(&mut self) {
        if !self.is_empty() {
            Python::attach(|_| self.clear());
        }
    }
}

/// The exception for tensors that were changed under a save.
pub(crate) fn torn(py: Python<'_>, path: &Path, names: Vec<String>) -> PyResult<PyErr> {
    let make = py.import("ringstow._errors")?.getattr("torn")?;
    Ok(PyErr::from_value(make.call1((PathBuf::from(path), names))?))
}
