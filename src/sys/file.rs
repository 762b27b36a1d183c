//! Opening, preallocating, cutting and syncing: what is done to a file besides moving its bytes.
//! Plain system calls; nothing here knows of checkpoints.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Creates a new file for writing. What has the name already, a link too, loses that name and keeps its
/// bytes: another process may still write to it, and it may have another name elsewhere.
///
/// With `direct`, transfers go past the page cache and must keep to [`crate::config::ALIGN`].
///
/// # Errors
/// The system's; a file system without O_DIRECT says `EINVAL`, here or only at the first write.
/// [`io::ErrorKind::AlreadyExists`] if another process creates the same name at this moment.
pub fn create(path: &Path, direct: bool) -> io::Result<File> {
    let create = || open(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, direct);
    match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            create()
        }
        created => created,
    }
}

/// Opens a regular file that is there for writing, and leaves what is in it: its blocks on the disk are
/// written over. Never follows a link.
///
/// # Errors
/// As [`create`].
pub fn open_write(path: &Path, direct: bool) -> io::Result<File> {
    open(path, OFlags::WRONLY, direct)
}

/// Opens a regular file for reading. Never follows a link.
///
/// # Errors
/// As [`create`].
pub fn open_read(path: &Path, direct: bool) -> io::Result<File> {
    open(path, OFlags::RDONLY, direct)
}

/// Swaps what two paths name, at once: nobody sees one of them missing.
///
/// # Errors
/// The system's; `EINVAL`, `ENOSYS` or `ENOTSUP` where the file system cannot.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        retry(|| renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE))
    }
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    {
        let _ = (one, other);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Raises this process' soft limit of open files if it is too low for `count` more: as far as the
/// hard limit goes, and for good. A checkpoint of thousands of processes has as many files, and the
/// soft limit is low only for the sake of `select`.
pub fn make_room_for(count: usize) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    /// Files that the process has besides: more are no reason to raise the limit, but are allowed for.
    const OTHERS: (u64, u64) = (256, 1024);
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < count as u64 + OTHERS.0 && soft < hard {
        let wanted = hard.min(count as u64 + OTHERS.1);
        // Where it fails, opening does so too, with a remedy.
        if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
            tracing::debug!(%error, wanted, "the limit of open files stays as it is");
        }
    }
}

fn open(path: &Path, flags: OFlags, direct: bool) -> io::Result<File> {
    // NONBLOCK, so that a FIFO in the place of the file cannot hold us in open().
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let flags = if direct { flags | direct_flag()? } else { flags };
    let mode = Mode::from_raw_mode(0o666);
    let file = File::from(retry(|| rustix::fs::open(path, flags, mode))?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    // io_uring takes NONBLOCK for a wish to get EAGAIN.
    let now = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, now - OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(target_os = "linux")]
fn direct_flag() -> io::Result<OFlags> {
    Ok(OFlags::DIRECT)
}

#[cfg(not(target_os = "linux"))]
fn direct_flag() -> io::Result<OFlags> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "no O_DIRECT on this platform"))
}

/// Whether a file was opened with O_DIRECT.
pub fn is_direct(file: &File) -> bool {
    direct_flag()
        .is_ok_and(|direct| rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(direct)))
}

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
    // A file that is to be written over. Looking through its blocks for holes takes a while (30 ms a
    // GB in memory), and one that has as many as it needs has none to speak of.
    if allocated(file)? >= len {
        file.set_len(len)?;
        return Ok(Preallocated::Allocated);
    }
    match allocate(file, len) {
        Err(error) if is_unsupported(&error) => {
            if free(file)? < len {
                return Err(rustix::io::Errno::NOSPC.into());
            }
            file.set_len(len)?;
            Ok(Preallocated::SizeOnly)
        }
        result => result.map(|()| Preallocated::Allocated),
    }
}

/// A file may be as long as that: what goes past RLIMIT_FSIZE gets a signal, SIGXFSZ, which ends a process
/// that does not ignore it, as few but Python do.
fn check_limit(len: u64) -> io::Result<()> {
    use nix::sys::resource::{Resource, getrlimit};
    match getrlimit(Resource::RLIMIT_FSIZE) {
        Ok((limit, _)) if limit < len => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// Bytes of disk that a file has.
///
/// # Errors
/// The system's.
pub fn allocated(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks().saturating_mul(512))
}

/// Bytes that are free, for this user, on the file system of a file.
///
/// # Errors
/// The system's.
pub fn free(file: &File) -> io::Result<u64> {
    let vfs = rustix::fs::fstatvfs(file)?;
    // A file system that reports no size at all reports no free space either.
    Ok(if vfs.f_blocks > 0 { vfs.f_bavail.saturating_mul(vfs.f_frsize) } else { u64::MAX })
}

#[cfg(target_os = "linux")]
fn allocate(file: &File, len: u64) -> io::Result<()> {
    retry(|| rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len))
}

#[cfg(not(target_os = "linux"))]
fn allocate(_: &File, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn is_unsupported(error: &io::Error) -> bool {
    use rustix::io::Errno;
    error.kind() == io::ErrorKind::Unsupported
        || [Errno::OPNOTSUPP, Errno::NOSYS]
            .iter()
            .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Cuts a file to its length in bytes: the padding of a direct write's last block goes.
///
/// # Errors
/// The system's.
pub fn finish(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)
}

/// Renames a file to a name that is free.
///
/// # Errors
/// The system's; [`io::ErrorKind::AlreadyExists`] if the name is there. A file system that cannot refuse that by
/// itself (`EINVAL`) is asked first, and another process may come in between.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match rename_if_free(from, to) {
        Err(error) if cannot_refuse(&error) => match std::fs::symlink_metadata(to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
            Err(error) => Err(error),
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        },
        renamed => renamed,
    }
}

#[cfg(target_os = "linux")]
fn rename_if_free(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    retry(|| renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE))
}

#[cfg(not(target_os = "linux"))]
fn rename_if_free(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn cannot_refuse(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput || is_unsupported(error)
}

/// Makes the names in a directory durable: files created, renamed and removed.
///
/// # Errors
/// The system's. A file system that has no such operation (`EINVAL`) is taken to need none.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = retry(|| rustix::fs::open(path, flags, Mode::empty()))?;
    match retry(|| rustix::fs::fsync(&dir)) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}

/// The alignment that direct transfers of a file need, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DioAlign {
    /// Of the memory address.
    pub mem: u32,
    /// Of file offset and length.
    pub offset: u32,
}

/// What a file's system announces for direct I/O (`statx`, Linux 6.1). `None` where nothing is
/// announced, though O_DIRECT may work all the same.
#[cfg(target_os = "linux")]
pub fn dio_align(path: &Path) -> Option<DioAlign> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::DIOALIGN).ok()?;
    let announced = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    (announced && found.stx_dio_offset_align != 0)
        .then_some(DioAlign { mem: found.stx_dio_mem_align, offset: found.stx_dio_offset_align })
}

/// What a file's system announces for direct I/O: nothing, off Linux.
#[cfg(not(target_os = "linux"))]
pub fn dio_align(_: &Path) -> Option<DioAlign> {
    None
}

/// Asks the system to forget a file's cached pages, so that a benchmark reads from the disk. Pages
/// not yet written stay: sync first. A no-op off Linux.
///
/// # Errors
/// The system's.
pub fn drop_page_cache(file: &File) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    let _ = file;
    Ok(())
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => continue,
            result => return result.map_err(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::file::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_and_things_that_are_no_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "x").unwrap();
        symlink(path("file"), path("link")).unwrap();
        assert!(open_read(&path("link"), false).is_err());
        assert!(open_write(&path("link"), false).is_err());
        assert!(open_read(dir.path(), false).is_err());
        assert!(create(dir.path(), false).is_err());
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_read(&path("fifo"), false).is_err());
        assert!(open_write(&path("fifo"), false).is_err());
        assert!(open_write(&path("nothing"), false).is_err());
        assert_eq!(std::fs::read(path("file")).unwrap(), b"x");
    }

    #[test]
    fn a_created_file_is_new_whatever_had_its_name() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "x").unwrap();
        std::fs::hard_link(path("file"), path("same")).unwrap();
        symlink(path("file"), path("link")).unwrap();
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["new", "same", "link", "fifo"] {
            create(&path(name), false).unwrap().write_all(b"mine").unwrap();
            assert_eq!(std::fs::read(path(name)).unwrap(), b"mine");
            assert!(path(name).symlink_metadata().unwrap().is_file());
        }
        assert_eq!(std::fs::read(path("file")).unwrap(), b"x");
    }

    #[test]
    fn a_preallocated_file_has_its_length_and_is_cut_to_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = create(&path, false).unwrap();
        preallocate(&file, 0).unwrap();
        preallocate(&file, 100_000).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 100_000);
        finish(&file, 12_345).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 12_345);
        sync_dir(dir.path()).unwrap();
        drop_page_cache(&file).unwrap();
    }

    #[test]
    fn an_opened_file_blocks_like_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let file = create(&dir.path().join("file"), false).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        assert!(!is_direct(&file));
    }

    #[test]
    fn more_than_the_device_holds_is_refused_before_a_byte_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = create(&dir.path().join("file"), false).unwrap();
        let error = preallocate(&file, 1 << 50).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge),
            "{error}"
        );
    }
}
