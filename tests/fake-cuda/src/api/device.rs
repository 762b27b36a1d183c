//! Initialization, devices, contexts, the names of errors.

use super::{Call, Needs, call, put, put_text};
use crate::abi::{
    Code, Handle, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, MAX_PITCH, NO_DEVICE, NOT_FOUND,
    describe,
};
use crate::context;
use crate::driver::driver;
use std::ffi::{c_char, c_int, c_uint, c_void};

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
        let ordinal = call.check_device(device)?;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(value, attribute_of(ordinal, attribute)) }
    })
}

/// `CUdevice_attribute`, as far as it is of any use here; 0 for the others.
fn attribute_of(ordinal: usize, attribute: c_uint) -> c_int {
    match attribute {
        10 => 32,                   // WARP_SIZE
        11 => MAX_PITCH as c_int,   // MAX_PITCH
        16 => 132,                  // MULTIPROCESSOR_COUNT
        31 => 1,                    // CONCURRENT_KERNELS
        33 => ordinal as c_int + 1, // PCI_BUS_ID
        40 => 3,                    // ASYNC_ENGINE_COUNT
        41 => 1,                    // UNIFIED_ADDRESSING
        75 => 9,                    // COMPUTE_CAPABILITY_MAJOR
        78 => 1,                    // STREAM_PRIORITIES_SUPPORTED
        91 => 1,                    // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        99 => 1,                    // HOST_REGISTER_SUPPORTED
        113 => 1,                   // READ_ONLY_HOST_REGISTER_SUPPORTED
        115 => 1,                   // MEMORY_POOLS_SUPPORTED
        _ => 0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Code {
    call("cuDeviceTotalMem_v2", Needs::Init, |call| {
        call.check_device(device)?;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(bytes, call.state.options.memory_bytes) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> Code {
    call("cuDeviceGetPCIBusId", Needs::Init, |call| {
        let ordinal = call.check_device(device)?;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put_text(id, len, &format!("0000:{:02X}:00.0", ordinal + 1)) }
    })
}

/// What cudarc calls for a CUDA before 13.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> Code {
    uuid_of("cuDeviceGetUuid", uuid, device)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Code {
    uuid_of("cuDeviceGetUuid_v2", uuid, device)
}

fn uuid_of(function: &'static str, uuid: *mut [u8; 16], device: c_int) -> Code {
    call(function, Needs::Init, |call| {
        let ordinal = call.check_device(device)?;
        let mut bytes = *b"fake-cuda-gpu-\0\0";
        bytes[15] = ordinal as u8;
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(uuid, bytes) }
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
unsafe extern "C" fn cuCtxGetDevice(out: *mut c_int) -> Code {
    call("cuCtxGetDevice", Needs::Context, |call| {
        // SAFETY: see cuDriverGetVersion.
        unsafe { put(out, context::device_of(call.context) as c_int) }
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

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    _symbol: *const c_char,
    out: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    status: *mut c_uint,
) -> Code {
    call("cuGetProcAddress_v2", Needs::Nothing, |_| {
        // SAFETY: see cuDriverGetVersion. 1: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
        unsafe {
            put(out, std::ptr::null_mut())?;
            let _ = put(status, 1); // may be null
        }
        Err(NOT_FOUND)
    })
}
