//! Finds out whether another process has a file open. The kernel grants a write lease (`F_SETLEASE`) on a file only to
//! its sole opener. Mappings count too, even after their descriptor is closed. Other hosts of a network file system
//! may not count.
#![allow(unsafe_code)]

use crate::sys::seam::{Call, made};
use std::fs::File;
use std::io;

/// Whether this is the only open descriptor of its file on this machine.
///
/// # Errors
/// The system's: `EINVAL` on a file system without leases, `EACCES` for a file of another user's;
/// [`io::ErrorKind::Unsupported`] off Linux.
pub fn is_sole_opener(file: &File) -> io::Result<bool> {
    match made(Call::Lease, file, || lease(file)) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        result => result.map(|()| true),
    }
}

/// Takes a write lease, and releases it immediately.
#[cfg(target_os = "linux")]
fn lease(file: &File) -> io::Result<()> {
    use nix::libc::{F_SETLEASE, F_UNLCK, F_WRLCK, SIGURG, c_int};
    use std::os::fd::AsRawFd;
    /// The number on all 64-bit architectures of Linux.
    const F_SETSIG: c_int = 10;
    let fcntl = |command: c_int, argument: c_int| {
        // SAFETY: the descriptor is open as long as `file` is, and these commands take a number.
        match unsafe { nix::libc::fcntl(file.as_raw_fd(), command, argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // If a process opens the file at this moment, the kernel sends the lease's holder a signal. The default,
    // SIGIO, ends a process without a handler; SIGURG does nothing.
    fcntl(F_SETSIG, SIGURG)?;
    fcntl(F_SETLEASE, F_WRLCK)?;
    fcntl(F_SETLEASE, F_UNLCK)
}

#[cfg(not(target_os = "linux"))]
fn lease(_: &File) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use crate::sys::lease::*;

    #[test]
    fn readers_and_their_mappings_count_as_openers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [1; 4096]).unwrap();
        let is_alone = || is_sole_opener(&File::options().write(true).open(&path).unwrap());
        assert!(is_alone().unwrap());
        let reader = File::open(&path).unwrap();
        assert!(!is_alone().unwrap());
        // SAFETY: nobody writes to the file or cuts it.
        let mapping = unsafe { memmap2::Mmap::map(&reader) }.unwrap();
        drop(reader);
        assert!(!is_alone().unwrap());
        drop(mapping);
        assert!(is_alone().unwrap());
    }
}
