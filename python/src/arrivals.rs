//! Parts of a checkpoint's files that the ranks of a load send each other.

use crate::error::to_python;
use crate::load::Checkpoint;
use crate::memory::fill_view;
use pyo3::ffi;
use pyo3::prelude::*;
use ringstow::internals::pipeline;
use ringstow::internals::store::ShardSource;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// A page, which O_DIRECT reads, or more.
const ROOM: usize = 4096;

/// The parts that a load expects, and those that are there.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Arrivals {
    pub(crate) inner: Arc<pipeline::Arrivals>,
    checkpoint: Py<Checkpoint>,
    direct: bool,
    sources: Mutex<HashMap<usize, Arc<ShardSource>>>,
}

#[pymethods]
impl Arrivals {
    #[new]
    fn new(
        checkpoint: Py<Checkpoint>,
        parts: Vec<(usize, u64, u64)>,
        slots: usize,
        slot_bytes: usize,
        direct: bool,
    ) -> PyResult<Self> {
        let parts = parts.into_iter().map(|(file, begin, end)| (file, begin..end)).collect();
        let slot_bytes = slot_bytes.next_multiple_of(ROOM) + ROOM;
        let inner = pipeline::Arrivals::new(parts, slots, slot_bytes)?;
        Ok(Self { inner: Arc::new(inner), checkpoint, direct, sources: Mutex::default() })
    }

    /// Memory for a part; none if there is none now, and this is not to wait for some.
    fn slot(&self, py: Python<'_>, waits: bool) -> Option<Slot> {
        let mut slot = py.detach(|| self.inner.slot(waits))?;
        let bytes = slot.bytes_mut();
        let (address, len) = (bytes.as_mut_ptr() as usize, bytes.len());
        Some(Slot { inner: Arc::new(slot), address, len })
    }

    /// Reads bytes of a file to the beginning of a slot that was not put yet.
    fn read(
        &self,
        py: Python<'_>,
        slot: &Slot,
        file: usize,
        begin: u64,
        nbytes: usize,
    ) -> PyResult<()> {
        py.detach(|| -> ringstow::Result<()> {
            let source = self.source(file)?;
            assert!(nbytes.next_multiple_of(ROOM) <= slot.len);
            // SAFETY: the slot's own bytes. The caller, `ringstow._ranks`, uses a slot in one thread at a time until it is
            // put, and nobody else before.
            let to = unsafe { std::slice::from_raw_parts_mut(slot.address as *mut u8, slot.len) };
            source.read(begin, nbytes, to).map_err(|error| source.failed(begin, error))
        })
        .map_err(to_python)
    }

    /// Says that a part is in a slot, to which nobody writes from now on.
    fn put(&self, py: Python<'_>, number: usize, slot: &Slot, own: bool) {
        let slot = slot.inner.clone();
        py.detach(|| self.inner.put(number, slot, own));
    }

    /// Says that a part does not come.
    fn lost(&self, py: Python<'_>, number: usize) {
        py.detach(|| self.inner.lost(number));
    }

    /// Says that nothing comes any more.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

impl Arrivals {
    /// A file of the checkpoint, which is opened once.
    fn source(&self, file: usize) -> ringstow::Result<Arc<ShardSource>> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = sources.get(&file) {
            return Ok(source.clone());
        }
        let source = Arc::new(self.checkpoint.get().inner.source(file, self.direct)?);
        sources.insert(file, source.clone());
        Ok(source)
    }
}

/// Memory for a part. With the last reference it is free for another.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Slot {
    inner: Arc<pipeline::Slot>,
    address: usize,
    len: usize,
}

#[pymethods]
impl Slot {
    /// The buffer protocol.
    ///
    /// # Safety
    /// Called by the interpreter alone, with a `view` to be filled in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let Self { address, len, .. } = *slf.get();
        let place = (address as *mut u8, len);
        // SAFETY: the memory is there as long as `slf`, which the view holds. Once it is put, nobody writes to it.
        unsafe { fill_view(slf.as_any(), view, place, flags) }
    }
}
