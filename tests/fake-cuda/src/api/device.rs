//! Initialization, devices, contexts, the names of errors.

use super::{Call, Needs, call, put, put_text};
use crate::abi::{
    Code, Handle, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, describe,
};
use crate::context;
use crate::driver::driver;
use std::ffi::{c_char, c_int, c_uint};

impl Call {
    /// # Errors
    /// `INVALID_DEVICE`.
    fn check_device(&self, device: c_int) -> Result<usize, Code> {
        let ordinal = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        if ordinal < self.state.devices() { Ok(ordinal) } else { Err(INVALID_DEVICE) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(flags: c_uint) -> Code {
    call("cuInit", Needs::Nothing, |call| match (flags, call.state.devices()) {
        (1.., _) => Err(INVALID_VALUE),
        (0, 0) => Err(NO_DEVICE),
        (0, _) => {
            driver().initialize();
            Ok(())
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    call("cuDriverGetVersion", Needs::Nothing, |call| {
        // SAFETY: the caller's promise, as in every function of this kind.
        unsafe { put(version, call.state.options.driver_version) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    call("cuDeviceGetCount", Needs::Init, |call| {
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(count, call.state.devices() as c_int) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    call("cuDeviceGet", Needs::Init, |call| {
        call.check_device(ordinal)?;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Code {
    call("cuDeviceGetName", Needs::Init, |call| {
        let ordinal = call.check_device(device)?;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put_text(name, len, &format!("Fake GPU {ordinal}")) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Code {
    call("cuDeviceGetAttribute", Needs::Init, |call| {
        call.check_device(device)?;
        // SAFETY: see cuDriverGetVersion. Of all attributes, it has MEMORY_POOLS_SUPPORTED.
        unsafe { put(value, c_int::from(attribute == 115)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut Handle, device: c_int) -> Code {
    call("cuDevicePrimaryCtxRetain", Needs::Init, |mut call| {
        let context = context::of_device(call.check_device(device)?);
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(out, context)? };
        call.state.contexts.retain(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    call("cuDevicePrimaryCtxRelease_v2", Needs::Init, |mut call| {
        let context = context::of_device(call.check_device(device)?);
        if call.state.contexts.release(context)? {
            // All that lives in it goes with it.
            call.state.destroy_streams_of(context);
            call.state.events.retain(|_, event| event.context != context);
            call.state.free_all_of(context);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(out: *mut Handle) -> Code {
    call("cuCtxGetCurrent", Needs::Init, |_| {
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(out, context::current().unwrap_or(0)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSetCurrent(wanted: Handle) -> Code {
    call("cuCtxSetCurrent", Needs::Init, |call| {
        if wanted != 0 {
            call.state.contexts.check(wanted)?;
        }
        context::set_current(Some(wanted).filter(|&wanted| wanted != 0));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPushCurrent_v2(wanted: Handle) -> Code {
    call("cuCtxPushCurrent_v2", Needs::Init, |call| {
        call.state.contexts.check(wanted)?;
        context::push(wanted);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut Handle) -> Code {
    call("cuCtxPopCurrent_v2", Needs::Init, |_| {
        let popped = context::pop().ok_or(INVALID_CONTEXT)?;
        if !out.is_null() {
            // SAFETY: see cuDriverGetVersion.
            unsafe { put(out, popped)? };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSynchronize() -> Code {
    call("cuCtxSynchronize", Needs::Context, |call| {
        let context = call.context;
        let places = call.state.all_so_far(context);
        call.wait_until(|state| state.are_done(&places), context).map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: Code, out: *mut *const c_char) -> Code {
    describe_to(code, out, true)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: Code, out: *mut *const c_char) -> Code {
    describe_to(code, out, false)
}

/// Not through `call`: it works everywhere, in the child of a fork too.
fn describe_to(code: Code, out: *mut *const c_char, name: bool) -> Code {
    let found = describe(code).map(|both| if name { both.0 } else { both.1 });
    // SAFETY: see cuDriverGetVersion.
    let written = unsafe { put(out, found.map_or(std::ptr::null(), |text| text.as_ptr())) };
    if found.is_none() { INVALID_VALUE } else { written.err().unwrap_or(0) }
}
