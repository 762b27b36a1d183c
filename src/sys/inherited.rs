//! The descriptors that a forked child must close. It inherits all of them: until it ends, removed files would keep
//! their disk space, and directories their lock.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};

/// How many descriptors are noted at most; a child keeps the others open.
const NOTED_MAX: usize = 4096;
const FREE: RawFd = -1;

// Not behind a lock: another thread may hold it at the moment of the fork.
static NOTED: [AtomicI32; NOTED_MAX] = [const { AtomicI32::new(FREE) }; NOTED_MAX];
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A note of an open descriptor. Drop it before the descriptor is closed, since another file may get the number
/// immediately.
#[derive(Debug)]
pub struct Inherited(Option<usize>);

impl Inherited {
    /// Notes a descriptor.
    pub fn note(open: &impl AsRawFd) -> Self {
        PROCESS.store(std::process::id(), SeqCst);
        let fd = open.as_raw_fd();
        let take = |slot: &AtomicI32| {
            // Loads first: a load may have thousands of files, and an exchange is more expensive.
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

/// In a forked child, closes the descriptors that its parent had noted. Does nothing in the process that noted them.
pub fn close() {
    if PROCESS.load(SeqCst) == std::process::id() {
        return;
    }
    for slot in &NOTED {
        let fd = slot.swap(FREE, SeqCst);
        if fd != FREE {
            // SAFETY: noted descriptors are open. Their owners belong to the parent's threads, which do not
            // exist in this process, or were forgotten: nobody uses or closes them after this.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::inherited::*;
    use std::fs::File;

    #[test]
    fn close_does_nothing_in_the_process_that_noted() {
        let file = File::open("/").unwrap();
        let _note = Inherited::note(&file);
        close();
        assert!(file.metadata().is_ok());
    }

    #[test]
    fn slot_is_free_again_once_its_note_is_dropped() {
        let file = File::open("/").unwrap();
        let noted = || NOTED.iter().filter(|slot| slot.load(SeqCst) == file.as_raw_fd()).count();
        let note = Inherited::note(&file);
        assert_eq!(noted(), 1);
        drop(note);
        assert_eq!(noted(), 0);
    }
}
