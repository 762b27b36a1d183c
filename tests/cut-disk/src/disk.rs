//! The disk: a file of a FUSE file system, with a cache that a cut of the power loses.

use fastrand::Rng;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// The file's name and number.
pub(crate) const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);

/// The kernel may remember for as long as it likes: name and length never change.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// What a disk writes whole or not at all.
const SECTOR: usize = 512;

/// What is on a disk, and what is only in its cache.
struct Content {
    /// As of the last flush.
    stable: Vec<u8>,
    /// As reads see it.
    seen: Vec<u8>,
    /// Writes since the last flush.
    cached: Vec<(usize, Vec<u8>)>,
}

impl Content {
    fn write(&mut self, offset: usize, data: &[u8]) {
        self.seen[offset..offset + data.len()].copy_from_slice(data);
        self.cached.push((offset, data.to_vec()));
    }

    fn flush(&mut self) {
        for (offset, data) in self.cached.drain(..) {
            self.stable[offset..offset + data.len()].copy_from_slice(&data);
        }
    }

    /// Loses writes of the cache.
    fn lose(&mut self, random: &mut Rng) {
        let survive = [0.0, 0.5, 0.9, 1.0][random.usize(..4)];
        let cached = std::mem::take(&mut self.cached);
        for (offset, mut data) in cached.iter().cloned() {
            let lost = random.f64() >= survive;
            if random.u8(..16) == 0 && survive < 1.0 {
                data.truncate(random.usize(..=data.len() / SECTOR) * SECTOR);
            } else if lost {
                data.clear();
            }
            self.stable[offset..offset + data.len()].copy_from_slice(&data);
        }
        // Only these differ from what reads saw.
        for (offset, data) in cached {
            let range = offset..offset + data.len();
            self.seen[range.clone()].copy_from_slice(&self.stable[range]);
        }
    }
}

/// A disk while it is plugged in.
pub(crate) struct Disk {
    content: Arc<Mutex<Content>>,
    _session: BackgroundSession,
}

/// Whether there is power. Several disks may share it.
pub(crate) type Power = Arc<AtomicBool>;

impl Disk {
    /// A disk of so many bytes, as the file [`NAME`] in an empty directory.
    pub(crate) fn new(bytes: u64, power: Power, at: &Path) -> io::Result<Self> {
        let zeros = || vec![0; bytes as usize];
        let content = Content { stable: zeros(), seen: zeros(), cached: Vec::new() };
        let content = Arc::new(Mutex::new(content));
        let served = Served { bytes, power, content: Arc::clone(&content) };
        let _session = fuser::spawn_mount(served, at, &Config::default())?;
        Ok(Self { content, _session })
    }

    /// After a cut, before the power comes back.
    pub(crate) fn lose(&self, random: &mut Rng) {
        lock(&self.content).lose(random);
    }
}

fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers the kernel.
struct Served {
    bytes: u64,
    power: Power,
    content: Arc<Mutex<Content>>,
}

impl Served {
    fn attributes(&self, of: INodeNo) -> FileAttr {
        let (kind, size) = match of == FILE {
            true => (FileType::RegularFile, self.bytes),
            false => (FileType::Directory, 0),
        };
        FileAttr {
            ino: of,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The content, while there is power.
    fn powered(&self) -> Result<MutexGuard<'_, Content>, Errno> {
        let content = lock(&self.content);
        if self.power.load(SeqCst) { Ok(content) } else { Err(Errno::EIO) }
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&FOREVER, &self.attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &self.attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Nothing of the file may stay in the page cache: a cut would not lose it.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let from = offset.min(self.bytes) as usize;
        let to = (offset + u64::from(size)).min(self.bytes) as usize;
        match self.powered() {
            Ok(content) => reply.data(&content.seen[from..to]),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset + data.len() as u64 > self.bytes {
            return reply.error(Errno::ENOSPC);
        }
        match self.powered() {
            Ok(mut content) => {
                content.write(offset as usize, data);
                reply.written(data.len() as u32);
            }
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.powered() {
            Ok(mut content) => {
                content.flush();
                reply.ok();
            }
            Err(error) => reply.error(error),
        }
    }
}
