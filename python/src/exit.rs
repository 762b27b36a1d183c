//! How a process says at its end that a save failed which nobody asked about.

use pyo3::prelude::*;
use std::ffi::c_int;

/// Has the process exit with 1 where it would exit with 0. Called when Python's exit begins: Python
/// itself has no way to change the exit code from then on.
#[pyfunction]
pub(crate) fn fail_exit() {
    // SAFETY: C functions, with a handler that is there until the process ends.
    unsafe { register() };
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn register() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), arg: *mut c_void) -> c_int;
        fn exit(code: c_int) -> !;
    }

    extern "C" fn fail(code: c_int, _: *mut c_void) {
        if code == 0 {
            // SAFETY: glibc goes on with the handlers that are left, and exits with this code.
            unsafe { exit(1) }
        }
    }

    // SAFETY: the signature is that of <stdlib.h>. Where there is no memory for it, the code stays 0.
    let _ = unsafe { on_exit(fail, std::ptr::null_mut()) };
}

/// Elsewhere a handler is not told the code: any becomes 1, and what was registered before is not run.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
unsafe fn register() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
        fn fflush(stream: *mut c_void) -> c_int;
        fn _exit(code: c_int) -> !;
    }

    extern "C" fn fail() {
        // SAFETY: all streams are flushed, as exit does after its handlers.
        unsafe {
            fflush(std::ptr::null_mut());
            _exit(1)
        }
    }

    // SAFETY: the signature is that of <stdlib.h>.
    let _ = unsafe { atexit(fail) };
}
