//! A tensor in loaded memory, in the form in which DLPack passes it on.

use crate::memory::Bytes;
use dlpack_ffi::{self as dl, DLDeviceType as Device};
use smallvec::SmallVec;
use std::ffi::c_void;

/// The major version of DLPack whose structs these are.
pub(crate) const MAJOR: u32 = 1;

/// A tensor in loaded memory, lent to torch.
#[repr(C)]
pub(crate) struct Lent {
    tensor: dl::DLManagedTensorVersioned,
    /// The shape, then the strides.
    dims: SmallVec<[i64; 8]>,
    _bytes: Bytes,
}

impl Lent {
    /// Makes one on the heap, in row-major order. It goes when its deleter is called.
    pub(crate) fn make(
        (code, bits): (dl::DLDataTypeCode, u8),
        shape: &[u64],
        bytes: Bytes,
    ) -> *mut dl::DLManagedTensorVersioned {
        let mut dims: SmallVec<[i64; 8]> = shape.iter().map(|&dim| dim as i64).collect();
        dims.resize(2 * shape.len(), 1);
        for dim in (1..shape.len()).rev() {
            dims[shape.len() + dim - 1] = dims[shape.len() + dim] * dims[dim];
        }
        let tensor = dl::DLManagedTensorVersioned {
            version: dl::DLPackVersion { major: MAJOR, minor: 0 },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(Self::end),
            flags: 0,
            dl_tensor: dl::DLTensor {
                data: bytes.address() as *mut c_void,
                device: dl::DLDevice { device_type: Device::kDLCPU, device_id: 0 },
                ndim: shape.len() as i32,
                dtype: dl::DLDataType { code: code.0 as u8, bits, lanes: 1 },
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
        };
        let lent = Box::into_raw(Box::new(Self { tensor, dims, _bytes: bytes }));
        // SAFETY: it was made above, and nobody else has it. It stays where it is, and with it the dimensions.
        let Self { tensor, dims, .. } = unsafe { &mut *lent };
        tensor.dl_tensor.shape = dims.as_mut_ptr();
        tensor.dl_tensor.strides = dims.as_mut_ptr().wrapping_add(shape.len());
        lent.cast()
    }

    /// What torch calls once nobody has the tensor's memory any more, with or without the GIL.
    unsafe extern "C" fn end(tensor: *mut dl::DLManagedTensorVersioned) {
        // SAFETY: it is the first field of a box that `make` made, and torch calls this once.
        drop(unsafe { Box::from_raw(tensor.cast::<Self>()) });
    }
}
