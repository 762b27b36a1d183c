//! Where Python says that a tensor's memory is.

use pyo3::exceptions::PyOSError;
use pyo3::ffi;
use pyo3::prelude::*;
use ringstow::internals::{
    device::{
        cuda::{self, CudaSource, Device, Ready},
        host::Strided,
    },
    pipeline::runtime::Runtime,
    pool,
};
use ringstow::{Error, Result, StridedTarget, Target, TensorInfo, TensorSource};
use smallvec::{SmallVec, smallvec};
use std::ffi::c_int;

/// An address of host memory; or one on a GPU, the GPU's number, and the stream on which it is ready.
#[derive(FromPyObject, IntoPyObject, Clone, Copy)]
pub(crate) enum Address {
    Host(usize),
    Cuda(u64, u32, usize),
}

impl Address {
    /// The address so many bytes further on.
    pub(crate) fn moved(self, bytes: isize) -> Self {
        match self {
            Self::Host(at) => Self::Host(at.wrapping_add_signed(bytes)),
            Self::Cuda(at, gpu, stream) => {
                Self::Cuda(at.wrapping_add_signed(bytes as i64), gpu, stream)
            }
        }
    }
}

/// A tensor to save, with strides in bytes (none: dense).
///
/// # Safety
/// All of its elements are readable, and not written to, until this is dropped.
pub(crate) unsafe fn source(
    info: &TensorInfo,
    strides: Option<Vec<isize>>,
    address: Address,
    ready: &mut Ready,
) -> Result<TensorSource<'static>> {
    match address {
        // SAFETY: the caller's promise.
        Address::Host(address) => Ok(Box::new(unsafe { strided(info, strides, address)? }).into()),
        Address::Cuda(base, gpu, stream) => {
            let (item, dims) = layout(info, strides.as_deref())?;
            let layout = (item, dims.as_slice(), strides.as_deref());
            // SAFETY: the caller's promise.
            Ok(unsafe { CudaSource::new((gpu, base), layout, stream, ready)? }.into())
        }
    }
}

/// A tensor in host memory, with strides in bytes (none: dense).
///
/// # Safety
/// As for [`source`].
pub(crate) unsafe fn strided(
    info: &TensorInfo,
    strides: Option<Vec<isize>>,
    address: usize,
) -> Result<Strided> {
    let (item, dims) = layout(info, strides.as_deref())?;
    // SAFETY: the caller's promise.
    Ok(unsafe { Strided::new(address as *const u8, item, &dims, strides.as_deref()) })
}

/// Bytes of an element and the shape. A dense tensor is its bytes.
fn layout(info: &TensorInfo, strides: Option<&[isize]>) -> Result<(usize, SmallVec<[usize; 4]>)> {
    let wrong = |what: &str| Error::invalid(format!("tensor {:?}: {what}", info.name));
    let Some(strides) = strides else { return Ok((1, smallvec![info.nbytes()? as usize])) };
    let dims: SmallVec<[usize; 4]> = info.shape.iter().map(|&dim| dim as usize).collect();
    if strides.len() != dims.len() {
        return Err(wrong("it needs one stride a dimension"));
    }
    match info.dtype.bits() {
        bits if bits >= 8 => Ok(((bits / 8) as usize, dims)),
        _ => Err(wrong("elements of less than a byte must be dense")),
    }
}

/// `nbytes` of memory to load into.
///
/// # Safety
/// They are writable, and used by nobody else, until this is dropped.
pub(crate) unsafe fn target<'a>(
    address: Address,
    nbytes: usize,
    ready: &mut Ready,
) -> Result<Target<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        match address {
            Address::Host(address) => Ok(Target::from_raw(address as *mut u8, nbytes)),
            Address::Cuda(base, gpu, stream) => Target::cuda((gpu, base), nbytes, stream, ready),
        }
    }
}

/// A tensor to load into, with strides in bytes.
///
/// # Safety
/// As for [`target`], of its elements.
pub(crate) unsafe fn strided_target<'a>(
    address: Address,
    strides: Vec<isize>,
    ready: &mut Ready,
) -> Result<StridedTarget<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        match address {
            Address::Host(address) => Ok(StridedTarget::from_raw(address as *mut u8, strides)),
            Address::Cuda(base, gpu, stream) => {
                StridedTarget::cuda((gpu, base), strides, stream, ready)
            }
        }
    }
}

/// Memory for copies of tensors. With the last reference to this it is kept for the next copies.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct CopyMemory {
    memory: pool::CopyMemory,
}

/// What keeps a copy's memory registered with CUDA, or why it is not.
type Pinned = std::result::Result<Vec<cuda::Pin>, String>;

#[pymethods]
impl CopyMemory {
    #[new]
    pub(crate) fn new(nbytes: usize) -> PyResult<Self> {
        let memory = pool::CopyMemory::take(nbytes).map_err(|error| {
            PyOSError::new_err((
                error.raw_os_error(),
                format!(
                    "{error}: a copy of the state needs {nbytes} bytes of memory. Free some, raise the process's limit \
                     (`ulimit -v`), or stage without a copy"
                ),
            ))
        })?;
        Runtime::watch_memory();
        Ok(Self { memory })
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.len()
    }

    #[getter]
    fn address(&self) -> usize {
        self.at(0)
    }

    /// Registers the memory with CUDA, `piece` bytes at a time, the first time. Returns why it is not registered.
    fn pin(&self, py: Python<'_>, piece: usize) -> Option<String> {
        py.detach(|| {
            let mapping = self.memory.mapping();
            let pin = |at: usize| {
                let (start, len) = (mapping.as_ptr().wrapping_add(at), mapping.len() - at);
                let device = Device::get(0)?;
                // SAFETY: the pins are attached to the mapping, and dropped before the memory is unmapped.
                unsafe { cuda::Pin::new(&device, start, len.min(piece), piece) }
            };
            let pins = || -> Result<Vec<cuda::Pin>> {
                (0..mapping.len()).step_by(piece).map(pin).collect()
            };
            let pinned: &Pinned = mapping.attachment(|| pins().map_err(|error| error.to_string()));
            pinned.as_ref().err().cloned()
        })
    }

    /// Has the memory returned to the system with the last reference to this.
    fn discard(&self) {
        self.memory.discard();
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
        let memory = slf.get();
        let start = memory.at(0) as *mut u8;
        // SAFETY: the memory is there as long as `slf`, which the view holds. No Rust reference is in use: `slice` is called
        // only before Python has the object.
        unsafe { crate::memory::fill_view(slf.as_any(), view, (start, memory.len()), flags) }
    }
}

impl CopyMemory {
    pub(crate) fn len(&self) -> usize {
        self.memory.mapping().len()
    }

    /// The address of the byte at an offset.
    pub(crate) fn at(&self, offset: usize) -> usize {
        let mapping = self.memory.mapping();
        assert!(offset <= mapping.len());
        mapping.as_ptr() as usize + offset
    }

    /// Some of the bytes.
    ///
    /// # Safety
    /// Nobody else uses them as long as the slice is there.
    #[allow(clippy::mut_from_ref)] // that nobody else has these bytes is the caller's promise
    pub(crate) unsafe fn slice(&self, offset: usize, len: usize) -> &mut [u8] {
        let mapping = self.memory.mapping();
        assert!(offset.checked_add(len).is_some_and(|end| end <= mapping.len()));
        // SAFETY: within the mapping, whose bytes are initialised from the start; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(mapping.as_ptr().add(offset), len) }
    }
}

/// The GPUs that there are, in JSON: `[{"ordinal": 0, "name": "NVIDIA H200"}]`. Starts nothing on them.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<String> {
    let found = py.detach(Device::list).map_err(crate::error::to_python)?;
    crate::to_json(&found)
}
