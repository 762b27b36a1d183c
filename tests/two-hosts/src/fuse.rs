//! The kernel's requests, passed to the host's [`Client`].

use crate::client::Client;
use crate::server::Answering;
use crate::tree::{Attributes, Tree};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The kernel remembers nothing by itself: how old an answer may be is the [`Client`]'s matter.
const NEVER: Duration = Duration::ZERO;
const BLOCK_BYTES: u32 = 4096;
const BLOCKS: u64 = 1 << 24;

/// A host's mount.
pub struct Mounted {
    pub server: Arc<Answering>,
    pub host: usize,
    pub shared_locks: bool,
}

impl Mounted {
    fn answer<T>(&self, answer: impl FnOnce(&mut Client, &mut Tree) -> T) -> T {
        self.server.answer(self.host, answer)
    }

    /// What the kernel sends when it likes, which is no program's turn.
    fn note(&self, note: impl FnOnce(&mut Client)) {
        self.server.change(|world| note(&mut world.clients[self.host]));
    }
}

/// Attributes as the kernel takes them. Times count the changes of the tree, in seconds.
fn attr(found: Attributes) -> FileAttr {
    let time: SystemTime = UNIX_EPOCH + Duration::from_secs(1_600_000_000 + found.changed);
    FileAttr {
        ino: INodeNo(found.number),
        size: found.bytes,
        blocks: found.bytes.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind: found.kind,
        perm: found.mode,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

fn entry(reply: ReplyEntry, found: Result<Attributes, Errno>) {
    match found {
        Ok(found) => reply.entry(&NEVER, &attr(found), Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn attributes(reply: ReplyAttr, found: Result<Attributes, Errno>) {
    match found {
        Ok(found) => reply.attr(&NEVER, &attr(found)),
        Err(error) => reply.error(error),
    }
}

fn opened(reply: ReplyOpen, handle: Result<u64, Errno>) {
    match handle {
        Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
        Err(error) => reply.error(error),
    }
}

fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it, the kernel keeps locks to itself.
        let locks = InitFlags::FUSE_POSIX_LOCKS;
        match self.shared_locks.then(|| config.add_capabilities(locks)) {
            Some(Err(_)) => Err(io::ErrorKind::Unsupported.into()),
            _ => Ok(()),
        }
    }

    fn lookup(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(reply, self.answer(|client, tree| client.find(tree, dir.0, name)));
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        attributes(reply, self.answer(|client, tree| client.attributes(tree, number.0)));
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        bytes: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = |client: &mut Client, tree: &mut Tree| {
            client.set_attributes(tree, number.0, (mode, bytes))
        };
        attributes(reply, self.answer(set));
    }

    fn mkdir(
        &self,
        _: &Request,
        dir: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let make = |client: &mut Client, tree: &mut Tree| {
            client.make_dir(tree, (dir.0, name), mode & !umask)
        };
        entry(reply, self.answer(make));
    }

    fn create(
        &self,
        _: &Request,
        dir: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let create = |client: &mut Client, tree: &mut Tree| {
            client.create_file(tree, (dir.0, name), mode & !umask, flags)
        };
        match self.answer(create) {
            Ok((found, handle)) => {
                let (handle, flags) = (FileHandle(handle), FopenFlags::empty());
                reply.created(&NEVER, &attr(found), Generation(0), handle, flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        opened(reply, self.answer(|client, tree| client.open(tree, number.0, flags.0)));
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.answer(|client, tree| client.read(tree, number.0, (offset, bytes))) {
            Ok(content) => reply.data(&content),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        content: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let write = |client: &mut Client, tree: &mut Tree| {
            client.write(tree, (number.0, handle.0), offset, content)
        };
        match self.answer(write) {
            Ok(()) => reply.written(content.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        empty(reply, self.answer(|client, tree| client.close(tree, handle.0)));
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(reply, self.answer(|client, _| client.sync(handle.0)));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.note(|client| client.release(handle.0));
        reply.ok();
    }

    fn setlk(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        kind: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let lock =
            |client: &mut Client, tree: &mut Tree| client.lock(tree, (number.0, handle.0), kind);
        empty(reply, self.answer(lock));
    }

    fn unlink(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let kind = FileType::RegularFile;
        empty(reply, self.answer(|client, tree| client.remove(tree, (dir.0, name), kind)));
    }

    fn rmdir(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let kind = FileType::Directory;
        empty(reply, self.answer(|client, tree| client.remove(tree, (dir.0, name), kind)));
    }

    fn rename(
        &self,
        _: &Request,
        dir: INodeNo,
        name: &OsStr,
        to_dir: INodeNo,
        to_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((dir.0, name), (to_dir.0, to_name));
        let renamed = self.answer(|client, tree| match flags.is_empty() {
            true => client.rename(tree, from, to),
            false => Err(Errno::EINVAL),
        });
        empty(reply, renamed);
    }

    fn opendir(&self, _: &Request, dir: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        opened(reply, self.answer(|client, tree| client.open_dir(tree, dir.0)));
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listing = self.answer(|client, _| client.listing(handle.0).map(<[_]>::to_vec));
        let listing = match listing {
            Ok(listing) => listing,
            Err(error) => return reply.error(error),
        };
        for (place, (name, number, kind)) in (1..).zip(&listing).skip(offset as usize) {
            if reply.add(INodeNo(*number), place, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.note(|client| client.release_dir(handle.0));
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCK_BYTES, 255, BLOCK_BYTES);
    }
}
