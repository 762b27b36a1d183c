//! Saves: tensors as addresses, values as JSON.

use crate::error::to_python;
use crate::wait::until;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringstow::device::host::Strided;
use ringstow::{
    Dtype, Error, Item, Job, Part, Receipt, Result, SaveHandle, SaveReport, StateDict, TensorInfo,
};
use serde_json::value::RawValue;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Name, dtype, shape in elements, strides in bytes (none: dense), address, bytes of dense data.
type TensorSpec = (String, String, Vec<u64>, Option<Vec<isize>>, usize, u64);

/// The same of a box of a tensor, or of an object: shape of the whole tensor and offsets of the box
/// in it (none: the item is all of it), whether it is an object.
type ItemSpec = (
    String,
    String,
    Vec<u64>,
    Option<Vec<isize>>,
    usize,
    u64,
    Option<Vec<u64>>,
    Option<Vec<u64>>,
    bool,
);

/// A save in the background.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct SaveJob {
    /// Taken only by `drop`.
    handle: Option<Handle>,
    /// What the coordinator needs of this rank, once the job has ended.
    receipt: OnceLock<Receipt>,
    /// The process that runs it: a forked child has the object, but not the threads.
    process: u32,
}

/// A whole checkpoint, or a rank's part of one.
enum Handle {
    Save(SaveHandle),
    Rank(SaveHandle<(Receipt, SaveReport)>),
}

impl SaveJob {
    fn new(handle: Handle) -> Self {
        Self { handle: Some(handle), receipt: OnceLock::new(), process: std::process::id() }
    }

    fn handle(&self) -> &Handle {
        self.handle.as_ref().expect("only `drop` takes it")
    }

    fn job(&self) -> &Arc<Job> {
        match self.handle() {
            Handle::Save(handle) => handle.job(),
            Handle::Rank(handle) => handle.job(),
        }
    }

    fn take(&self) -> Option<Result<SaveReport>> {
        match self.handle() {
            Handle::Save(handle) => handle.take(),
            Handle::Rank(handle) => handle.take().map(|ended| {
                ended.map(|(receipt, report)| {
                    let _ = self.receipt.set(receipt);
                    report
                })
            }),
        }
    }
}

#[pymethods]
impl SaveJob {
    fn staged(&self) -> bool {
        self.job().staged()
    }

    fn done(&self) -> bool {
        self.job().ended()
    }

    #[pyo3(signature = (timeout=None))]
    fn wait_staged(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        until(py, timeout, |slice| self.job().wait_staged(Some(slice)))
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        until(py, timeout, |slice| self.job().wait_ended(Some(slice)))
    }

    fn result(&self) -> PyResult<String> {
        match self.take() {
            Some(Ok(report)) => crate::to_json(&report),
            Some(Err(error)) => Err(to_python(error)),
            None => Err(to_python(Error::invalid("the save has not ended, or was asked already"))),
        }
    }

    /// What the coordinator needs of a rank's part, once `result` has given its report.
    fn receipt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let none = || to_python(Error::invalid("there is no receipt: ask for the result first"));
        let receipt = self.receipt.get().ok_or_else(none)?;
        Ok(PyBytes::new(py, &py.detach(|| receipt.encode()).map_err(to_python)?))
    }

    fn progress(&self) -> (u64, u64, u64) {
        let progress = self.job().progress();
        (progress.staged, progress.written, progress.total)
    }

    fn cancel(&self) {
        self.job().cancel();
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
            let (info, source) = tensor(spec)?;
            dict.source(info, Box::new(source));
        }
        let tree = RawValue::from_string(state)
            .map_err(|e| Error::invalid(format!("the state's tree is no JSON: {e}")))?;
        dict.set_tree(tree);
        ringstow::save_async(dict, path, &config)
    };
    Ok(SaveJob::new(Handle::Save(start().map_err(to_python)?)))
}

/// Starts writing one rank's part of a checkpoint and returns at once.
#[pyfunction]
pub(crate) fn start_write(
    items: Vec<ItemSpec>,
    path: PathBuf,
    rank: u32,
    config: &str,
) -> PyResult<SaveJob> {
    let config = crate::config(config)?;
    let start = || -> Result<_> {
        let mut dict = StateDict::new();
        for (name, dtype, sizes, strides, address, nbytes, shape, offsets, object) in items {
            let (info, source) = tensor((name, dtype, sizes, strides, address, nbytes))?;
            let part = match (shape, offsets) {
                (Some(shape), Some(offsets)) => Some(Part { shape, offsets }),
                _ => None,
            };
            dict.item(Item { info, part, object }, Box::new(source));
        }
        ringstow::write_rank_async(dict, rank, path, &config)
    };
    Ok(SaveJob::new(Handle::Rank(start().map_err(to_python)?)))
}

/// What is to be saved of a tensor, and its bytes.
fn tensor(spec: TensorSpec) -> Result<(TensorInfo, Strided)> {
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
    Ok((info, source))
}
