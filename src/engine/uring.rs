//! The io_uring engine: one ring, driven by the thread that built it.
//!
//! Operations in flight are kept here with the buffers they move, because the kernel holds their
//! bare addresses until it has completed them.
#![allow(unsafe_code)]

mod files;
pub(crate) mod setup;

use super::fallback::{Fallback, Refusal};
use super::fixed::{Fixed, Step};
use super::{Action, Completion, Engine, FileId, Op, TRANSFER_MAX, Waker, not_attached};
use crate::config::Switch;
use crate::pool::{Buffer, Pool};
use crate::sys::inherited::Inherited;
use files::Files;
use io_uring::{IoUring, opcode, squeue, types};
use nix::libc::iovec;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use slab::Slab;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Marks the completion of the wakeup's read. Other completions carry a key of `in_flight`.
const WAKEUP: u64 = u64::MAX;

/// One ring. Never move it to another thread: the kernel accepts only the first.
pub struct Uring {
    _inherited: [Inherited; 2],
    // Dropped before what follows, which the kernel may refer to until then.
    ring: IoUring,
    depth: usize,
    files: Files,
    fixed: Fixed,
    wakeup: Wakeup,
    /// Operations that the kernel has.
    in_flight: Slab<Op>,
    /// Completed, not returned yet.
    done: Vec<Completion>,
    /// How often in a row the kernel was short of something.
    shortages: u32,
    /// How many submissions are yet to find the kernel short, and the pauses that were made.
    #[cfg(test)]
    short: (u32, Vec<std::time::Duration>),
}

/// An eventfd with a read always pending in the ring: a write to it from any thread completes that
/// read, and so wakes the I/O thread.
struct Wakeup {
    fd: Arc<EventFd>,
    /// The kernel reads the eventfd's counter into this.
    count: Box<AtomicU64>,
    armed: bool,
}

impl Uring {
    /// Sets up a ring for `depth` operations in flight, and registers `pool` unless `fixed` is off: all of it
    /// now if it is on, which takes all of its memory; else what is used, when it first is.
    ///
    /// # Errors
    /// The system's when it refuses a ring; a [`Refusal`] inside the error when the kernel is too
    /// old, or when `fixed` is on and not all of the pool can be registered.
    pub fn new(depth: usize, pool: Option<&Pool>, fixed: Switch) -> io::Result<Self> {
        let entries = u32::try_from(depth.max(1) + 1).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (ring, flags) = setup::ring(entries)?;
        let missing = setup::missing_operations(&ring)?;
        if missing.iter().any(|operation| !operation.ends_with("_FIXED")) {
            return Err(too_old());
        }
        let fixed = registered(&ring, pool, fixed, missing.is_empty())
            .inspect_err(|_| unregister(&ring))?;
        let fd = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
        tracing::debug!(depth, flags, registered = fixed.count(), "ring set up");
        Ok(Self {
            _inherited: [Inherited::note(&ring), Inherited::note(&fd)],
            files: Files::new(&ring),
            ring,
            depth: depth.max(1),
            fixed,
            wakeup: Wakeup { fd, count: Box::default(), armed: false },
            in_flight: Slab::with_capacity(depth.max(1)),
            done: Vec::new(),
            shortages: 0,
            #[cfg(test)]
            short: Default::default(),
        })
    }

    /// Hands an operation to the ring, to be submitted by the next [`Engine::wait`].
    fn start(&mut self, mut op: Op) {
        let entry = match self.entry(&mut op) {
            Ok(entry) => entry,
            Err(error) => return self.done.push(Completion { op, result: Err(error) }),
        };
        if self.in_flight.len() == self.depth {
            let result = Err(io::Error::other("more operations than the engine's depth"));
            return self.done.push(Completion { op, result });
        }
        let key = self.in_flight.insert(op);
        self.push(entry.user_data(key as u64));
    }

    /// The submission for an operation, all addresses and lengths checked.
    fn entry(&mut self, op: &mut Op) -> io::Result<squeue::Entry> {
        let attached = self.files.get(op.file).ok_or_else(|| not_attached(op.file))?;
        if let Some(transfer) = op.action.transfer() {
            transfer.check()?;
        }
        let (fixed, ring) = (&mut self.fixed, &self.ring);
        let register = |pool: &Pool, step: &Step| register_step(ring, pool, step);
        let index = op.action.transfer().and_then(|t| fixed.index_of(&t.buffer, register));
        let submission = match attached.entry {
            Some(entry) => submission!(types::Fixed(entry), &mut op.action, index),
            None => submission!(types::Fd(attached.file.as_raw_fd()), &mut op.action, index),
        };
        Ok(match attached.in_memory {
            // The kernel's worker threads then copy in parallel.
            true => submission.flags(squeue::Flags::ASYNC),
            false => submission,
        })
    }

    fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: a transfer's address and length were checked to lie in its buffer, which
            // `in_flight` keeps until the completion, and which nobody touches meanwhile; the wakeup's
            // count lives in its box until the drop has seen the last completion.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // Full, which takes more in flight than entries: let the kernel take what is there.
            let mut done = std::mem::take(&mut self.done);
            if let Err(error) = self.enter(0, &mut done) {
                // Cannot be reported here; the next wait fails with it again.
                tracing::warn!(%error, "io_uring_enter");
                self.pause();
            }
            self.done = done;
        }
    }

    /// Submits what is queued, waits for `want` completions, and takes what has completed. Returns
    /// whether the waker was called.
    fn enter(&mut self, want: usize, done: &mut Vec<Completion>) -> io::Result<bool> {
        let before = done.len();
        let is_short = match self.submit_and_wait(want) {
            Err(error) if !is_passing(&error) => return Err(error),
            Err(error) => error.kind() != io::ErrorKind::Interrupted,
            Ok(_) => false,
        };
        if !is_short {
            self.shortages = 0;
            return Ok(self.reap(done));
        }
        // Short of memory, or of room for completions: both pass once some are taken.
        self.finish_deferred()?;
        let woken = self.reap(done);
        if !woken && done.len() == before {
            self.pause();
        }
        Ok(woken)
    }

    fn submit_and_wait(&mut self, want: usize) -> io::Result<usize> {
        #[cfg(test)]
        if self.short.0 > 0 {
            self.short.0 -= 1;
            return Err(io::Error::from_raw_os_error(nix::libc::EAGAIN));
        }
        self.ring.submit_and_wait(want)
    }

    /// Has the kernel put what it has completed where [`Uring::reap`] finds it. It skips that when it refuses a submission.
    fn finish_deferred(&mut self) -> io::Result<()> {
        const GETEVENTS: u32 = 1;
        // SAFETY: submits nothing, and passes no memory.
        match unsafe { self.ring.submitter().enter::<nix::libc::sigset_t>(0, 0, GETEVENTS, None) } {
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits for a completion of what the kernel has; not for long, since what it has not taken yet may be all there is.
    fn pause(&mut self) {
        let pause = super::retry::pause(self.shortages);
        self.shortages += 1;
        #[cfg(test)]
        self.short.1.push(pause);
        // SAFETY: the ring is open until it is dropped, after this.
        let fd = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        let mut ring = [PollFd::new(fd, PollFlags::POLLIN)];
        // If it fails, the next submission comes sooner.
        let _ = poll(&mut ring, pause.as_millis() as u16);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let mut woken = false;
        for entry in self.ring.completion() {
            if entry.user_data() == WAKEUP {
                self.wakeup.armed = false;
                woken = true;
                continue;
            }
            // Panics at an operation that is not in flight: the kernel completes each once.
            let op = self.in_flight.remove(entry.user_data() as usize);
            let result = match entry.result() {
                bytes @ 0.. => Ok(bytes as usize),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
            done.push(Completion { op, result });
        }
        woken
    }

    fn arm_wakeup(&mut self) {
        if !self.wakeup.armed {
            self.wakeup.armed = true;
            let fd = types::Fd(self.wakeup.fd.as_fd().as_raw_fd());
            let read = opcode::Read::new(fd, self.wakeup.count.as_ptr().cast(), 8);
            self.push(read.build().user_data(WAKEUP));
        }
    }

    /// Waits until the kernel has completed everything.
    fn drain(&mut self) -> io::Result<()> {
        if self.wakeup.armed {
            self.wakeup.fd.write(1)?;
        }
        let mut done = std::mem::take(&mut self.done);
        while self.wakeup.armed || !self.in_flight.is_empty() {
            self.enter(1, &mut done)?;
        }
        Ok(())
    }
}

/// Whether the same call may succeed later.
fn is_passing(error: &io::Error) -> bool {
    use nix::libc::{EAGAIN, EBUSY, EINTR};
    matches!(error.raw_os_error(), Some(EAGAIN | EBUSY | EINTR))
}

fn too_old() -> io::Error {
    let reason = "this kernel's io_uring lacks READ, WRITE or FSYNC";
    Refusal::new(reason, "use Linux 5.6 or later, or set engine = portable").into()
}

fn no_fixed() -> io::Error {
    let reason = "this kernel has no READ_FIXED and WRITE_FIXED";
    Refusal::new(reason, "use Linux 5.6 or later, or set fixed = off").into()
}

/// Registers a pool as far as the switch asks for it.
fn registered(ring: &IoUring, pool: Option<&Pool>, fixed: Switch, has: bool) -> io::Result<Fixed> {
    let Some(pool) = pool.filter(|_| fixed != Switch::Off) else { return Ok(Fixed::none()) };
    let at_once = |pool: &Pool, count| match has {
        true => register(ring, pool, count),
        false => Err(no_fixed()),
    };
    let steps = Fixed::steps(pool) as u32;
    // An empty table, filled later, needs Linux 5.19. `fixed = on` registers everything now, or fails.
    if fixed == Switch::On || !has || ring.submitter().register_buffers_sparse(steps).is_err() {
        return Fixed::at_once(pool, fixed, at_once);
    }
    Ok(Fixed::growing(pool, |pool, step| register_step(ring, pool, step)))
}

/// Registers the leading buffers of a pool: mapped and pinned once, not at every transfer.
fn register(ring: &IoUring, pool: &Pool, count: usize) -> io::Result<usize> {
    let buffers: Vec<iovec> = (0..count).map(|slot| memory(pool, slot, 1)).collect();
    // SAFETY: the buffers are the pool's, back to back, and its mapping outlives the registration:
    // `Fixed` holds the pool until the engine has been dropped, ring first.
    unsafe { ring.submitter().register_buffers(&buffers) }.map(|()| count)
}

/// Registers some buffers of a pool as one, in the table that is there.
fn register_step(ring: &IoUring, pool: &Pool, step: &Step) -> io::Result<()> {
    let buffers = [memory(pool, step.slots.start, step.slots.len())];
    // SAFETY: as in `register`.
    unsafe { ring.submitter().register_buffers_update(step.index.into(), &buffers, None) }
}

/// The memory of some buffers of a pool, which lie back to back.
fn memory(pool: &Pool, first: usize, count: usize) -> iovec {
    let at = pool.base().wrapping_add(first * pool.block_bytes());
    iovec { iov_base: at.cast(), iov_len: count * pool.block_bytes() }
}

/// Returns the memory lock quota now; closing the ring returns it only some 20 ms later.
fn unregister(ring: &IoUring) {
    // Fails where nothing is registered.
    let _ = ring.submitter().unregister_buffers();
}

/// The submission for an action; `index` is the fixed buffer's. A macro, because the two kinds of file,
/// `Fixed` and `Fd`, have no public trait in common.
macro_rules! submission {
    ($file:expr, $action:expr, $index:expr) => {{
        let file = $file;
        match $action {
            Action::Write(t) => {
                let (from, len) = (t.buffer.as_mut_ptr().wrapping_add(t.start), chunk(t.len));
                match $index {
                    Some(i) => opcode::WriteFixed::new(file, from, len, i).offset(t.offset).build(),
                    None => opcode::Write::new(file, from, len).offset(t.offset).build(),
                }
            }
            Action::Read(t) => {
                let (to, len) = (t.buffer.as_mut_ptr().wrapping_add(t.start), chunk(t.len));
                match $index {
                    Some(i) => opcode::ReadFixed::new(file, to, len, i).offset(t.offset).build(),
                    None => opcode::Read::new(file, to, len).offset(t.offset).build(),
                }
            }
            Action::Sync => opcode::Fsync::new(file).build(),
        }
    }};
}
use submission;

/// The bytes of a transfer that the kernel moves in one operation.
fn chunk(len: usize) -> u32 {
    len.min(TRANSFER_MAX) as u32
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn registered(&self) -> usize {
        self.fixed.count()
    }

    fn fallbacks(&self) -> &[Fallback] {
        self.fixed.fallbacks()
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        Ok(self.files.attach(&self.ring, file))
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(&self.ring, file);
    }

    fn submit(&mut self, op: Op) {
        self.start(op);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        self.arm_wakeup();
        let before = done.len();
        done.append(&mut self.done);
        loop {
            let want = usize::from(done.len() == before);
            let woken = self.enter(want, done)?;
            if woken || done.len() > before {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Waker {
        let fd = self.wakeup.fd.clone();
        Arc::new(move || {
            // Cannot fail: the counter would have to overflow.
            let _ = fd.write(1);
        })
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            // The kernel may still write to these buffers: nobody may use them again.
            tracing::error!(%error, "the ring could not be drained; its buffers are given up");
            let given_up = self.in_flight.drain();
            given_up.filter_map(|op| op.action.into_buffer()).for_each(Buffer::give_up);
            std::mem::forget(std::mem::take(&mut self.wakeup.count));
        }
        unregister(&self.ring);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn ring_that_the_kernel_is_short_for_waits_longer_each_time_instead_of_spinning() {
        let Ok(mut ring) = Uring::new(2, None, Switch::Off) else { return }; // no io_uring here
        let file = ring.attach(Arc::new(tempfile::tempfile().unwrap())).unwrap();
        ring.short.0 = 4;
        ring.submit(Op { token: 7, file, action: Action::Sync });
        let (mut done, began) = (Vec::new(), Instant::now());
        ring.wait(&mut done).unwrap();
        assert_eq!((done.len(), done[0].op.token), (1, 7));
        assert_eq!(ring.short.1, [1, 2, 4, 8].map(Duration::from_millis));
        assert!(began.elapsed() >= Duration::from_millis(15));
        // The kernel has the wakeup alone: its completion ends the pause.
        ring.short = (1, Vec::new());
        ring.waker()();
        ring.wait(&mut done).unwrap();
        assert!(ring.short.1.is_empty(), "what has completed is taken at once");
    }
}
