//! What the page cache holds of a file, and reading that.
//!
//! The question matters: a read that the page cache cannot answer starts the kernel's readahead, even with RWF_NOWAIT
//! (Linux 5.10), and what the caller then reads directly is read twice.
#![allow(unsafe_code)]

use crate::sys::seam::{Call, made};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// How much of a range the page cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// No page.
    Nothing,
    /// Some pages.
    Part,
    /// Every page.
    All,
}

/// How much of a range of a file the page cache holds. What the kernel does not say counts as nothing.
pub fn held(file: &File, range: &Range<u64>) -> Held {
    let first = range.start / page_bytes();
    let pages = range.end.div_ceil(page_bytes()).saturating_sub(first);
    match made(Call::PageCache, file, || cached_pages(file, range)) {
        Ok(cached) if cached >= pages => Held::All,
        Ok(0) | Err(_) => Held::Nothing,
        Ok(_) => Held::Part,
    }
}

/// Reads what the page cache has just been said to hold. If it has dropped some of it by now, this waits for the disk.
///
/// # Errors
/// The system's; [`io::ErrorKind::UnexpectedEof`] if the file was cut.
pub fn read(file: &File, to: &mut [u8], offset: u64) -> io::Result<()> {
    made(Call::PageCache, file, || file.read_exact_at(to, offset))
}

fn page_bytes() -> u64 {
    use nix::unistd::{SysconfVar, sysconf};
    let bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096)
}

/// Counts the pages of a range that the page cache holds (`cachestat`, Linux 6.5).
///
/// # Errors
/// The system's: `ENOSYS` before Linux 6.5; `EPERM`, since Linux 6.14, for a file that this process neither owns nor may
/// write to, and in some containers.
#[cfg(target_os = "linux")]
fn cached_pages(file: &File, range: &Range<u64>) -> io::Result<u64> {
    use nix::libc::{c_long, syscall};
    use std::os::fd::AsRawFd;

    /// The number on all architectures that have the numbers of asm-generic, which libc does not know for each.
    const CACHESTAT: c_long = 451;

    /// `struct cachestat_range`. A length of 0 would mean the rest of the file.
    #[repr(C)]
    struct Asked {
        offset: u64,
        len: u64,
    }

    /// `struct cachestat`.
    #[repr(C)]
    #[derive(Default)]
    struct Answer {
        cached: u64,
        dirty: u64,
        being_written: u64,
        evicted: u64,
        recently_evicted: u64,
    }

    let asked = Asked { offset: range.start, len: range.end - range.start };
    if asked.len == 0 {
        return Ok(0);
    }
    let mut answer = Answer::default();
    // SAFETY: the descriptor is open as long as `file` is. The kernel reads one struct and writes the other during the
    // call; both are as it defines them, and live until it returns.
    let result = unsafe {
        syscall(CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut answer, 0_u32)
    };
    match result {
        0 => Ok(answer.cached),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Off Linux, nobody says.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`].
#[cfg(not(target_os = "linux"))]
fn cached_pages(_: &File, _: &Range<u64>) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}
