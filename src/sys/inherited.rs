//! Which of this process' descriptors a forked child is to close. It inherits them all: files that
//! are removed later would keep their room on the disk, and directories their lock, until it ends.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};

/// Of so many, no more are noted: a child then keeps the others.
const NOTED_MAX: usize = 4096;
const FREE: RawFd = -1;

// Not behind a lock: another thread may hold it at the moment of the fork.
static NOTED: [AtomicI32; NOTED_MAX] = [const { AtomicI32::new(FREE) }; NOTED_MAX];
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A note of an open descriptor. To be dropped before the descriptor is closed: its number may be
/// another file's at once.
#[derive(Debug)]
pub struct Inherited(Option<usize>);

impl Inherited {
    /// Notes a descriptor.
    pub fn note(open: &impl AsRawFd) -> Self {
        PROCESS.store(std::process::id(), SeqCst);
        let fd = open.as_raw_fd();
        let take = |slot: &AtomicI32| {
            // Looked at first: a load may have thousands of files, and an exchange is not cheap.
            slot.load(SeqCst) == FREE && slot.compare_exchange(FREE, fd, SeqCst, SeqCst).is_ok()
        };
        Self(NOTED.iter().position(take))
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            NOTED[slot].store(FREE, SeqCst);
        }
    }
}

/// In a forked child, closes what its parent had noted at that moment; in the process that noted it,
/// does nothing.
pub fn close() {
    if PROCESS.load(SeqCst) == std::process::id() {
        return;
    }
    for slot in &NOTED {
        let fd = slot.swap(FREE, SeqCst);
        if fd != FREE {
            // SAFETY: noted descriptors are open. What owns them belongs to the parent's threads,
            // which are not here, or was forgotten: nobody uses or closes them after this.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::inherited::*;
    use std::fs::File;

    #[test]
    fn a_process_does_not_close_its_own() {
        let file = File::open("/").unwrap();
        let _note = Inherited::note(&file);
        close();
        assert!(file.metadata().is_ok());
    }

    #[test]
    fn a_slot_is_free_again_once_its_note_is_dropped() {
        let file = File::open("/").unwrap();
        let noted = || NOTED.iter().filter(|slot| slot.load(SeqCst) == file.as_raw_fd()).count();
        let note = Inherited::note(&file);
        assert_eq!(noted(), 1);
        drop(note);
        assert_eq!(noted(), 0);
    }
}
