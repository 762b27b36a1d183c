//! A tensor in a GPU's memory.

use super::copies::{Copies, RowCopy};
use super::device::{Device, Direction, Ready, ReadyEvent, StreamHandle};
use super::pieces::{Rows, pieces};
use crate::device::layout::Layout;
use crate::error::{Error, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use std::ops::Deref;
use std::sync::Arc;

/// A tensor in a GPU's memory: an address there, a shape, strides of any kind, and the event after
/// which it may be copied.
pub struct CudaSource<'a> {
    base: u64,
    layout: Layout,
    ready_event: Arc<ReadyEvent>,
    /// What keeps the memory.
    _owner: Box<dyn Send + Sync + 'a>,
}

impl CudaSource<'static> {
    /// A tensor of `shape` at `base` on the GPU of number `ordinal`, with strides in bytes (`None`:
    /// dense, row-major) and elements of `item` bytes, ready when what is on `stream` now has ended.
    /// `ready` is one for all tensors of a save.
    ///
    /// # Safety
    /// The stream is one of that GPU's primary context. All of the tensor's elements are there,
    /// and no work that is put on any stream from now on writes to them, until this is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver that can be used, or for a stream that is being
    /// captured into a CUDA graph; [`Error::Gpu`] when the driver refuses.
    pub unsafe fn new(
        (ordinal, base): (u32, u64),
        (item, shape, strides): (usize, &[usize], Option<&[isize]>),
        stream: StreamHandle,
        ready: &mut Ready,
    ) -> Result<Self> {
        let layout = Layout::new(item, shape, strides);
        // SAFETY: the same contract.
        let ready_event = unsafe { ready.event(ordinal, stream) }?;
        Ok(Self { base, layout, ready_event, _owner: Box::new(()) })
    }
}

impl<'a> CudaSource<'a> {
    /// The same, which also keeps `owner`.
    pub(super) fn keeping(self, owner: impl Send + Sync + 'a) -> Self {
        Self { _owner: Box::new(owner), ..self }
    }

    /// The elements of a slice of cudarc's, borrowed or shared (`&CudaSlice`, `Arc<CudaSlice>`), as
    /// they are when what is on the slice's stream now has ended.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a slice of another context than the GPU's primary one, or whose
    /// stream is being captured into a CUDA graph; [`Error::Gpu`] when the driver refuses.
    pub fn of_slice<T: 'a>(
        slice: impl Deref<Target = CudaSlice<T>> + Send + Sync + 'a,
    ) -> Result<Self> {
        let (ordinal, stream) = (primary_ordinal(&slice)?, slice.stream());
        let layout = Layout::new(1, &[slice.num_bytes()], None);
        // Has the slice's stream wait for who writes to it on another, as far as cudarc knows.
        let (base, _reading) = slice.device_ptr(stream);
        // SAFETY: the stream is of the primary context, and lives with the slice.
        let ready_event = unsafe { Ready::default().event(ordinal, stream.cu_stream() as usize) }?;
        drop(_reading);
        Ok(Self { base, layout, ready_event, _owner: Box::new(slice) })
    }

    /// Bytes of the dense data.
    pub fn nbytes(&self) -> u64 {
        self.layout.nbytes() as u64
    }

    /// The GPU that has it.
    pub(crate) fn device(&self) -> &Arc<Device> {
        self.ready_event.device()
    }

    /// Orders copies of dense bytes, from `offset` on, into host memory.
    ///
    /// # Safety
    /// `len` bytes at `to` are writable, and nobody else's, until `copies` is dropped; so is this
    /// kept until then.
    pub(crate) unsafe fn order(&self, offset: usize, to: *mut u8, len: usize, copies: &mut Copies) {
        let mut reorders = Vec::new();
        let mut filled = 0;
        let copy = |rows: Rows| {
            let Rows { at, width, pitch, height } = rows;
            let host = to.wrapping_add(filled);
            let device = self.base.wrapping_add_signed(at as i64);
            filled += width * height;
            let copy =
                RowCopy { device, device_pitch: pitch, host, host_pitch: width, width, height };
            // SAFETY: the tensor's own bytes on one side; on the other, as many of the caller's.
            unsafe { copies.order(&self.ready_event, Direction::ToHost, copy) };
        };
        pieces(&self.layout, offset, len, copy, |reorder| reorders.push(reorder));
        for reorder in reorders {
            // SAFETY: a run of the caller's bytes.
            unsafe { copies.reorder(to.wrapping_add(reorder.start), reorder) };
        }
    }
}

/// The number of the GPU that has a slice of cudarc's.
///
/// # Errors
/// [`Error::Unsupported`] for a slice of another context than the primary one.
pub(crate) fn primary_ordinal<T>(slice: &CudaSlice<T>) -> Result<u32> {
    let context = slice.context();
    if context.is_primary() {
        return Ok(context.ordinal() as u32);
    }
    Err(Error::Unsupported {
        what: "the slice belongs to a CUDA context of its own".into(),
        remedy: "allocate it in the primary context: CudaContext::new".into(),
    })
}

impl std::fmt::Debug for CudaSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.ready_event.device();
        f.debug_struct("CudaSource").field("device", device).field("layout", &self.layout).finish()
    }
}
