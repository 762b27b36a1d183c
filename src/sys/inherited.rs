//! The descriptors that a forked child must close. It inherits all of them: until it ends, removed files would keep
//! their disk space, and directories their lock.
#![allow(unsafe_code)]

use nix::fcntl::OFlag;
use nix::unistd::dup3;
use std::fs::File;
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

/// In a forked child, lets go of the files that its parent had noted. Does nothing in the process that noted them.
pub fn close() {
    if PROCESS.load(SeqCst) == std::process::id() {
        return;
    }
    let noted = NOTED.iter().map(|slot| slot.swap(FREE, SeqCst)).filter(|fd| *fd != FREE);
    let mut nothing = None;
    for fd in noted {
        // SAFETY: noted descriptors are open. Their owners belong to the parent's threads, which do not exist in this
        // process, or are handles that the child inherits and does not use.
        let open = unsafe { OwnedFd::from_raw_fd(fd) };
        if nothing.is_none() {
            nothing = File::open("/dev/null").ok();
        }
        let_go(open, nothing.as_ref());
    }
}

/// Lets go of a file. Its descriptor stays, of `nothing`: if the child drops an inherited handle after all, that closes
/// the descriptor, which must not be another file's by then.
fn let_go(mut open: OwnedFd, nothing: Option<&File>) {
    let replaced =
        nothing.is_some_and(|nothing| dup3(nothing, &mut open, OFlag::O_CLOEXEC).is_ok());
    if replaced {
        std::mem::forget(open);
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::inherited::*;

    #[test]
    fn close_does_nothing_in_the_process_that_noted() {
        let file = File::open("/").unwrap();
        let _note = Inherited::note(&file);
        close();
        assert!(file.metadata().is_ok());
    }

    #[test]
    fn drop_of_an_inherited_handle_closes_no_other_file() {
        let handle = tempfile::tempfile().unwrap();
        // SAFETY: `handle` is not used before it is dropped.
        let again = unsafe { OwnedFd::from_raw_fd(handle.as_raw_fd()) };
        let_go(again, File::open("/dev/null").ok().as_ref());
        let files: Vec<File> = (0..64).map(|_| File::open("/").unwrap()).collect();
        drop(handle);
        assert!(files.iter().all(|file| file.metadata().is_ok()));
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
