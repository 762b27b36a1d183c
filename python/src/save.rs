//! Saves: tensors as addresses, values as JSON.

use crate::error::to_python;
use crate::wait::until;
use pyo3::prelude::*;
use ringstow::device::host::Strided;
use ringstow::{Dtype, Error, Result, SaveHandle, StateDict, TensorInfo};
use serde_json::value::RawValue;
use std::path::PathBuf;

/// Name, dtype, shape in elements, strides in bytes (none: dense), address, bytes of dense data.
type TensorSpec = (String, String, Vec<u64>, Option<Vec<isize>>, usize, u64);

/// A save in the background.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct SaveJob {
    /// Taken only by `drop`.
    handle: Option<SaveHandle>,
    /// The process that runs it: a forked child has the object, but not the threads.
    process: u32,
}

impl SaveJob {
    fn handle(&self) -> &SaveHandle {
        self.handle.as_ref().expect("only `drop` takes it")
    }
}

#[pymethods]
impl SaveJob {
    fn staged(&self) -> bool {
        self.handle().staged()
    }

    fn done(&self) -> bool {
        self.handle().done()
    }

    #[pyo3(signature = (timeout=None))]
    fn wait_staged(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        until(py, timeout, |slice| self.handle().wait_staged(Some(slice)))
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        until(py, timeout, |slice| self.handle().wait(Some(slice)))
    }

    fn result(&self) -> PyResult<String> {
        match self.handle().take() {
            Some(Ok(report)) => crate::to_json(&report),
            Some(Err(error)) => Err(to_python(error)),
            None => Err(to_python(Error::invalid("the save has not ended, or was asked already"))),
        }
    }

    fn progress(&self) -> (u64, u64, u64) {
        let progress = self.handle().progress();
        (progress.staged, progress.written, progress.total)
    }

    fn cancel(&self) {
        self.handle().cancel();
    }
}

impl Drop for SaveJob {
    fn drop(&mut self) {
        let handle = self.handle.take();
        if std::process::id() != self.process {
            // Its thread is the parent's: joining it here would wait for ever.
            return std::mem::forget(handle);
        }
        Python::attach(|py| py.detach(|| drop(handle)));
    }
}

/// Starts a save and returns at once.
#[pyfunction]
pub(crate) fn start_save(
    tensors: Vec<TensorSpec>,
    state: String,
    path: PathBuf,
    config: &str,
) -> PyResult<SaveJob> {
    let config = crate::config(config)?;
    let start = || -> Result<SaveHandle> {
        let mut dict = StateDict::new();
        for spec in tensors {
            add(&mut dict, spec)?;
        }
        let tree = RawValue::from_string(state)
            .map_err(|e| Error::invalid(format!("the state's tree is no JSON: {e}")))?;
        dict.set_tree(tree);
        ringstow::save_async(dict, path, &config)
    };
    let handle = Some(start().map_err(to_python)?);
    Ok(SaveJob { handle, process: std::process::id() })
}

fn add(dict: &mut StateDict<'static>, spec: TensorSpec) -> Result<()> {
    let (name, dtype, shape, strides, address, nbytes) = spec;
    let dtype = Dtype::from_name(&dtype)
        .ok_or_else(|| Error::invalid(format!("tensor {name:?}: there is no dtype {dtype:?}")))?;
    let info = TensorInfo { name, dtype, shape };
    let wrong = |what: &str| Error::invalid(format!("tensor {:?}: {what}", info.name));
    if info.nbytes()? != nbytes {
        return Err(wrong(&format!("{nbytes} bytes are not what {dtype} {:?} takes", info.shape)));
    }
    let dims: Vec<usize> = info.shape.iter().map(|&dim| dim as usize).collect();
    if strides.as_ref().is_some_and(|strides| strides.len() != dims.len()) {
        return Err(wrong("it needs one stride a dimension"));
    }
    // SAFETY: the caller, `ringstow._state`, took the address from a live tensor with this shape and
    // these strides, and keeps the tensor alive until the save has staged it.
    let source = unsafe {
        match strides {
            Some(strides) if dtype.bits() >= 8 => {
                let item = (dtype.bits() / 8) as usize;
                Strided::new(address as *const u8, item, &dims, Some(&strides))
            }
            Some(_) => return Err(wrong("elements of less than a byte must be dense")),
            None => Strided::new(address as *const u8, 1, &[nbytes as usize], None),
        }
    };
    dict.source(info, Box::new(source));
    Ok(())
}
