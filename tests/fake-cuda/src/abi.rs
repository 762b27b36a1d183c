//! Types and result codes of the driver API, as in `cuda.h`. Enums come as plain integers: a caller
//! may pass values that this library does not know.

use std::ffi::{CStr, c_int, c_uint};

/// `CUresult`.
pub type Code = c_int;
/// `CUdeviceptr`.
pub type DevicePtr = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUgraph`: opaque, never dereferenced.
pub type Handle = usize;
/// `CUhostFn`, with its argument as an address so that it can travel to another thread.
pub type HostFn = unsafe extern "C" fn(usize);

pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const REGISTER_PORTABLE: c_uint = 1;
/// `CUmemorytype`.
pub const TYPE_HOST: c_uint = 1;
pub const TYPE_DEVICE: c_uint = 2;
pub const TYPE_UNIFIED: c_uint = 4;
/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`, in bytes.
pub const MAX_PITCH: usize = i32::MAX as usize;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memcpy2d {
    pub src_x_bytes: usize,
    pub src_y: usize,
    pub src_type: c_uint,
    pub src_host: usize,
    pub src_device: DevicePtr,
    pub src_array: usize,
    pub src_pitch: usize,
    pub dst_x_bytes: usize,
    pub dst_y: usize,
    pub dst_type: c_uint,
    pub dst_host: usize,
    pub dst_device: DevicePtr,
    pub dst_array: usize,
    pub dst_pitch: usize,
    pub width_bytes: usize,
    pub height: usize,
}

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        $(#[allow(dead_code)] pub const $name: Code = $code;)* // some are only injected by tests

        /// Name and description of a code.
        pub fn describe(code: Code) -> Option<(&'static CStr, &'static CStr)> {
            let (name, text) = match code {
                0 => ("CUDA_SUCCESS\0", "no error\0"),
                $($code => (concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
                _ => return None,
            };
            Some((CStr::from_bytes_with_nul(name.as_bytes()).ok()?,
                  CStr::from_bytes_with_nul(text.as_bytes()).ok()?))
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, "unknown error";
}
