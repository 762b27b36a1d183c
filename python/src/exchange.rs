//! torch's tensors by DLPack's C exchange API, a table of functions at torch's class of tensors.
//!
//! States have thousands of tensors, and training stands still while they are looked at: this takes a
//! third of the time that asking from Python takes. It is for the usual tensors only; all others, and
//! torch before 2.10, are for `ringstow._state.tensors._torch`.

use crate::lent::{Lent, MAJOR};
use crate::memory::Bytes;
use crate::place::Address;
use crate::storage::{Held, held, is_negated, storage_of};
use dlpack_ffi::{self as dl, DLDeviceType as Device};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple, PyType};
use ringstow::Dtype;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// torch's functions, and the classes whose tensors may be handed to them.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Exchange {
    look: unsafe extern "C" fn(*mut c_void, *mut dl::DLTensor) -> c_int,
    make: unsafe extern "C" fn(*mut dl::DLManagedTensorVersioned, *mut *mut c_void) -> c_int,
    kinds: Vec<Py<PyType>>,
    /// torch's objects, and ours of each.
    dtypes: Vec<(Py<PyAny>, Dtype)>,
}

/// A dense tensor in memory.
pub(crate) struct Plain<'py> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) address: Address,
    pub(crate) nbytes: u64,
    /// Its storage, which keeps the memory: the tensor may be given another.
    pub(crate) owner: Bound<'py, PyAny>,
    /// The memory of that storage.
    pub(crate) held: Option<Held>,
}

#[pymethods]
impl Exchange {
    /// That of the first of some classes, for tensors of exactly these and of some types; none if it has
    /// none.
    #[staticmethod]
    fn of(
        kinds: Vec<Bound<'_, PyType>>,
        dtypes: Vec<(Py<PyAny>, String)>,
    ) -> PyResult<Option<Self>> {
        let Some(tensor) = kinds.first() else { return Ok(None) };
        let Some(capsule) = tensor.getattr_opt("__dlpack_c_exchange_api__")? else {
            return Ok(None);
        };
        let table = capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dlpack_exchange_api"))?;
        // SAFETY: a capsule of this name holds such a table, which stays for the life of the process.
        let table = unsafe { known(table.cast()) };
        let Some((look, make)) = table.and_then(|table| {
            let look = table.dltensor_from_py_object_no_sync?;
            Some((look, table.managed_tensor_to_py_object_no_sync?))
        }) else {
            return Ok(None);
        };
        let kinds = kinds.into_iter().map(Bound::unbind).collect();
        let known = |(theirs, ours): (_, String)| Some((theirs, Dtype::from_name(&ours)?));
        let dtypes = dtypes.into_iter().filter_map(known).collect();
        Ok(Some(Self { look, make, kinds, dtypes }))
    }

    fn find<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        address_of: &Bound<'py, PyAny>,
    ) -> PyResult<Option<(&'static str, Bound<'py, PyTuple>, Address)>> {
        let Some(plain) = self.look(tensor, address_of)? else { return Ok(None) };
        let shape = PyTuple::new(tensor.py(), &plain.shape)?;
        Ok(Some((plain.dtype.name(), shape, plain.address)))
    }
}

/// The table of the version that is known here, among those of which this is the newest.
///
/// # Safety
/// It points to such a table, and that to older ones.
unsafe fn known(
    newest: NonNull<dl::DLPackExchangeAPIHeader>,
) -> Option<&'static dl::DLPackExchangeAPI> {
    let mut header = newest;
    loop {
        // SAFETY: the caller's promise; the header is the same in every version.
        let at = unsafe { header.as_ref() };
        if at.version.major == MAJOR {
            // SAFETY: the header is the beginning of a table, of the layout of this version.
            return Some(unsafe { header.cast().as_ref() });
        }
        header = NonNull::new(at.prev_api)?;
    }
}

impl Exchange {
    /// Where a usual tensor's elements lie; `address_of` is asked of one on a GPU, for the stream that
    /// it is ready on. None for any other layout, dtype or class, and for one without memory: the
    /// general way says what is the matter with it.
    pub(crate) fn look<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        address_of: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Plain<'py>>> {
        let py = tensor.py();
        let Some(seen) = self.seen(tensor) else { return Ok(None) };
        let Some(shape) = dense_shape(&seen) else { return Ok(None) };
        let dtype = match from_dl_type(seen.dtype) {
            Some(dtype) => Some(dtype),
            None => self.dtype(&tensor.getattr(intern!(py, "dtype"))?),
        };
        let Some(dtype) = dtype else { return Ok(None) };
        if may_be_negated(dtype) && is_negated(tensor)? {
            return Ok(None);
        }
        let nbytes = shape.iter().product::<u64>() * (dtype.bits() / 8);
        let owner = storage_of(tensor)?;
        if nbytes == 0 {
            let (address, held) = (Address::Host(0), None);
            return Ok(Some(Plain { dtype, shape, address, nbytes, owner, held }));
        }
        // A storage that has nothing to point to fails here.
        let held = held(&owner).ok().filter(|&held| holds(held, seen.data as usize, nbytes));
        if held.is_none() {
            return Ok(None);
        }
        let address = match seen.device.device_type {
            Device::kDLCPU => Address::Host(seen.data as usize),
            Device::kDLCUDA => address_of.call1((tensor,))?.extract()?,
            _ => return Ok(None),
        };
        Ok(Some(Plain { dtype, shape, address, nbytes, owner, held }))
    }

    /// What torch says of a tensor. Its shape and strides are there until the tensor is touched.
    fn seen(&self, tensor: &Bound<'_, PyAny>) -> Option<dl::DLTensor> {
        if !self.kinds.iter().any(|kind| tensor.get_type().is(kind)) {
            return None;
        }
        let mut seen = std::mem::MaybeUninit::uninit();
        // SAFETY: the object is of exactly a class that the function is for, with the GIL held, which
        // is all that it asks for; it fills in what it is given, or fails.
        let failed = unsafe { (self.look)(tensor.as_ptr().cast(), seen.as_mut_ptr()) };
        if failed != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: it did not fail.
        Some(unsafe { seen.assume_init() })
    }

    /// A tensor of torch's over loaded memory; `None` for a dtype or size that is for `ringstow._state.tensors._torch`.
    pub(crate) fn over<'py>(
        &self,
        py: Python<'py>,
        (dtype, shape): (Dtype, &[u64]),
        bytes: &mut Option<Bytes>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some((code, bits)) = dl_type(dtype) else { return Ok(None) };
        let Some(bytes) = bytes.take_if(|bytes| bytes.len() > 0) else { return Ok(None) };
        let lent = Lent::make((code, bits), shape, bytes);
        let mut made = std::ptr::null_mut();
        // SAFETY: this thread holds the GIL. `bytes` keeps the tensor's memory. The function takes over both.
        match unsafe { (self.make)(lent, &raw mut made) } {
            // SAFETY: it returned 0, and thus a new reference.
            0 => Ok(Some(unsafe { Bound::from_owned_ptr(py, made.cast()) })),
            _ => Err(PyErr::fetch(py)),
        }
    }

    fn dtype(&self, theirs: &Bound<'_, PyAny>) -> Option<Dtype> {
        self.dtypes.iter().find(|(known, _)| theirs.is(known)).map(|&(_, ours)| ours)
    }
}

/// DLPack's type for what torch takes in every version that has the table.
fn dl_type(dtype: Dtype) -> Option<(dl::DLDataTypeCode, u8)> {
    use dl::DLDataTypeCode as Code;
    let code = match dtype {
        Dtype::BOOL => Code::kDLBool,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => Code::kDLUInt,
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => Code::kDLInt,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => Code::kDLFloat,
        Dtype::BF16 => Code::kDLBfloat,
        Dtype::C64 | Dtype::C128 => Code::kDLComplex,
        _ => return None,
    };
    Some((code, dtype.bits() as u8))
}

/// The dtype of a type of DLPack's that only one of torch's has, among those of real numbers. Integers of fewer bits have the
/// types of 8 bits.
fn from_dl_type(dl_type: dl::DLDataType) -> Option<Dtype> {
    use dl::DLDataTypeCode as Code;
    let (code, bits) = (Code(dl_type.code.into()), dl_type.bits);
    Some(match (code, bits) {
        _ if dl_type.lanes != 1 => return None,
        (Code::kDLBool, 8) => Dtype::BOOL,
        (Code::kDLUInt, 16) => Dtype::U16,
        (Code::kDLUInt, 32) => Dtype::U32,
        (Code::kDLUInt, 64) => Dtype::U64,
        (Code::kDLInt, 16) => Dtype::I16,
        (Code::kDLInt, 32) => Dtype::I32,
        (Code::kDLInt, 64) => Dtype::I64,
        (Code::kDLFloat, 16) => Dtype::F16,
        (Code::kDLFloat, 32) => Dtype::F32,
        (Code::kDLFloat, 64) => Dtype::F64,
        (Code::kDLBfloat, 16) => Dtype::BF16,
        _ => return None,
    })
}

/// The shape of a tensor whose elements lie in row-major order without gaps.
fn dense_shape(seen: &dl::DLTensor) -> Option<Vec<u64>> {
    let dims = usize::try_from(seen.ndim).ok()?;
    if dims == 0 {
        return Some(Vec::new()); // the pointers may be null
    }
    // SAFETY: torch gives a length and a stride for each dimension, which stay as long as the tensor
    // is not touched.
    let (shape, strides) = unsafe {
        (
            std::slice::from_raw_parts(seen.shape, dims),
            std::slice::from_raw_parts(seen.strides, dims),
        )
    };
    let shape: Vec<u64> = shape.iter().map(|&n| u64::try_from(n)).collect::<Result<_, _>>().ok()?;
    is_dense(&shape, strides).then_some(shape)
}

/// Whether these are the strides of a dense tensor. That of a dimension of one element says nothing.
fn is_dense(shape: &[u64], strides: &[i64]) -> bool {
    let mut step = 1;
    let dense = shape.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = n == 1 || u64::try_from(stride) == Ok(step);
        step *= n;
        fits
    });
    dense || shape.contains(&0)
}

/// Whether a type is one of the parts of complex numbers: those of conjugated ones are views that are
/// read negated.
fn may_be_negated(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::F32 | Dtype::F64)
}

/// Whether a storage with this memory holds so many bytes from an address on: sharding libraries free it and leave the
/// tensor.
fn holds((begin, held): Held, address: usize, nbytes: u64) -> bool {
    begin != 0 && address >= begin && (address - begin) as u64 + nbytes <= held as u64
}
