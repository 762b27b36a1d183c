//! An opened checkpoint, and its loads.

use crate::error::to_python;
use crate::memory::{Block, bytes_of};
use crate::place::{Address, strided_target, target};
use crate::{to_json, wait};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use ringstow::internals::{
    device::cuda::Ready,
    format::select::{self, Wanted},
    pipeline::Arrivals,
};
use ringstow::{
    CheckpointKind, Chunk, Config, Job, LoadOptions, OpenOptions, Result, Runtime, Slice, Switch,
    Target, TensorEntry,
};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// A box of a chunk and its memory: name, number of the chunk, offsets, lengths, address, strides.
#[derive(FromPyObject)]
struct SliceSpec(String, usize, Vec<u64>, Vec<u64>, Address, Vec<isize>);

impl SliceSpec {
    fn slice(&self, ready: &mut Ready) -> Result<Slice<'_>> {
        let Self(name, chunk, offsets, lengths, address, strides) = self;
        // SAFETY: the caller of `read` took address and strides from a live tensor that has at
        // least the box's elements, and keeps it alive and to itself for the length of that call.
        let to = unsafe { strided_target(*address, strides.clone(), ready) }?;
        Ok(Slice { name, chunk: *chunk, offsets, lengths, to })
    }
}

/// Name, dtype, shape and bytes of a tensor.
fn row_of<'py>(py: Python<'py>, tensor: &TensorEntry) -> PyResult<Bound<'py, PyAny>> {
    let shape = PyTuple::new(py, &tensor.shape)?;
    let row = (tensor.name.as_str(), tensor.dtype.name(), shape, tensor.nbytes());
    Ok(row.into_pyobject(py)?.into_any())
}

/// Offsets and sizes of a tensor's chunks.
fn chunks_of<'py>(py: Python<'py>, tensor: &TensorEntry) -> PyResult<Bound<'py, PyList>> {
    let origin = vec![0; tensor.shape.len()];
    let extent = |chunk: &Chunk| {
        let offsets = PyTuple::new(py, chunk.offsets().unwrap_or(&origin))?;
        let sizes = PyTuple::new(py, chunk.sizes().unwrap_or(&tensor.shape))?;
        Ok((offsets, sizes).into_pyobject(py)?.into_any())
    };
    let chunks: PyResult<Vec<Bound<'py, PyAny>>> = tensor.chunks.iter().map(extent).collect();
    PyList::new(py, chunks?)
}

/// An opened checkpoint.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Checkpoint {
    pub(crate) inner: ringstow::Checkpoint,
    config: Config,
    verify: bool,
    progress: Option<wait::Progress>,
    /// Whether loads read through the page cache.
    through_cache: AtomicBool,
    /// What other ranks read and send.
    arrivals: Mutex<Option<Arc<Arrivals>>>,
}

impl Checkpoint {
    /// The pool and engines of a load that reads through the page cache; `None`: those of the configuration.
    fn runtime(&self) -> Result<Option<Arc<Runtime>>> {
        let through_cache = self.through_cache.load(Relaxed);
        let config = || Config { direct: Switch::Off, ..self.config.clone() };
        through_cache.then(|| Runtime::shared(&config())).transpose()
    }

    fn arrivals(&self) -> Option<Arc<Arrivals>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn options<'a>(
        &self,
        job: &'a Arc<Job>,
        runtime: Option<&'a Runtime>,
        arrivals: Option<&'a Arrivals>,
    ) -> LoadOptions<'a> {
        let defaults = LoadOptions::default();
        LoadOptions { verify: self.verify, runtime, job: Some(job), arrivals, ..defaults }
    }

    /// Runs a load on a thread of its own.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        load: impl FnOnce(LoadOptions<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let job = Job::of(&self.config);
        wait::run(py, &job, self.progress.as_ref(), |job| {
            let (runtime, arrivals) = (self.runtime()?, self.arrivals());
            load(self.options(job, runtime.as_deref(), arrivals.as_deref()))
        })
    }

    /// The same, and on this thread `beside` with what `load` sends.
    pub(crate) fn run_beside<T: Send, M: Send>(
        &self,
        py: Python<'_>,
        load: impl FnOnce(LoadOptions<'_>, Sender<M>) -> Result<T> + Send,
        beside: impl FnOnce(M) -> PyResult<()>,
    ) -> PyResult<T> {
        let job = Job::of(&self.config);
        let load = |job: &Arc<Job>, send| {
            let (runtime, arrivals) = (self.runtime()?, self.arrivals());
            load(self.options(job, runtime.as_deref(), arrivals.as_deref()), send)
        };
        wait::run_beside(py, &job, self.progress.as_ref(), load, beside)
    }

    /// Loads into dense memory: tensors' names, addresses and bytes.
    pub(crate) fn fill_targets<'a>(
        &self,
        py: Python<'_>,
        targets: impl Iterator<Item = (&'a str, Address, usize)>,
    ) -> PyResult<String> {
        let mut ready = Ready::default();
        let place = |(name, address, nbytes)| {
            // SAFETY: the caller, `ringstow._reading`, took the address from a live, dense tensor of
            // this size and keeps it alive and to itself for the length of this call.
            Ok((name, unsafe { target(address, nbytes, &mut ready) }?))
        };
        let targets: Result<Vec<(&str, Target)>> = targets.map(place).collect();
        let targets = targets.map_err(to_python)?;
        to_json(&self.run(py, |options| self.inner.load_into(&targets, options))?)
    }
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (path, config, *, copies = Vec::new(), foreign = false, damaged = false, verify = true, progress = None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        config: &str,
        copies: Vec<PathBuf>,
        foreign: bool,
        damaged: bool,
        verify: bool,
        progress: Option<wait::Progress>,
    ) -> PyResult<Self> {
        let config = crate::config(config)?;
        let options = OpenOptions::of(&config).copies(&copies).foreign(foreign).damaged(damaged);
        let inner = py.detach(|| options.open(path)).map_err(to_python)?;
        let through_cache = AtomicBool::new(false);
        let arrivals = Mutex::default();
        Ok(Self { inner, config, verify, progress, through_cache, arrivals })
    }

    /// From now on loads read through the page cache, unless the configuration says how to read.
    fn read_through_page_cache(&self) {
        self.through_cache.store(self.config.direct == Switch::Auto, Relaxed);
    }

    /// From now on loads take from these what comes; from files alone, if there are none.
    #[pyo3(signature = (arrivals))]
    fn take_from(&self, arrivals: Option<&crate::arrivals::Arrivals>) {
        let arrivals = arrivals.map(|arrivals| arrivals.inner.clone());
        *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner) = arrivals;
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.inner.kind() {
            CheckpointKind::Ringstow => "ringstow",
            CheckpointKind::Safetensors => "safetensors",
        }
    }

    #[getter]
    fn path(&self) -> &OsStr {
        self.inner.path().as_os_str()
    }

    #[getter]
    fn stamp(&self) -> Option<String> {
        self.inner.fingerprint()
    }

    #[getter]
    fn state(&self) -> &str {
        self.inner.manifest().state.get()
    }

    #[getter]
    fn dropped(&self) -> Vec<String> {
        self.inner.manifest().dropped.clone()
    }

    /// The part of the tree that a load needs, or more.
    #[pyo3(signature = (prefix, names))]
    fn part_of_state(
        &self,
        py: Python<'_>,
        prefix: Option<String>,
        names: Option<Vec<String>>,
    ) -> PyResult<String> {
        let state = &self.inner.manifest().state;
        let wanted = match (prefix, names) {
            (Some(prefix), _) => Wanted::Below(prefix),
            (None, Some(names)) => Wanted::names(names),
            (None, None) => return Ok(state.get().to_owned()),
        };
        py.detach(|| select::cut(state, &wanted))
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The tensor of a name.
    fn tensor<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner.tensor(name).map(|tensor| row_of(py, tensor)).transpose()
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.inner.tensors().iter().map(|tensor| row_of(py, tensor)).collect()
    }

    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let describe = |tensor: &TensorEntry| {
            let shape = PyTuple::new(py, &tensor.shape)?;
            let chunks = chunks_of(py, tensor)?;
            let name = tensor.name.as_str();
            let holes = tensor.holes();
            let row = (name, tensor.dtype.name(), shape, tensor.object, chunks, holes);
            Ok(row.into_pyobject(py)?.into_any())
        };
        let rows: PyResult<Vec<_>> = self.inner.tensors().iter().map(describe).collect();
        PyList::new(py, rows?)
    }

    /// Why not all of it can be loaded, if that is known without reading the files.
    #[getter]
    fn problem(&self) -> Option<String> {
        self.inner.check_files().err().map(|error| error.to_string())
    }

    #[getter]
    fn info(&self) -> PyResult<String> {
        to_json(&self.inner.info())
    }

    fn chunks<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyList>> {
        let Some(tensor) = self.inner.tensor(name) else {
            return Err(PyKeyError::new_err(name.to_owned()));
        };
        chunks_of(py, tensor)
    }

    /// Reads and checks the tensors of these names; those that are damaged, in JSON.
    fn damaged(&self, py: Python<'_>, names: Vec<String>) -> PyResult<String> {
        to_json(&self.run(py, |options| self.inner.damaged(&names, options))?)
    }

    fn check_whole(&self, names: Vec<String>) -> PyResult<()> {
        self.inner.check_coverage(names).map_err(to_python)
    }

    fn read(&self, py: Python<'_>, slices: Vec<SliceSpec>) -> PyResult<String> {
        // On this thread: the stream that a GPU's tensor is ready on may be one of its own.
        let mut ready = Ready::default();
        let slices: Result<Vec<Slice>> = slices.iter().map(|spec| spec.slice(&mut ready)).collect();
        let slices = slices.map_err(to_python)?;
        to_json(&self.run(py, |options| self.inner.read(&slices, options))?)
    }

    fn load(&self, py: Python<'_>, names: Vec<String>) -> PyResult<(Vec<Block>, String)> {
        let loaded = self.run(py, |options| self.inner.load_names(&names, options))?;
        let report = to_json(&loaded.report)?;
        let blocks = bytes_of(&loaded.into_tensors()).into_iter().map(Block::from);
        Ok((blocks.collect(), report))
    }

    /// Blocks that are views of the files, copied on write; none for tensors that must be read.
    fn map(&self, py: Python<'_>, names: Vec<String>) -> PyResult<(Vec<Option<Block>>, String)> {
        let mapped = py.detach(|| self.inner.map(&names)).map_err(to_python)?;
        let blocks = mapped.tensors.into_iter().map(|tensor| tensor.map(Block::from));
        Ok((blocks.collect(), to_json(&mapped.report)?))
    }

    fn load_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, Address, usize)>,
    ) -> PyResult<String> {
        self.fill_targets(py, targets.iter().map(|(name, at, nbytes)| (&**name, *at, *nbytes)))
    }
}
