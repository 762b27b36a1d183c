//! Saves: tensors as addresses, values as JSON.

use crate::error::to_python;
use crate::exit::{End, note, refuse_late};
use crate::lazy::Raised;
use crate::tensors::{Memory, Tensors, watch};
use crate::wait::until;
use crate::watch::Watch;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringstow::internals::device::cuda::Ready;
use ringstow::{
    Base, Config, Error, Item, Job, Metrics, Receipt, Region, Result, SaveHandle, SaveReport,
    StateDict,
};
use serde_json::value::RawValue;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};

/// What a rank writes: the name of a tensor or object, where its bytes are, which region they are of a tensor (its
/// shape and the region's offsets; none: all of it), and whether it is an object.
type ItemSpec = (String, Memory, Option<(Vec<u64>, Vec<u64>)>, bool);

/// The base of a save: its path (none: only hash), whether the save goes on without it if it cannot be opened, and whether
/// its files are linked.
type BaseSpec = (Option<PathBuf>, bool, bool);

/// Sets which parts get files of their own, and from where files are taken over.
fn set_aside(dict: &mut StateDict<'_>, apart: Vec<String>, base: Option<BaseSpec>) {
    for name in apart {
        dict.droppable(name);
    }
    if let Some((path, is_optional, links)) = base {
        let base = path.map_or_else(Base::none, Base::at);
        let base = if is_optional { base.or_none() } else { base };
        dict.base(if links { base } else { base.rewritten() });
    }
}

/// A save in the background.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct SaveJob {
    /// Taken only by `drop`.
    handle: Option<Handle>,
    /// What the coordinator needs of this rank, once the job has ended.
    receipt: OnceLock<Receipt>,
    raised: Raised,
    /// The process that runs it: a forked child has the object, but not the threads.
    process: u32,
}

/// A whole checkpoint, or a rank's part of one.
pub(crate) enum Handle {
    Save(SaveHandle),
    Rank(SaveHandle<(Receipt, SaveReport)>),
}

impl SaveJob {
    /// Starts a save, of tensors whose loading puts what it raises into the `Raised` that `start` gets.
    pub(crate) fn start(
        py: Python<'_>,
        config: &str,
        start: impl FnOnce(&Config, &Raised) -> Result<Handle>,
    ) -> PyResult<Self> {
        refuse_late("start a save")?;
        let (config, raised) = (crate::config(config)?, Raised::default());
        let handle = Some(start(&config, &raised).map_err(to_python)?);
        let job = Self { handle, receipt: OnceLock::new(), raised, process: std::process::id() };
        note(py, job.job(), End::Wait);
        Ok(job)
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

    #[pyo3(signature = (timeout=None, *, logs=true))]
    fn wait_staged(&self, py: Python<'_>, timeout: Option<f64>, logs: bool) -> PyResult<bool> {
        until(py, timeout, logs, |slice| self.job().wait_staged(Some(slice)))
    }

    #[pyo3(signature = (timeout=None, *, logs=true))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, logs: bool) -> PyResult<bool> {
        until(py, timeout, logs, |slice| self.job().wait_ended(Some(slice)))
    }

    fn result(&self) -> PyResult<String> {
        match self.take() {
            Some(Ok(report)) => crate::to_json(&report),
            Some(Err(error)) => {
                let raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner).take();
                Err(raised.unwrap_or_else(|| to_python(error)))
            }
            None => Err(to_python(Error::invalid("the save has not ended, or was asked already"))),
        }
    }

    /// What the coordinator needs of a rank's part, once `result` has given its report.
    fn receipt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let none = || to_python(Error::invalid("there is no receipt: ask for the result first"));
        let receipt = self.receipt.get().ok_or_else(none)?;
        Ok(PyBytes::new(py, &py.detach(|| receipt.encode())))
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
        if std::process::id() != self.process {
            // Its thread is the parent's: joining it here would wait for ever.
            return std::mem::forget(self.handle.take());
        }
        // One that has not ended was interrupted by Ctrl-C before anybody held it: nobody would wait for
        // it before changing the tensors.
        let job = self.job().clone();
        job.cancel();
        let handle = self.handle.take();
        let end = || {
            job.wait_ended(None); // the tensors are Python's
            drop(handle);
        };
        Python::attach(|py| py.detach(end));
    }
}

/// Checks the number of metrics, and the length of their names.
#[pyfunction]
pub(crate) fn check_metrics(metrics: Metrics) -> PyResult<()> {
    StateDict::new().metrics(metrics).map(drop).map_err(to_python)
}

/// Starts a save and returns at once.
#[pyfunction]
#[pyo3(signature = (tensors, state, path, config, noted=(None, Metrics::new()), *, apart=Vec::new(), base=None, only_new=false))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn start_save(
    tensors: &Bound<'_, Tensors>,
    state: String,
    path: PathBuf,
    config: &str,
    noted: (Option<u64>, Metrics),
    apart: Vec<String>,
    base: Option<BaseSpec>,
    only_new: bool,
) -> PyResult<SaveJob> {
    SaveJob::start(tensors.py(), config, |config, raised| {
        let mut dict = tensors.borrow_mut().take(tensors.py(), &path, raised)?;
        let tree = RawValue::from_string(state)
            .map_err(|e| Error::invalid(format!("the state's tree is not JSON: {e}")))?;
        dict.set_tree(tree);
        let (step, metrics) = noted;
        if let Some(step) = step {
            dict.step(step);
        }
        dict.metrics(metrics)?;
        set_aside(&mut dict, apart, base);
        if only_new {
            dict.only_new();
        }
        ringstow::Store::new(config.clone())?.save_async(dict, path).map(Handle::Save)
    })
}

/// Starts writing the weights of a model as Hugging Face's programs read them, and returns at once.
#[pyfunction]
pub(crate) fn start_export(
    tensors: &Bound<'_, Tensors>,
    path: PathBuf,
    config: &str,
) -> PyResult<SaveJob> {
    SaveJob::start(tensors.py(), config, |config, raised| {
        let dict = tensors.borrow_mut().take(tensors.py(), &path, raised)?;
        ringstow::Store::new(config.clone())?.export_async(dict, path).map(Handle::Save)
    })
}

/// Starts writing one rank's part of a checkpoint and returns at once.
#[pyfunction]
#[pyo3(signature = (items, path, rank, config, watched=None, apart=Vec::new(), base=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn start_write(
    py: Python<'_>,
    items: Vec<ItemSpec>,
    path: PathBuf,
    rank: u32,
    config: &str,
    watched: Option<&Bound<'_, Watch>>,
    apart: Vec<String>,
    base: Option<BaseSpec>,
) -> PyResult<SaveJob> {
    SaveJob::start(py, config, |config, raised| {
        let (mut dict, mut ready) = (StateDict::new(), Ready::default());
        for (name, memory, region, object) in items {
            let (spec, _) = memory.named(name)?;
            let (item, source) = spec.source(raised, &mut ready)?;
            let region = region.map(|(shape, offsets)| Region { shape, offsets });
            dict.item(Item { region, object, ..item }, source);
        }
        set_aside(&mut dict, apart, base);
        if let Some(watched) = watched {
            watch(&mut dict, watched.get().list.clone(), &path, raised);
        }
        ringstow::Store::new(config.clone())?.write_rank_async(dict, rank, path).map(Handle::Rank)
    })
}

/// Starts writing what this rank has dealt itself of a state, and returns at once.
#[pyfunction]
#[pyo3(signature = (tensors, path, rank, config, *, apart=Vec::new(), base=None))]
pub(crate) fn start_write_dealt(
    tensors: &Bound<'_, Tensors>,
    path: PathBuf,
    rank: u32,
    config: &str,
    apart: Vec<String>,
    base: Option<BaseSpec>,
) -> PyResult<SaveJob> {
    SaveJob::start(tensors.py(), config, |config, raised| {
        let mut dict = tensors.borrow_mut().take(tensors.py(), &path, raised)?;
        set_aside(&mut dict, apart, base);
        ringstow::Store::new(config.clone())?.write_rank_async(dict, rank, path).map(Handle::Rank)
    })
}
