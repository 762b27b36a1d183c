//! The files of a ring: in the kernel's table, which saves a look-up and a reference count at each
//! operation, or by descriptor when the table is refused or full.

use crate::engine::FileId;
use crate::engine::file_table::FileTable;
use io_uring::IoUring;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// More files than a save or load has open at once; counts against `ulimit -n`.
const TABLE: u32 = 256;

pub(super) struct Files {
    /// Entries of the kernel's table; 0 without one. A file in it has the same number in both.
    table: usize,
    slots: FileTable<Slot>,
}

pub(super) struct Slot {
    pub(super) file: Arc<File>,
    /// Whether the file is in the kernel's table.
    pub(super) registered: bool,
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
        Self { table: table.map_or(0, |()| TABLE as usize), slots: FileTable::new() }
    }

    /// Takes the lowest free number, so that the table is used as far as it goes.
    pub(super) fn attach(&mut self, ring: &IoUring, file: Arc<File>) -> FileId {
        let table = self.table;
        self.slots.insert_with(|number| {
            let registered = (number as usize) < table
                && ring.submitter().register_files_update(number, &[file.as_raw_fd()]).is_ok();
            Slot { file, registered }
        })
    }

    pub(super) fn detach(&mut self, ring: &IoUring, id: FileId) {
        if self.slots.remove(id).is_some_and(|slot| slot.registered) {
            // Were it to fail, the kernel would keep the file until the number is used again.
            let _: io::Result<usize> = ring.submitter().register_files_update(id.0, &[-1]);
        }
    }

    pub(super) fn get(&self, id: FileId) -> Option<&Slot> {
        self.slots.get(id)
    }
}
