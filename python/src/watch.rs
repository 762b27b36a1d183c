//! Tensors that somebody may write to while a save reads them, or whose memory somebody may free: what
//! each one's version and memory were at the call, and whether they still are that once the last byte has
//! been copied.

use pyo3::intern;
use pyo3::prelude::*;
use ringstow::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::lazy::Raised;
use crate::settle::once_settled;

/// A tensor, the name that it is saved under, and the version and the memory that it had.
pub(crate) struct Watched {
    name: String,
    tensor: Py<PyAny>,
    version: u64,
    storage: Option<Storage>,
}

/// What holds a tensor's memory, and the memory that it held. Not asked of the tensor at the end:
/// `parameter.data = ...` gives that another storage, and leaves this one to the save.
struct Storage {
    object: Py<PyAny>,
    memory: Held,
}

/// The address and the size of a storage's memory.
type Held = (usize, usize);

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
            Some(Watched::new(py, name, tensor, version))
        };
        Self { list: Arc::new(WatchList::new(tensors.into_iter().filter_map(watched).collect())) }
    }

    /// The names of those that have been changed, or have lost their memory.
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

impl Watched {
    /// Notes the memory that the tensor has now.
    pub fn new(py: Python<'_>, name: String, tensor: Py<PyAny>, version: u64) -> Self {
        let storage = Storage::of(tensor.bind(py));
        Self { name, tensor, version, storage }
    }

    /// Whether the tensor was written to, or its memory freed or moved (`storage.resize_`).
    fn is_changed(&self, py: Python<'_>) -> bool {
        let has_moved = |storage: &Storage| held(storage.object.bind(py)) != Some(storage.memory);
        version_of(self.tensor.bind(py)) != Some(self.version)
            || self.storage.as_ref().is_some_and(has_moved)
    }
}

impl Storage {
    fn of(tensor: &Bound<'_, PyAny>) -> Option<Self> {
        let object = tensor.call_method0(intern!(tensor.py(), "untyped_storage")).ok()?;
        let memory = held(&object)?;
        Some(Self { object: object.unbind(), memory })
    }
}

fn held(storage: &Bound<'_, PyAny>) -> Option<Held> {
    let ask = |method| storage.call_method0(method).ok()?.extract().ok();
    let py = storage.py();
    Some((ask(intern!(py, "data_ptr"))?, ask(intern!(py, "nbytes"))?))
}

impl WatchList {
    pub fn new(watched: Vec<Watched>) -> Self {
        Self(Mutex::new(watched))
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    pub fn changed(&self, py: Python<'_>) -> Vec<String> {
        let is_changed = |watched: &&Watched| watched.is_changed(py);
        self.lock().iter().filter(is_changed).map(|watched| watched.name.clone()).collect()
    }

    /// What a save calls once it has copied the last byte: fails if a tensor has been changed since the
    /// call, or its memory freed. Python then gets a `TornSaveError`.
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
