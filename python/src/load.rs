//! Loads: each tensor as a buffer of its own over its shard's memory.

use crate::error::to_python;
use crate::{runtime, to_json, wait};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use ringstow::device::host::HostSink;
use ringstow::store::LoadedTensor;
use ringstow::{LoadOptions, Result};
use std::ffi::c_int;
use std::path::PathBuf;

/// One tensor's bytes, writable. The memory of its whole pages goes back to the system with it.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Block {
    tensor: LoadedTensor,
}

#[pymethods]
impl Block {
    #[getter]
    fn nbytes(&self) -> usize {
        self.tensor.range.len()
    }

    /// The buffer protocol.
    ///
    /// # Safety
    /// Called by the interpreter alone, with a `view` to be filled in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("the view is null"));
        }
        let tensor = &slf.get().tensor;
        let start = tensor.arena.as_ptr().wrapping_add(tensor.range.start);
        let len = tensor.range.len() as ffi::Py_ssize_t;
        // SAFETY: the bytes are this block's alone (a manifest with overlapping tensors is refused),
        // and `FillInfo` has the view hold a reference to `slf`, which keeps the arena.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), len, 0, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let range = &self.tensor.range;
        // SAFETY: every view of these bytes held a reference to this block, so none is left.
        unsafe { self.tensor.arena.release(range.start, range.len()) };
    }
}

/// An opened checkpoint.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Checkpoint {
    inner: ringstow::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| ringstow::Checkpoint::open(path)).map_err(to_python)?;
        Ok(Self { inner })
    }

    #[getter]
    fn state(&self) -> &str {
        self.inner.manifest().state.get()
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let describe = |tensor: &ringstow::format::TensorEntry| {
            let shape = pyo3::types::PyTuple::new(py, &tensor.shape)?;
            let row = (tensor.name.as_str(), tensor.dtype.name(), shape, tensor.nbytes());
            Ok(row.into_pyobject(py)?.into_any())
        };
        self.inner.tensors().iter().map(describe).collect()
    }

    fn load(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        verify: bool,
        config: &str,
    ) -> PyResult<(Vec<Block>, String)> {
        let (runtime, options) = (runtime(config)?, LoadOptions { verify });
        let loaded = wait::run(py, |job| self.inner.load_names(&names, options, &runtime, job))?;
        let report = to_json(&loaded.report)?;
        let blocks = loaded.into_tensors().into_iter().map(|tensor| Block { tensor });
        Ok((blocks.collect(), report))
    }

    fn load_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, usize, usize)>,
        verify: bool,
        config: &str,
    ) -> PyResult<String> {
        let (runtime, options) = (runtime(config)?, LoadOptions { verify });
        let load = |job: &_| -> Result<_> {
            let sink = |(name, address, nbytes): &(String, usize, usize)| {
                // SAFETY: the caller, `ringstow._merge`, took the address from a live, dense tensor
                // of this size and keeps it alive and to itself for the length of this call.
                let sink = unsafe { HostSink::from_raw(*address as *mut u8, *nbytes) };
                (name.clone(), sink)
            };
            let sinks: Vec<(String, HostSink)> = targets.iter().map(sink).collect();
            self.inner.load_into(&sinks, options, &runtime, job)
        };
        to_json(&wait::run(py, load)?)
    }
}
