//! The disk space of files: reserve, count, cut.

use crate::error::{Shortage, is_unsupported};
use crate::sys::file::look;
use crate::sys::rlimit::limits;
use crate::sys::seam::{Call, made};
use nix::sys::resource::Resource;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What [`preallocate`] could do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preallocated {
    /// Every block is reserved: writes neither extend the file nor run out of space.
    Allocated,
    /// The file system cannot reserve: the file has its length, and there was enough free space.
    SizeOnly,
}

/// Gives a file its final length, with its blocks reserved where the file system can do that.
/// Writes that do not extend a file need not be handed to the kernel's worker threads.
///
/// # Errors
/// `ENOSPC` before a byte is written, `EFBIG` for more than this process may write; the system's otherwise.
pub fn preallocate(file: &File, len: u64) -> io::Result<Preallocated> {
    if len == 0 {
        return Ok(Preallocated::Allocated);
    }
    check_limit(len)?;
    // A recycled file. Searching its blocks for holes takes 30 ms per GB in memory, and a file with
    // as many blocks as it needs has hardly any holes.
    if allocated(file)? >= len {
        finish(file, len)?;
        return Ok(Preallocated::Allocated);
    }
    match allocate(file, 0, len) {
        Err(error) if is_unsupported(&error) => {
            if free(file)? < len {
                return Err(rustix::io::Errno::NOSPC.into());
            }
            finish(file, len)?;
            Ok(Preallocated::SizeOnly)
        }
        result => result.map(|()| Preallocated::Allocated),
    }
}

/// Lengthens a file whose final length is not known, with the new blocks reserved where the file system can do that.
/// Otherwise the file stays as it is, and grows as it is written.
///
/// # Errors
/// As for [`preallocate`].
pub(crate) fn extend(file: &File, from: u64, to: u64) -> io::Result<Preallocated> {
    check_limit(to)?;
    match allocate(file, from, to - from) {
        Err(error) if is_unsupported(&error) => Ok(Preallocated::SizeOnly),
        done => done.map(|()| Preallocated::Allocated),
    }
}

/// Checks RLIMIT_FSIZE. A write beyond it raises SIGXFSZ, which ends every process that does not ignore the
/// signal, and few do except Python.
///
/// # Errors
/// `EFBIG`.
pub(crate) fn check_limit(len: u64) -> io::Result<()> {
    match limits(Resource::RLIMIT_FSIZE) {
        Ok((limit, _)) if limit < len => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// The bytes that files need and the bytes that their file system has for them, if it is full. Looks while the open
/// files still hold what they got of it.
pub(crate) fn shortage<'a>(
    error: &io::Error,
    needed: u64,
    open: impl Iterator<Item = &'a File> + Clone,
) -> Option<Shortage> {
    if error.kind() != io::ErrorKind::StorageFull {
        return None;
    }
    let last = open.clone().last()?;
    let held: u64 = open.map(|file| allocated(file).unwrap_or_default()).sum();
    let free = free(last).ok()?.saturating_add(held);
    // Otherwise something else took the space: the file system's own needs, or other writers.
    (free < needed).then_some(Shortage::Bytes { needed, free })
}

/// Bytes of disk that a file has.
///
/// # Errors
/// The system's.
pub fn allocated(file: &File) -> io::Result<u64> {
    Ok(look(file)?.blocks().saturating_mul(512))
}

/// Bytes of a file that were written, without those that are only reserved. If the file system does not report holes,
/// this is the file's length.
///
/// # Errors
/// The system's.
#[cfg(all(target_os = "linux", feature = "cli"))]
pub(crate) fn written(file: &File) -> io::Result<u64> {
    use rustix::fs::{SeekFrom, seek};
    let len = look(file)?.len();
    let find = |from| {
        let found = made(Call::Query, file, || Ok(seek(file, from)?));
        found.or_else(|error| match error.raw_os_error() {
            Some(nix::libc::ENXIO) => Ok(len), // there is no more
            _ => Err(error),
        })
    };
    let (mut at, mut written) = (0, 0);
    while at < len {
        let begin = find(SeekFrom::Data(at))?;
        at = find(SeekFrom::Hole(begin.min(len)))?.max(begin);
        written += at - begin;
    }
    Ok(written)
}

/// Off Linux, this is the file's length.
#[cfg(all(not(target_os = "linux"), feature = "cli"))]
pub(crate) fn written(file: &File) -> io::Result<u64> {
    Ok(look(file)?.len())
}

/// Bytes that are free, for this user, on the file system of a file.
///
/// # Errors
/// The system's.
pub fn free(file: &File) -> io::Result<u64> {
    // Without a size there is no telling: all there is.
    made(Call::Query, file, || Ok(free_of(&rustix::fs::fstatvfs(file)?).unwrap_or(u64::MAX)))
}

/// Bytes that are free, for this user, on the file system of a path; `None` if it reports no size.
///
/// # Errors
/// The system's.
pub(crate) fn free_at(path: &Path) -> io::Result<Option<u64>> {
    made(Call::Query, path, || Ok(free_of(&rustix::fs::statvfs(path)?)))
}

fn free_of(vfs: &rustix::fs::StatVfs) -> Option<u64> {
    (vfs.f_blocks > 0).then(|| vfs.f_bavail.saturating_mul(vfs.f_frsize))
}

#[cfg(target_os = "linux")]
fn allocate(file: &File, from: u64, len: u64) -> io::Result<()> {
    let flags = rustix::fs::FallocateFlags::empty();
    made(Call::Allocate, file, || Ok(rustix::fs::fallocate(file, flags, from, len)?))
}

#[cfg(not(target_os = "linux"))]
fn allocate(_: &File, _: u64, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Cuts a file to its length in bytes: removes the padding of a direct write's last block.
///
/// # Errors
/// The system's.
pub fn finish(file: &File, len: u64) -> io::Result<()> {
    made(Call::Cut, file, || file.set_len(len))
}

#[cfg(test)]
mod tests {
    use crate::sys::file::create;
    use crate::sys::space::*;

    #[test]
    fn preallocated_file_has_its_length_and_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = create(&path, false).unwrap();
        preallocate(&file, 0).unwrap();
        preallocate(&file, 100_000).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 100_000);
        finish(&file, 12_345).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 12_345);
        crate::sys::dir::sync(dir.path()).unwrap();
        crate::sys::file::drop_page_cache(&file).unwrap();
    }

    #[test]
    fn preallocate_refuses_more_than_the_disk_has() {
        let dir = tempfile::tempdir().unwrap();
        let file = create(&dir.path().join("file"), false).unwrap();
        let error = preallocate(&file, 1 << 50).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge),
            "{error}"
        );
    }
}
