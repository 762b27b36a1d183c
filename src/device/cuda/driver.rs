//! The CUDA driver: loading it, its errors, and calls made so that no other thread's are disturbed.

use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{DriverError, result};
use std::sync::OnceLock;

/// What a call of the driver's returns.
pub(super) type DriverResult<T> = std::result::Result<T, DriverError>;

/// The oldest supported driver, as `cuDriverGetVersion` returns it: that of CUDA 12.0 (525).
const VERSION_MIN: i32 = 12000;

/// Loads the driver on the first call.
///
/// # Errors
/// [`Error::Unsupported`] if there is none, none that is new enough, or it does not start.
pub(super) fn load() -> Result<()> {
    static LOADED: OnceLock<std::result::Result<(), (String, &str)>> = OnceLock::new();
    let refused =
        |(what, remedy): (String, &str)| Error::Unsupported { what, remedy: remedy.into() };
    LOADED.get_or_init(try_load).clone().map_err(refused)
}

/// The newest CUDA version that the driver supports, major and minor; also of drivers that are too old.
/// `None` if no driver can be loaded.
pub fn version() -> Option<(u32, u32)> {
    let version = u32::try_from(raw_version()?.ok()?).ok()?;
    Some((version / 1000, version % 1000 / 10))
}

/// What the driver returns for its version; `None` if none can be loaded.
fn raw_version() -> Option<DriverResult<i32>> {
    // SAFETY: loads a library by its system name; NVIDIA's has no initialisers that matter.
    unsafe { sys::is_culib_present() }.then(|| {
        let mut version = 0;
        // SAFETY: `version` is an int to be written to; the call needs no cuInit before.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map(|()| version)
    })
}

fn try_load() -> std::result::Result<(), (String, &'static str)> {
    const INSTALL: &str = "install NVIDIA's driver; in a container, start it with the GPUs \
                           (`docker run --gpus all`)";
    let version = match raw_version() {
        None => return Err(("no CUDA driver can be loaded here (libcuda.so.1)".into(), INSTALL)),
        Some(Err(error)) => {
            let what = format!("the CUDA driver does not say its version: {}", text(error));
            return Err((what, INSTALL));
        }
        Some(Ok(version)) => version,
    };
    if version < VERSION_MIN {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        let what = format!("the CUDA driver is one for CUDA {major}.{minor}, 12.0 is needed");
        return Err((what, "update NVIDIA's driver to version 525 or later"));
    }
    result::init().map_err(|error| {
        let what = format!("the CUDA driver does not start: {}", text(error));
        (what, remedy(error))
    })
}

/// The driver's name and description of an error.
pub(super) fn text(error: DriverError) -> String {
    let known = |said: DriverResult<&std::ffi::CStr>| {
        said.map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
    };
    let name = known(error.error_name());
    let name = if name.is_empty() { format!("error {}", error.0 as u32) } else { name };
    match known(error.error_string()) {
        text if text.is_empty() => name,
        text => format!("{name} ({text})"),
    }
}

/// What to do about an error.
pub(super) fn remedy(error: DriverError) -> &'static str {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "free memory of the GPU or lower pool_bytes",
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => {
            "see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES for the GPUs that there are"
        }
        CUresult::CUDA_ERROR_NOT_INITIALIZED => {
            "a forked process cannot use CUDA: start it with the spawn method"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver's two halves are of different versions: restart the machine, or the \
             container with the host's libcuda"
        }
        CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE => {
            "is the tensor's memory still there, and its stream one of that GPU?"
        }
        _ => {
            "the GPU, or a kernel that ran on it, has failed, and this process cannot use it any \
             more: see dmesg for Xid messages, restart the process, resume from the last checkpoint"
        }
    }
}

/// Converts a driver's result.
pub(super) fn checked(answer: DriverResult<()>, doing: &'static str, device: u32) -> Result<()> {
    answer.map_err(|error| failed(error, doing, device))
}

/// Converts a driver's error.
pub(super) fn failed(error: DriverError, doing: &'static str, device: u32) -> Error {
    Error::Gpu { doing, device, reason: text(error), remedy: remedy(error).into() }
}

/// Makes a context current on this thread until this is dropped, which restores the previous one.
///
/// Switches the thread's capture mode to relaxed: while any thread captures a CUDA graph, the driver
/// refuses event queries otherwise ([`cuThreadExchangeStreamCaptureMode`][mode]). The graph does not get
/// our calls.
///
/// [mode]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html
pub(super) struct Current {
    /// The thread's own capture mode, to be restored.
    mode: CUstreamCaptureMode,
}

impl Current {
    /// Makes a context current.
    ///
    /// # Safety
    /// The context is retained for longer than this lives.
    pub unsafe fn enter(context: sys::CUcontext) -> DriverResult<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live context, by the contract; `mode` is read and written.
        unsafe {
            sys::cuCtxPushCurrent_v2(context).result()?;
            let exchanged = sys::cuThreadExchangeStreamCaptureMode(&mut mode).result();
            let current = Self { mode };
            exchanged.map(|()| current)
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: undoes what `enter` did, on the thread that did it: this is neither Send nor
        // leaked. Fails only where the process or the driver is on its way out.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut self.mode);
            let _ = sys::cuCtxPopCurrent_v2(&mut context);
        }
    }
}
