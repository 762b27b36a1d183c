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
use crate::storage::{Held, held};

/// A tensor, and the version and the memory that it had.
pub(crate) struct Watched {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) version: u64,
    pub(crate) storage: Option<Storage>,
}

/// What holds a tensor's memory, and the memory that it held. Not asked of the tensor at the end:
/// `parameter.data = ...` gives that another storage, and leaves this one to the save.
pub(crate) struct Storage {
    object: Py<PyAny>,
    memory: Held,
}

/// Tensors to be looked at again. Let go of as soon as they have been, since they keep memory.
#[derive(Default)]
pub(crate) struct WatchList(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    watched: Vec<Watched>,
    /// The names that they are saved under, one after the other, and where each ends.
    names: String,
    ends: Vec<usize>,
}

/// The same, for Python.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Watch {
    pub(crate) list: Arc<WatchList>,
}

#[pymethods]
impl Watch {
    #[new]
    fn new(py: Python<'_>, tensors: Vec<(String, Py<PyAny>)>) -> Self {
        let mut list = WatchList::default();
        for (name, tensor) in tensors {
            if let Some(version) = version_of(tensor.bind(py)) {
                let storage = Storage::of(tensor.bind(py));
                list.push(&name, Watched { tensor, version, storage });
            }
        }
        Self { list: Arc::new(list) }
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
    /// Whether the tensor was written to, or its memory freed or moved (`storage.resize_`).
    fn is_changed(&self, py: Python<'_>) -> bool {
        let has_moved = |storage: &Storage| {
            held(storage.object.bind(py)).map_or(true, |memory| memory != storage.memory)
        };
        version_of(self.tensor.bind(py)) != Some(self.version)
            || self.storage.as_ref().is_some_and(has_moved)
    }
}

impl Storage {
    pub(crate) fn new(object: Py<PyAny>, memory: Held) -> Self {
        Self { object, memory }
    }

    /// That of a tensor, with the memory that it has now.
    pub(crate) fn of(tensor: &Bound<'_, PyAny>) -> Option<Self> {
        let object = tensor.call_method0(intern!(tensor.py(), "untyped_storage")).ok()?;
        let memory = held(&object).ok()?;
        Some(Self { object: object.unbind(), memory })
    }
}

impl WatchList {
    /// Adds a tensor that is saved under a name.
    pub(crate) fn push(&mut self, name: &str, watched: Watched) {
        let inner = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        inner.names.push_str(name);
        inner.ends.push(inner.names.len());
        inner.watched.push(watched);
    }

    pub fn is_empty(&self) -> bool {
        self.lock().watched.is_empty()
    }

    pub fn changed(&self, py: Python<'_>) -> Vec<String> {
        let inner = self.lock();
        let starts = std::iter::once(0).chain(inner.ends.iter().copied());
        let names = starts.zip(&inner.ends).map(|(start, &end)| &inner.names[start..end]);
        let changed = inner.watched.iter().zip(names).filter(|(watched, _)| watched.is_changed(py));
        changed.map(|(_, name)| name.to_owned()).collect()
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
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
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
    let make = py.import("ringstow._core._errors")?.getattr("torn")?;
    Ok(PyErr::from_value(make.call1((PathBuf::from(path), names))?))
}
