//! What the page cache holds of a file, and reading that.
//!
//! A read with RWF_NOWAIT alone cannot tell: since Linux 5.10 it starts the kernel's readahead of what is missing, and
//! the direct read that follows would read that a second time.
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
    if range.is_empty() {
        return Held::All;
    }
    let pages = range.end.div_ceil(page_bytes()) - range.start / page_bytes();
    let cached = made(Call::PageCache, file, || cached_pages(file, range))
        .or_else(|_| made(Call::PageCache, file, || resident_pages(file, range)));
    match cached {
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
/// The system's: `ENOSYS` before Linux 6.5; `EPERM` in some containers, and on newer kernels for a file that this process
/// neither owns nor may write to.
#[cfg(target_os = "linux")]
fn cached_pages(file: &File, range: &Range<u64>) -> io::Result<u64> {
    use nix::libc::{c_long, syscall};
    use std::os::fd::AsRawFd;

    /// The number on all architectures that have the numbers of asm-generic, which libc does not know for each.
    const CACHESTAT: c_long = 451;

    /// `struct cachestat_range`.
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
    let mut answer = Answer::default();
    // SAFETY: the descriptor is open as long as `file` is. The kernel reads one struct and writes the other during the
    // call; both are as it defines them, and live until it returns.
    let result =
        unsafe { syscall(CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut answer, 0_u32) };
    match result {
        0 => Ok(answer.cached),
        _ => Err(io::Error::last_os_error()),
    }
}

/// [`cached_pages`] by `mincore`, for older kernels: it needs a mapping, which is never looked into.
///
/// # Errors
/// The system's; [`io::ErrorKind::PermissionDenied`] for another user's file, of which `mincore` says that every page is
/// there (Linux 5.2).
#[cfg(target_os = "linux")]
fn resident_pages(file: &File, range: &Range<u64>) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let found = file.metadata()?;
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let start = range.start / page_bytes() * page_bytes();
    let len = range.end.min(found.len()).saturating_sub(start) as usize;
    if len == 0 {
        return Ok(0);
    }
    let mapped = memmap2::MmapOptions::new().offset(start).len(len).map_raw_read_only(file)?;
    let mut pages = vec![0_u8; len.div_ceil(page_bytes() as usize)];
    // SAFETY: the range is mapped until `mapped` is dropped, and begins at a page. The kernel writes a byte for each of
    // its pages, for which the vector has room.
    let result =
        unsafe { nix::libc::mincore(mapped.as_mut_ptr().cast(), len, pages.as_mut_ptr().cast()) };
    match result {
        0 => Ok(pages.iter().filter(|page| **page & 1 != 0).count() as u64),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Off Linux, nobody says.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`].
#[cfg(not(target_os = "linux"))]
fn resident_pages(_: &File, _: &Range<u64>) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Off Linux, nobody says.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`].
#[cfg(not(target_os = "linux"))]
fn cached_pages(_: &File, _: &Range<u64>) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use crate::sys::file::drop_page_cache;
    use crate::sys::page_cache::*;
    use crate::sys::seam::{Outcome, on_thread};
    use nix::libc::ENOSYS;

    const BYTES: u64 = 1 << 20;

    /// A file on a disk of which the page cache holds the first half, and that does no readahead; `None` if the page
    /// cache does not forget it, as in memory.
    fn half_warm() -> Option<File> {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::io::Write::write_all(&mut file, &vec![7; BYTES as usize]).unwrap();
        file.sync_all().unwrap();
        drop_page_cache(&file).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        read(&file, &mut vec![0; BYTES as usize / 2], 0).unwrap();
        (resident_pages(&file, &(0..BYTES)).unwrap() < BYTES / page_bytes()).then_some(file)
    }

    fn assert_half_is_held(file: &File) {
        assert_eq!(held(file, &(0..BYTES / 2)), Held::All);
        assert_eq!(held(file, &(1..BYTES / 2 - 1)), Held::All);
        assert_eq!(held(file, &(0..BYTES)), Held::Part);
        assert_eq!(held(file, &(BYTES / 2..BYTES)), Held::Nothing);
        assert_eq!(held(file, &(5..5)), Held::All);
        // Beyond its end there is nothing to hold.
        assert_ne!(held(file, &(0..2 * BYTES)), Held::All);
        assert_eq!(held(file, &(2 * BYTES..3 * BYTES)), Held::Nothing);
    }

    #[test]
    fn page_cache_says_what_it_holds() {
        if let Some(file) = half_warm() {
            assert_half_is_held(&file);
        }
    }

    #[test]
    fn without_cachestat_mincore_says_the_same() {
        let Some(file) = half_warm() else { return };
        // Of each question, the first call.
        let _no_cachestat = on_thread(|number, _, _| match number % 2 {
            1 => Outcome::Fail(ENOSYS),
            _ => Outcome::Pass,
        });
        assert_half_is_held(&file);
    }

    #[test]
    fn without_either_nothing_counts_as_held() {
        let Some(file) = half_warm() else { return };
        let _neither = on_thread(|_, _, _| Outcome::Fail(ENOSYS));
        assert_eq!(held(&file, &(0..BYTES / 2)), Held::Nothing);
    }
}
