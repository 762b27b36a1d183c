//! Files and what is in them: open, create, read, write, sync. Nothing here knows what a checkpoint is; the engines
//! transfer the bytes of shards.

use crate::error::{Error, Result};
use crate::sys::dir::{At, try_remove};
use crate::sys::inodes;
use crate::sys::seam::{Call, made};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use std::fs::{File, FileType, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

/// Creates a new file for writing. What has the name already, a link too, loses that name and keeps its
/// bytes: another process may still write to it, and it may have another name elsewhere.
///
/// With `direct`, transfers bypass the page cache and must be aligned to [`crate::limits::ALIGN`].
///
/// # Errors
/// The system's; a file system without O_DIRECT returns `EINVAL`, here or at the first write.
/// [`io::ErrorKind::AlreadyExists`] if another process creates the same name at this moment.
pub fn create(path: &Path, direct: bool) -> io::Result<File> {
    create_at(path.into(), direct)
}

/// [`create`], in an open directory perhaps.
///
/// # Errors
/// As [`create`].
pub(crate) fn create_at(at: At<'_>, direct: bool) -> io::Result<File> {
    let create_new = || made(Call::Create, at.path, || open(at, CREATE_NEW, direct));
    match create_new() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            try_remove(at)?;
            create_new()
        }
        created => created,
    }
}

const CREATE_NEW: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL);

/// Creates a file whose name is free.
///
/// # Errors
/// As [`create`]; [`io::ErrorKind::AlreadyExists`] if the name is taken.
pub(crate) fn create_new(path: &Path, direct: bool) -> io::Result<File> {
    made(Call::Create, path, || open(path, CREATE_NEW, direct))
}

/// Opens a file that is only ever locked. A lock that other hosts see needs a file that is open for writing.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] if it is not a file.
pub(crate) fn open_lock<'a>(at: impl Into<At<'a>>) -> io::Result<File> {
    let at = at.into();
    made(Call::Open, at.path, || open(at, OFlags::RDWR, false))
}

/// Creates a file that is only ever locked, whose name is free. Every user who may write to its directory may lock it.
///
/// # Errors
/// As [`create_new`].
pub(crate) fn create_lock<'a>(at: impl Into<At<'a>>) -> io::Result<File> {
    use std::os::unix::fs::PermissionsExt;
    let at = at.into();
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let file = made(Call::Create, at.path, || open(at, flags, false))?;
    if let Some(dir) = at.path.parent().and_then(|dir| dir.metadata().ok()) {
        let mode = dir.permissions().mode() & 0o666 | 0o600;
        // Some file systems keep no modes. Then this user alone may lock it.
        let _refused = rustix::fs::fchmod(&file, Mode::from_raw_mode(mode));
    }
    Ok(file)
}

/// Creates a file of an output that the user named, or empties the one that is there. Follows links.
///
/// # Errors
/// The system's.
pub(crate) fn create_or_empty(path: &Path) -> io::Result<File> {
    made(Call::Create, path, || File::create(path))
}

/// Writes a small file that is [created](create) anew, and does not sync it.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_by(path.into(), |mut file| file.write_all(bytes)).map(drop)
}

/// Adds a line to the end of a file, which is created if it is missing, and ends the line before if a kill has cut it. Does
/// not sync the file. Returns how long it is then.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] if it is not a file, or has several names.
pub(crate) fn append_line(path: &Path, line: &str) -> io::Result<u64> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND;
    let mut file = made(Call::Open, path, || open(path, flags, false))?;
    let (found, mut last) = (file.metadata()?, *b"\n");
    if found.nlink() > 1 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it has another name, elsewhere perhaps",
        ));
    }
    if let Some(at) = found.len().checked_sub(1) {
        made(Call::Read, path, || file.read_exact_at(&mut last, at))?;
    }
    let cut = if last == *b"\n" { "" } else { "\n" };
    let text = format!("{cut}{line}\n");
    made(Call::Write, path, || file.write_all(text.as_bytes()))?;
    Ok(found.len() + text.len() as u64)
}

/// Has `content` write a small file that is [created](create) anew, and syncs it.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_durably<'a>(
    at: impl Into<At<'a>>,
    content: impl FnOnce(&File) -> io::Result<()>,
) -> Result<()> {
    let at = at.into();
    let file = write_by(at, content)?;
    sync(&file).map_err(writing(at.path))
}

/// Gives a file the mode, the time of its last change and, if this process may, the owner and group that another has.
///
/// # Errors
/// The system's.
pub(crate) fn take_after(file: &File, other: &Path) -> io::Result<()> {
    use rustix::fs::{Gid, Timespec, Timestamps, Uid, fchmod, fchown, futimens};
    made(Call::Query, other, || {
        let other = std::fs::metadata(other)?;
        match fchown(file, Some(Uid::from_raw(other.uid())), Some(Gid::from_raw(other.gid()))) {
            Err(Errno::PERM) => {}
            done => done?,
        }
        fchmod(file, Mode::from_raw_mode(other.mode() & 0o7777))?;
        let changed = Timespec { tv_sec: other.mtime(), tv_nsec: other.mtime_nsec() as _ };
        Ok(futimens(file, &Timestamps { last_access: changed, last_modification: changed })?)
    })
}

/// Gives a file the permissions of the one that it will replace and, if this process may, its owner and group. Without
/// the group, the permissions that the group had go too: they would be another group's. Does nothing if there is none.
///
/// # Errors
/// The system's.
pub(crate) fn take_permissions(file: &File, replaced: &Path) -> io::Result<()> {
    use rustix::fs::{Gid, Uid, fchmod, fchown};
    /// What a file of data may have: without set-user-ID and the like.
    const PERMISSIONS: u32 = 0o777;
    const OF_GROUP: u32 = 0o070;
    made(Call::Query, file, || {
        let found = match std::fs::metadata(replaced) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let now = file.metadata()?;
        let (uid, gid) = (Uid::from_raw(found.uid()), Gid::from_raw(found.gid()));
        let owned = match (now.uid(), now.gid()) == (found.uid(), found.gid()) {
            true => Ok(()),
            false => fchown(file, Some(uid), Some(gid)).or_else(|_| fchown(file, None, Some(gid))),
        };
        let lost = if owned.is_err() { OF_GROUP } else { 0 };
        let wanted = found.mode() & PERMISSIONS & !lost;
        if now.mode() & PERMISSIONS == wanted {
            return Ok(()); // some file systems refuse every change
        }
        Ok(fchmod(file, Mode::from_raw_mode(wanted))?)
    })
}

/// Writes the start of an open file, and does not sync it.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_start(file: &File, path: &Path, bytes: &[u8]) -> Result<()> {
    let written = made(Call::Write, path, || Ok(())).and_then(|()| file.write_all_at(bytes, 0));
    written.map_err(writing(path))
}

/// Writes a part of an open file at an offset, and does not sync it.
///
/// # Errors
/// The system's.
pub(crate) fn write_at(file: &File, path: &Path, bytes: &[u8], offset: u64) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    made(Call::Write, path, || file.write_all_at(bytes, offset))
}

fn write_by(at: At<'_>, content: impl FnOnce(&File) -> io::Result<()>) -> Result<File> {
    let path = at.path;
    let file = create_at(at, false).map_err(|error| inodes::creating(path, error))?;
    // `write_all` repeats an interrupted write itself.
    let written = made(Call::Write, path, || Ok(())).and_then(|()| content(&file));
    written.map(|()| file).map_err(writing(path))
}

fn writing(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::io("writing", path, error)
}

/// Opens an existing regular file for writing and keeps its content: its blocks on the disk are
/// overwritten. Never follows a link.
///
/// # Errors
/// As [`create`].
pub fn open_write(path: &Path, direct: bool) -> io::Result<File> {
    made(Call::Open, path, || open(path, OFlags::WRONLY, direct))
}

/// Opens a regular file for reading. Never follows a link.
///
/// # Errors
/// As [`create`]; `ELOOP` for a link.
pub fn open_read<'a>(at: impl Into<At<'a>>, direct: bool) -> io::Result<File> {
    let at = at.into();
    made(Call::Open, at.path, || open(at, OFlags::RDONLY, direct))
}

/// Whether a file was not opened because its path is a symbolic link.
pub(crate) fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::ELOOP)
}

/// Whether a file was not opened because its path is something other than a file: a directory, a FIFO, a device.
pub(crate) fn is_no_file(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput && error.raw_os_error().is_none()
}

/// Whether a file was not opened because there is none: nothing has its path, or something other than a file.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    [NotFound, NotADirectory].contains(&error.kind()) || is_link(error) || is_no_file(error)
}

/// Longer files are never read into memory. A manifest of a million tensors in 100 TB has 1.5 GB.
const READ_BYTES_MAX: u64 = 4 << 30;

/// Reads a regular file. Refuses a link, and does not wait for a pipe.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] for anything but a regular file,
/// [`io::ErrorKind::FileTooLarge`] for one of more than 4 GiB.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_read(path, false)?;
    made(Call::Read, path, || {
        check_length(file.metadata()?.len(), READ_BYTES_MAX)?;
        read_to(&file, READ_BYTES_MAX)
    })
}

fn check_length(bytes: u64, bytes_max: u64) -> io::Result<()> {
    if bytes <= bytes_max {
        return Ok(());
    }
    let reason = format!("it has {bytes} bytes, and more than {bytes_max} are not read");
    Err(io::Error::new(io::ErrorKind::FileTooLarge, reason))
}

/// As [`read`], `bytes_max` bytes at most.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_start(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open_read(path, false)?;
    made(Call::Read, path, || read_to(&file, bytes_max))
}

fn read_to(file: &File, bytes_max: u64) -> io::Result<Vec<u8>> {
    // Reserved at once: growing step by step would take up to twice the memory.
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(file.metadata()?.len().min(bytes_max) as usize)?;
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file's length in bytes, and the last `N` bytes; zeros before those of a shorter file.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_end<const N: usize>(path: &Path) -> io::Result<(u64, [u8; N])> {
    let file = open_read(path, false)?;
    made(Call::Read, path, || {
        let (len, mut end) = (file.metadata()?.len(), [0; N]);
        let there = N.min(len as usize);
        file.read_exact_at(&mut end[N - there..], len - there as u64)?;
        Ok((len, end))
    })
}

/// Reads a file that the user wrote. Follows links, and does not wait for a pipe.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] for anything but a regular file or a device (`/dev/null`),
/// [`io::ErrorKind::FileTooLarge`] for more than `bytes_max`.
pub(crate) fn read_given(path: impl AsRef<Path>, bytes_max: u64) -> io::Result<Vec<u8>> {
    let path = path.as_ref();
    made(Call::Read, path, || {
        let file =
            open_file(path.into(), OFlags::RDONLY, |kind| kind.is_file() || kind.is_char_device())?;
        check_length(file.metadata()?.len(), bytes_max)?;
        read_to(&file, bytes_max)
    })
}

/// Reads a text of the kernel's (`/proc`, `/sys`).
///
/// # Errors
/// Those of [`read_given`]; [`io::ErrorKind::InvalidData`] for bytes that are not UTF-8.
pub(crate) fn read_kernel_text(path: impl AsRef<Path>) -> io::Result<String> {
    let text = String::from_utf8(read_given(path, 64 << 20)?);
    text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// What identifies this run of the machine's kernel.
///
/// # Errors
/// The system's: where there is no `/proc`.
pub fn boot_id() -> io::Result<String> {
    Ok(read_kernel_text("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// What the system knows about an open file: length, owner, mode.
///
/// # Errors
/// The system's.
pub(crate) fn look(file: &File) -> io::Result<Metadata> {
    made(Call::Look, file, || file.metadata())
}

fn open<'a>(at: impl Into<At<'a>>, flags: OFlags, direct: bool) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW;
    let flags = if direct { flags | direct_flag()? } else { flags };
    open_file(at.into(), flags, FileType::is_file)
}

/// Opens a file of a kind that fits, or the one that a link leads to unless the flags forbid it.
fn open_file(at: At<'_>, flags: OFlags, fits: impl Fn(&FileType) -> bool) -> io::Result<File> {
    // NONBLOCK: open() does not wait for the other end of a FIFO that has the file's name.
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let mode = Mode::from_raw_mode(0o666);
    let no_file = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    let file = match openat(at.dir, at.name, flags, mode) {
        // A socket, or a device without a driver.
        Err(Errno::NXIO | Errno::NODEV) => return Err(no_file()),
        opened => File::from(opened?),
    };
    if !fits(&file.metadata()?.file_type()) {
        return Err(no_file());
    }
    // io_uring completes transfers of a NONBLOCK file with EAGAIN.
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
    let flags = || made(Call::Query, file, || Ok(rustix::fs::fcntl_getfl(file)?));
    direct_flag().is_ok_and(|direct| flags().is_ok_and(|flags| flags.contains(direct)))
}

/// Makes a file's content durable.
///
/// # Errors
/// The system's.
pub(crate) fn sync(file: &File) -> io::Result<()> {
    made(Call::Sync, file, || file.sync_all())?;
    made(Call::Synced, file, || Ok(()))
}

/// A file's POSIX ACL as the kernel stores it; `None` if it has none.
///
/// # Errors
/// The system's.
#[cfg(target_os = "linux")]
pub(crate) fn acl(file: &File) -> io::Result<Option<Vec<u8>>> {
    use rustix::io::Errno;
    /// The longest value that the kernel stores (XATTR_SIZE_MAX).
    const BYTES_MAX: usize = 65_536;
    let mut acl = vec![0; BYTES_MAX];
    let name = "system.posix_acl_access";
    let len = made(Call::Query, file, || match rustix::fs::fgetxattr(file, name, &mut acl[..]) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        len => Ok(Some(len?)),
    })?;
    Ok(len.map(|len| {
        acl.truncate(len);
        acl
    }))
}

/// Off Linux, ACLs are not compared.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub(crate) fn acl(_: &File) -> io::Result<Option<Vec<u8>>> {
    Ok(None)
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
/// announced; O_DIRECT may work all the same.
#[cfg(target_os = "linux")]
pub fn dio_align(path: &Path) -> Option<DioAlign> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let ask = || Ok(statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::DIOALIGN)?);
    let found = made(Call::Query, path, ask).ok()?;
    let announced = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    (announced && found.stx_dio_offset_align != 0)
        .then_some(DioAlign { mem: found.stx_dio_mem_align, offset: found.stx_dio_offset_align })
}

/// What a file's system announces for direct I/O: nothing, off Linux.
#[cfg(not(target_os = "linux"))]
pub fn dio_align(_: &Path) -> Option<DioAlign> {
    None
}

/// Whether btrfs keeps checksums of a file's blocks and copies them on write. Since Linux 6.14, direct writes
/// to such files go through the page cache (<https://btrfs.readthedocs.io/en/latest/Checksumming.html>), at
/// ten times the CPU time.
#[cfg(all(feature = "cli", target_os = "linux"))]
pub(crate) fn is_checksummed_by_btrfs(path: &Path) -> bool {
    use nix::sys::statfs::{BTRFS_SUPER_MAGIC, fstatfs};
    use rustix::fs::{IFlags, ioctl_getflags};
    let Ok(file) = open_read(path, false) else { return false };
    let system = made(Call::Query, &file, || Ok(fstatfs(&file)?));
    system.is_ok_and(|of| of.filesystem_type() == BTRFS_SUPER_MAGIC)
        && ioctl_getflags(&file).is_ok_and(|flags| !flags.contains(IFlags::NOCOW))
}

/// Off Linux there is no btrfs.
#[cfg(all(feature = "cli", not(target_os = "linux")))]
pub(crate) fn is_checksummed_by_btrfs(_: &Path) -> bool {
    false
}

/// Whether this process may not open a device for reading and writing.
#[cfg(feature = "cli")]
pub(crate) fn is_denied(device: &Path) -> bool {
    let open = || File::options().read(true).write(true).open(device);
    made(Call::Open, device, open)
        .is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Drops a file's pages from the page cache, so that a benchmark reads from the disk. Pages
/// not yet written stay: sync first. Does nothing off Linux.
///
/// # Errors
/// The system's.
pub fn drop_page_cache(file: &File) -> io::Result<()> {
    made(Call::Query, file, || {
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use crate::sys::file::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn open_refuses_links_and_anything_but_files() {
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
    fn create_makes_a_new_file_whatever_had_the_name() {
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
    fn opened_file_is_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let file = create(&dir.path().join("file"), false).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        assert!(!is_direct(&file));
    }
}
