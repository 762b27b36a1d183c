//! Rust's errors as Python's exceptions: the classes of `ringstow._core._errors`, and OSError's own kinds.

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ringstow::Error;
use std::ffi::OsString;
use std::path::Path;

/// The exception for an error.
pub(crate) fn to_python(error: Error) -> PyErr {
    Python::attach(|py| build(py, &error).unwrap_or_else(|failure| failure))
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let attributes = PyDict::new(py);
    let at_path = |class: &'static str, path: &Path| {
        attributes.set_item("path", path.as_os_str()).map(|()| class)
    };
    let class = match error {
        Error::Io { path, .. } => {
            return Ok(os_error(path.clone().into_os_string(), error));
        }
        Error::NoCheckpoint { path, .. } => at_path("NoCheckpointError", path)?,
        Error::NotCommitted { path, .. } => at_path("NotCommittedError", path)?,
        Error::MissingShare { path, .. } => at_path("MissingShareError", path)?,
        Error::MissingFiles { path, .. } => at_path("MissingFilesError", path)?,
        Error::Format { path, .. } => at_path("FormatError", path)?,
        Error::Busy { path } | Error::RunBusy { path, .. } => at_path("BusyError", path)?,
        Error::Replaced { path } | Error::Slimmed { path, .. } => {
            at_path("ReplacedCheckpointError", path)?
        }
        Error::Cancelled { path } => at_path("SaveCancelledError", path)?,
        Error::Corrupt { path, offset, expected, got, tensors, .. } => {
            attributes.set_item("file", path.as_os_str())?;
            attributes.set_item("offset", offset)?;
            attributes.set_item("expected", expected)?;
            attributes.set_item("got", got)?;
            attributes.set_item("tensors", tensors.to_vec())?;
            "CorruptCheckpointError"
        }
        Error::Keys { path, missing, unexpected, mismatched } => {
            attributes.set_item("missing", missing)?;
            attributes.set_item("unexpected", unexpected)?;
            attributes.set_item("mismatched", mismatched)?;
            at_path("KeyMismatchError", path)?
        }
        Error::NotDurable { path, cause } => {
            attributes.set_item("errno", cause.raw_os_error())?;
            at_path("NotDurableError", path)?
        }
        Error::Gpu { device, .. } => {
            attributes.set_item("device", device)?;
            "GpuError"
        }
        Error::Panicked { .. } => "PanickedError",
        Error::Unsupported { .. } => "UnsupportedError",
        Error::Invalid { .. } => "InvalidStateError",
        _ => "Error",
    };
    let class = py.import("ringstow._core._errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&attributes))?))
}

/// OSError picks its sub-class (FileNotFoundError, PermissionError) by the errno, and prints errno and path
/// itself: the message has neither.
fn os_error(path: OsString, error: &Error) -> PyErr {
    match (error.errno(), error.without_path()) {
        (Some(errno), Some(message)) => PyOSError::new_err((errno, message, path)),
        _ => PyOSError::new_err(error.to_string()),
    }
}
