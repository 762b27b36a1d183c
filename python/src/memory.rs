//! The memory of loaded tensors: whose it is, and when it returns to the system.

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use ringstow::LoadedTensor;
use ringstow::internals::{pool::Mapping, store::MappedTensor};
use std::collections::HashMap;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// The unit in which the memory of small tensors is released: a huge page. A system call for each small tensor would
/// take huge pages apart, and take longer than the load.
const UNIT: usize = 2 << 20;
/// A tensor of this size releases its own pages at once.
const LARGE: usize = 64 << 10;

/// The memory of all tensors of a shard. Nobody uses it before the load has ended.
pub(crate) struct Arena {
    address: usize,
    /// Set once the load has ended. Without it the load has failed, and nobody ever uses the memory.
    mapping: OnceLock<Arc<Mapping>>,
    /// How many tensors have bytes in each unit.
    tensors: Vec<AtomicU32>,
}

/// The bytes of one tensor in an arena.
pub(crate) struct Bytes {
    arena: Arc<Arena>,
    range: Range<usize>,
}

/// The arenas of tensors that are yet to be loaded, by their addresses.
pub(crate) struct Arenas(HashMap<usize, Arc<Arena>>);

impl Arenas {
    /// The arenas of tensors that have these bytes in the mapping at an address.
    pub(crate) fn of<'a>(tensors: impl Iterator<Item = (usize, &'a Range<usize>)>) -> Self {
        let mut counts: HashMap<usize, Vec<u32>> = HashMap::new();
        for (address, range) in tensors {
            let counts = counts.entry(address).or_default();
            if !range.is_empty() {
                let units = units(range);
                counts.resize(counts.len().max(units.end), 0);
                counts[units].iter_mut().for_each(|count| *count += 1);
            }
        }
        let arena = |(address, counts): (usize, Vec<u32>)| {
            let tensors = counts.into_iter().map(AtomicU32::new).collect();
            (address, Arc::new(Arena { address, mapping: OnceLock::new(), tensors }))
        };
        Self(counts.into_iter().map(arena).collect())
    }

    /// The bytes of one of the tensors.
    pub(crate) fn bytes(&self, address: usize, range: Range<usize>) -> Bytes {
        Bytes { arena: self.0[&address].clone(), range }
    }

    /// Notes that the load has ended.
    pub(crate) fn keep(&self, loaded: &[LoadedTensor]) {
        for tensor in loaded {
            self.0[&address_of(tensor)].mapping.get_or_init(|| tensor.arena.clone());
        }
    }
}

fn address_of(tensor: &LoadedTensor) -> usize {
    tensor.arena.as_ptr() as usize
}

/// The units that a range which is not empty has bytes in.
fn units(range: &Range<usize>) -> Range<usize> {
    range.start / UNIT..range.end.div_ceil(UNIT)
}

impl Bytes {
    pub(crate) fn address(&self) -> usize {
        self.arena.address + self.range.start
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let Self { arena, range } = self;
        if range.start == range.end {
            return;
        }
        let release = |range: Range<usize>| {
            if let Some(mapping) = arena.mapping.get() {
                let end = range.end.min(mapping.len());
                // SAFETY: no tensor is left that has bytes in the range.
                unsafe { mapping.release(range.start, end.saturating_sub(range.start)) };
            }
        };
        if range.len() >= LARGE {
            release(range.clone());
        }
        for unit in units(range) {
            if arena.tensors[unit].fetch_sub(1, Ordering::AcqRel) == 1 {
                release(unit * UNIT..(unit + 1) * UNIT);
            }
        }
    }
}

/// The bytes of tensors that have been loaded, in their order.
pub(crate) fn bytes_of(loaded: &[LoadedTensor]) -> Vec<Bytes> {
    let arenas = Arenas::of(loaded.iter().map(|tensor| (address_of(tensor), &tensor.range)));
    arenas.keep(loaded);
    loaded.iter().map(|tensor| arenas.bytes(address_of(tensor), tensor.range.clone())).collect()
}

/// One tensor's bytes, writable, for Python.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Block(Held);

/// Where the bytes are.
enum Held {
    Loaded(Bytes),
    Mapped(MappedTensor),
}

impl Block {
    /// The address and the length.
    fn place(&self) -> (usize, usize) {
        match &self.0 {
            Held::Loaded(bytes) => (bytes.address(), bytes.len()),
            Held::Mapped(tensor) => {
                (tensor.file.address() + tensor.range.start, tensor.range.len())
            }
        }
    }
}

impl From<Bytes> for Block {
    fn from(bytes: Bytes) -> Self {
        Self(Held::Loaded(bytes))
    }
}

impl From<MappedTensor> for Block {
    fn from(tensor: MappedTensor) -> Self {
        Self(Held::Mapped(tensor))
    }
}

#[pymethods]
impl Block {
    #[getter]
    fn nbytes(&self) -> usize {
        self.place().1
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
        let (address, len) = slf.get().place();
        // SAFETY: the bytes are this block's alone (a manifest with overlapping tensors is refused), which keeps the arena or
        // the mapping. What other programs do to a mapped file, `FileMapping` says.
        unsafe { fill_view(slf.as_any(), view, (address as *mut u8, len), flags) }
    }
}

/// Fills in a view of the writable bytes of an object, to which it holds a reference.
///
/// # Safety
/// The bytes are there as long as the object, and no Rust reference to them is in use.
pub(crate) unsafe fn fill_view(
    object: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    (start, len): (*mut u8, usize),
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("the view is null"));
    }
    let len = len as ffi::Py_ssize_t;
    // SAFETY: the caller's promise.
    match unsafe { ffi::PyBuffer_FillInfo(view, object.as_ptr(), start.cast(), len, 0, flags) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(object.py())),
    }
}
