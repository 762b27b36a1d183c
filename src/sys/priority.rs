//! How far the kernel puts the calling thread's work after that of others. Linux keeps both priorities per thread.
#![allow(unsafe_code)]

use std::io;

/// Lowers the calling thread's priority for cores: `steps` above the niceness of the process, at most 19.
///
/// # Errors
/// The system's; [`io::ErrorKind::Unsupported`] off Linux, where threads have no niceness of their own.
pub(crate) fn set_nice(steps: u32) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpid, getpriority_process, setpriority_process};
        // That of the first thread: this one may have inherited a lower priority from the thread that started it.
        let base = getpriority_process(Some(getpid()))?;
        let nice = base.saturating_add(steps as i32).min(19);
        Ok(setpriority_process(Some(rustix::thread::gettid()), nice)?)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = steps;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Sets the class and level of the calling thread's disk I/O, as `ioprio_set(2)` numbers them.
///
/// # Errors
/// The system's; [`io::ErrorKind::Unsupported`] off Linux.
pub(crate) fn set_io_priority(class_and_level: u16) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use nix::libc::{SYS_ioprio_set, c_int, syscall};
        const IOPRIO_WHO_PROCESS: c_int = 1;
        const CALLING_THREAD: c_int = 0;
        let value = c_int::from(class_and_level);
        // SAFETY: the call takes three numbers, and changes nothing but this thread's priority.
        match unsafe { syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, CALLING_THREAD, value) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = class_and_level;
        Err(io::ErrorKind::Unsupported.into())
    }
}
