//! torch's storages: the memory of tensors.
//!
//! A save asks for them once or twice a tensor, while training stands still. So torch's methods are looked up once: to look
//! one up for each call takes twice as long.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

type Value<'py> = Bound<'py, PyAny>;

/// The address and the size of a storage's memory.
pub(crate) type Held = (usize, usize);

/// The methods of torch's own classes.
struct Methods {
    storage: Py<PyType>,
    data_ptr: Py<PyAny>,
    nbytes: Py<PyAny>,
    untyped_storage: Py<PyAny>,
    is_neg: Py<PyAny>,
}

impl Methods {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static METHODS: PyOnceLock<Methods> = PyOnceLock::new();
        METHODS.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let (tensor, storage) = (torch.getattr("Tensor")?, torch.getattr("UntypedStorage")?);
            Ok(Self {
                data_ptr: storage.getattr("data_ptr")?.unbind(),
                nbytes: storage.getattr("nbytes")?.unbind(),
                storage: storage.cast_into()?.unbind(),
                untyped_storage: tensor.getattr("untyped_storage")?.unbind(),
                is_neg: tensor.getattr("is_neg")?.unbind(),
            })
        })
    }
}

/// The storage of a tensor whose class has no method of its own for that.
pub(crate) fn storage_of<'py>(tensor: &Value<'py>) -> PyResult<Value<'py>> {
    call(&Methods::get(tensor.py())?.untyped_storage, tensor)
}

/// Whether such a tensor's elements are read negated.
pub(crate) fn is_negated(tensor: &Value<'_>) -> PyResult<bool> {
    call(&Methods::get(tensor.py())?.is_neg, tensor)?.is_truthy()
}

/// What memory a storage has now.
///
/// # Errors
/// Torch's, for one that has nothing to point to.
pub(crate) fn held(storage: &Value<'_>) -> PyResult<Held> {
    let methods = Methods::get(storage.py())?;
    if storage.get_type().is(methods.storage.bind(storage.py())) {
        let ask = |method| call(method, storage)?.extract();
        return Ok((ask(&methods.data_ptr)?, ask(&methods.nbytes)?));
    }
    let ask = |method| storage.call_method0(method)?.extract();
    Ok((ask("data_ptr")?, ask("nbytes")?))
}

fn call<'py>(method: &Py<PyAny>, of: &Value<'py>) -> PyResult<Value<'py>> {
    let end = std::ptr::null_mut::<ffi::PyObject>();
    // SAFETY: a live function and a live object, with the GIL held, and the list's end. It returns a new reference, or null
    // with an exception.
    unsafe {
        let made = ffi::PyObject_CallFunctionObjArgs(method.as_ptr(), of.as_ptr(), end);
        Bound::from_owned_ptr_or_err(of.py(), made)
    }
}
