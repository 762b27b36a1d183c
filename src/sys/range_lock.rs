//! Locks on bytes of a file. They belong to the open file: another descriptor of this process is kept out, too. The kernel
//! releases them with the last descriptor, however a process ends.

use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;

/// All bytes of a file, however long it may become.
pub(super) const WHOLE: Range<i64> = 0..0;

/// What becomes of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// For one owner.
    Exclusive,
    /// For any number of owners.
    Shared,
    /// For nobody.
    None,
}

/// Sets the lock of a range.
///
/// # Errors
/// The system's; [`io::ErrorKind::WouldBlock`] if another has a lock in the range.
#[cfg(target_os = "linux")]
pub(super) fn set(file: &File, range: Range<i64>, lock: Lock) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    match fcntl(file, FcntlArg::F_OFD_SETLK(&flock(range, lock))) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// A range that somebody else has locked, with bytes in `within`: any of them, and all of it, beyond `within` too.
///
/// # Errors
/// The system's.
#[cfg(target_os = "linux")]
pub(super) fn others(file: &File, within: Range<i64>) -> io::Result<Option<Range<i64>>> {
    use nix::fcntl::{FcntlArg, fcntl};
    let mut found = flock(within, Lock::Exclusive);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    let is_free = found.l_type == nix::libc::F_UNLCK as nix::libc::c_short;
    Ok((!is_free).then_some(found.l_start..found.l_start + found.l_len))
}

#[cfg(target_os = "linux")]
fn flock(range: Range<i64>, lock: Lock) -> nix::libc::flock {
    let kind = match lock {
        Lock::Exclusive => nix::libc::F_WRLCK,
        Lock::Shared => nix::libc::F_RDLCK,
        Lock::None => nix::libc::F_UNLCK,
    };
    nix::libc::flock {
        l_type: kind as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: range.start,
        l_len: range.end - range.start,
        l_pid: 0,
    }
}

/// Off Linux, no file system is known to pass locks on.
#[cfg(not(target_os = "linux"))]
pub(super) fn set(_: &File, _: Range<i64>, _: Lock) -> io::Result<()> {
    Err(Errno::ENOSYS.into())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn others(_: &File, _: Range<i64>) -> io::Result<Option<Range<i64>>> {
    Err(Errno::ENOSYS.into())
}
