//! The files of a ring: in the kernel's table, which saves a look-up and a reference count at each
//! operation, or by descriptor when the table is refused or full.

use crate::engine::FileId;
use crate::sys::file_system::is_in_memory;
use io_uring::IoUring;
use slab::Slab;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// More files than a save or load has open at once; counts against `ulimit -n`.
const TABLE: u32 = 256;

pub(super) struct Files {
    /// Free entries of the kernel's table; none without one.
    free: Vec<u32>,
    attached: Slab<AttachedFile>,
}

pub(super) struct AttachedFile {
    pub(super) file: Arc<File>,
    /// Its entry in the kernel's table, if it has one.
    pub(super) entry: Option<u32>,
    /// Whether its bytes are memory. The kernel then copies each transfer while we submit it, one after the other.
    pub(super) in_memory: bool,
}

impl Files {
    pub(super) fn new(ring: &IoUring) -> Self {
        // Before Linux 5.19 there is no call for a sparse table, but -1 makes an empty entry.
        let table = ring
            .submitter()
            .register_files_sparse(TABLE)
            .or_else(|_| ring.submitter().register_files(&[-1; TABLE as usize]));
        if let Err(error) = &table {
            tracing::debug!(%error, "no table of registered files: descriptors are used instead");
        }
        let free = table.map_or_else(|_| Vec::new(), |()| (0..TABLE).rev().collect());
        Self { free, attached: Slab::new() }
    }

    pub(super) fn attach(&mut self, ring: &IoUring, file: Arc<File>) -> FileId {
        let entry = self.free.pop().filter(|&entry| {
            ring.submitter().register_files_update(entry, &[file.as_raw_fd()]).is_ok()
        });
        let in_memory = is_in_memory(&file);
        FileId(self.attached.insert(AttachedFile { file, entry, in_memory }) as u32)
    }

    pub(super) fn detach(&mut self, ring: &IoUring, id: FileId) {
        if let Some(entry) = self.attached.try_remove(id.key()).and_then(|file| file.entry) {
            // Were it to fail, the kernel would keep the file until the entry is used again.
            let _: io::Result<usize> = ring.submitter().register_files_update(entry, &[-1]);
            self.free.push(entry);
        }
    }

    pub(super) fn get(&self, id: FileId) -> Option<&AttachedFile> {
        self.attached.get(id.key())
    }
}
