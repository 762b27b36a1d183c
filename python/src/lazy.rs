//! Tensors whose bytes Python loads when they are written.

use crate::place::strided;
use pyo3::prelude::*;
use ringstow::internals::device::host::Strided;
use ringstow::{Error, Result, Source, TensorInfo};
use std::sync::{Arc, Mutex, PoisonError};

/// The first exception that loading a tensor raised: the save's outcome, in place of the error that
/// stands for it on the Rust side.
pub(crate) type Raised = Arc<Mutex<Option<PyErr>>>;

/// A tensor that is asked for once, when its first byte is needed, and let go with its last: extra
/// memory is the tensors being copied at the time.
pub(crate) struct Lazy {
    info: TensorInfo,
    nbytes: usize,
    /// Gives strides in bytes (none: dense), address, and what keeps the memory.
    load: Py<PyAny>,
    loaded: Mutex<Loaded>,
    raised: Raised,
}

#[derive(Default)]
struct Loaded {
    memory: Option<Arc<Memory>>,
    /// Bytes of it that were read.
    used: usize,
}

struct Memory {
    source: Strided,
    owner: Option<Py<PyAny>>,
}

impl Drop for Memory {
    /// At once: what is dropped without the GIL waits for whoever takes it next.
    fn drop(&mut self) {
        let owner = self.owner.take();
        Python::attach(|_| drop(owner));
    }
}

impl Lazy {
    pub(crate) fn new(info: TensorInfo, nbytes: u64, load: Py<PyAny>, raised: Raised) -> Self {
        Self { info, nbytes: nbytes as usize, load, loaded: Mutex::default(), raised }
    }

    fn memory(&self) -> Result<Arc<Memory>> {
        // Whoever waits here waits without the GIL: this is a thread of the save's.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &loaded.memory {
            return Ok(memory.clone());
        }
        let memory = Arc::new(Python::attach(|py| self.load(py))?);
        loaded.memory = Some(memory.clone());
        Ok(memory)
    }

    fn load(&self, py: Python<'_>) -> Result<Memory> {
        type Loaded = (Option<Vec<isize>>, usize, Py<PyAny>);
        let loaded = self.load.call0(py).and_then(|loaded| loaded.extract::<Loaded>(py));
        let (strides, address, owner) = loaded.map_err(|error| {
            let name = &self.info.name;
            let said = Error::invalid(format!("tensor {name:?} could not be loaded: {error}"));
            self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            said
        })?;
        // SAFETY: the caller, `ringstow._state.tree._encode`, took the address from a live tensor of this dtype and
        // shape, which `owner` keeps alive.
        let source = unsafe { strided(&self.info, strides, address)? };
        Ok(Memory { source, owner: Some(owner) })
    }

    fn used(&self, bytes: usize) {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.used += bytes;
        if loaded.used >= self.nbytes {
            *loaded = Loaded::default();
        }
    }
}

impl Source for Lazy {
    fn nbytes(&self) -> u64 {
        self.nbytes as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let memory = self.memory()?;
        memory.source.copy(offset, to);
        drop(memory);
        self.used(to.len());
        Ok(())
    }
}
