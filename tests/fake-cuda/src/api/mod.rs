//! The functions of the driver API. Each goes through [`call`], which does what all have in common.
#![allow(non_snake_case)] // the driver's names

mod copy;
mod device;
mod event;
mod memory;
mod stream;

use crate::abi::STREAM_CAPTURE_UNSUPPORTED;
use crate::abi::{Code, Handle, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, NOT_PERMITTED};
use crate::driver::{Guard, driver};
use crate::{context, worker};
use std::ffi::c_char;

/// Every function of the driver API that this library has.
pub const FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchHostFunc",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuMemsetD8_v2",
    "cuPointerGetAttribute",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// They give something back. In a lost context they still do, although they return its error: the
/// process of a test goes on where a real one would end.
const CLEANUP: &[&str] = &[
    "cuEventDestroy_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuStreamDestroy_v2",
];

/// What a function needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Needs {
    Nothing,
    /// `cuInit`, in this process.
    Init,
    /// A current context of the calling thread.
    Context,
}

/// What the body of a function works on.
struct Call {
    state: Guard,
    /// The current context; 0 where none is needed.
    context: Handle,
}

impl Call {
    /// Sleeps until `done`; the error of the context, should it be lost.
    fn wait_until(
        self,
        done: impl FnMut(&mut crate::driver::State) -> bool,
        context: Handle,
    ) -> Result<Self, Code> {
        let state = driver().wait_until(self.state, done);
        state.healthy(context)?;
        Ok(Self { state, context: self.context })
    }
}

/// Counts the call, fails it where a test wants that, checks what it `needs` and what captures
/// forbid; then does it.
fn call(function: &'static str, needs: Needs, body: impl FnOnce(Call) -> Result<(), Code>) -> Code {
    debug_assert!(FUNCTIONS.contains(&function), "{function} is not in the list");
    if driver().is_forked() {
        return NOT_INITIALIZED;
    }
    driver().configure();
    prepare(function, needs, body).err().unwrap_or(0)
}

fn prepare(
    function: &'static str,
    needs: Needs,
    body: impl FnOnce(Call) -> Result<(), Code>,
) -> Result<(), Code> {
    let mut state = driver().lock();
    state.control.count(function);
    if let Some(code) = state.control.take_failure(function) {
        return Err(code);
    }
    if worker::is_worker() {
        state.control.violation(format!("{function} called by a host function"));
        return Err(NOT_PERMITTED);
    }
    if needs >= Needs::Init && !driver().is_initialized() {
        return Err(NOT_INITIALIZED);
    }
    if needs < Needs::Context {
        return body(Call { state, context: 0 });
    }
    let context = context::current().ok_or(INVALID_CONTEXT)?;
    state.contexts.check(context)?;
    if state.captures.is_broken_by(function) {
        state.control.violation(format!("{function} called while a stream is being captured"));
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let lost = state.contexts.lost(context);
    if lost.is_none() || CLEANUP.contains(&function) {
        body(Call { state, context })?;
    }
    lost.map_or(Ok(()), Err)
}

/// Writes a result where the caller wants it.
///
/// # Safety
/// `out` is null or has room for it.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Code> {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise. Nothing is said about alignment.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes a string with its end, cut to `len` bytes.
///
/// # Safety
/// `out` is null or has room for `len` bytes.
unsafe fn put_text(out: *mut c_char, len: i32, text: &str) -> Result<(), Code> {
    if out.is_null() || len < 1 {
        return Err(INVALID_VALUE);
    }
    let fitting = text.len().min(len as usize - 1);
    // SAFETY: the caller's promise; `fitting` + 1 <= `len`.
    unsafe {
        out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), fitting);
        out.add(fitting).write(0);
    }
    Ok(())
}
