//! The engine over tokio-uring, for programs that live on it: a runtime of its own on the I/O
//! thread, which runs while the engine waits.
//!
//! No registered files and no `DEFER_TASKRUN`: tokio-uring has neither. It lets go of the memory of
//! operations that a dropped runtime leaves in flight, before the kernel does. So the operations here
//! keep their own buffers, and a runtime is dropped after the last of them, or not at all.
#![allow(unsafe_code)]

use super::fallback::Fallback;
use super::fixed::Fixed;
use super::{Action, Completion, Engine, FileId, Op, TRANSFER_MAX, Transfer, Waker, not_attached};
use crate::config::Switch;
use crate::pool::{FreeSlots, Pool};
use futures_util::Stream;
use futures_util::stream::FuturesUnordered;
use slab::Slab;
use std::fs::File as StdFile;
use std::future::{Future, poll_fn};
use std::io;
use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::Notify;
use tokio_uring::Runtime;
use tokio_uring::buf::fixed::{FixedBuf, FixedBufRegistry};
use tokio_uring::buf::{BoundedBuf, IoBuf, IoBufMut};
use tokio_uring::fs::File;

/// A tokio-uring runtime and what is in flight in it. Not to be built or used within another runtime.
pub struct TokioUring {
    depth: usize,
    files: Slab<Rc<File>>,
    fixed: Fixed,
    wakeup: Arc<Notify>,
    /// Of the pools whose buffers may be in flight.
    homes: Vec<Arc<FreeSlots>>,
    /// Whether tokio-uring is at work. Seen in drop, it has panicked.
    running: bool,
    // Dropped once nothing is in flight, or never: what is in flight has memory that the kernel uses.
    in_flight: ManuallyDrop<InFlight>,
    registry: ManuallyDrop<Option<FixedBufRegistry<Memory>>>,
    runtime: ManuallyDrop<Runtime>,
}

/// Operations, each with its buffer, on their way to becoming completions.
type InFlight = FuturesUnordered<Pin<Box<dyn Future<Output = Completion>>>>;

impl TokioUring {
    /// Sets up a runtime for `depth` operations in flight, and registers `pool` unless `fixed` is off.
    ///
    /// # Errors
    /// The system's when it refuses a ring; a [`Refusal`](super::fallback::Refusal) inside the error when
    /// `fixed` is on and not all of the pool can be registered.
    pub fn new(depth: usize, pool: Option<&Pool>, fixed: Switch) -> io::Result<Self> {
        let depth = depth.max(1);
        let runtime = runtime(depth)?;
        let mut registry = None;
        // All at once: its registry takes no more later.
        let fixed = match pool.filter(|_| fixed != Switch::Off) {
            Some(pool) => Fixed::at_once(pool, fixed, |pool, count| {
                let (registered, kept) = register(&runtime, pool, count)?;
                registry = Some(registered);
                Ok(kept)
            })?,
            None => Fixed::none(),
        };
        tracing::debug!(depth, registered = fixed.count(), "tokio-uring runtime set up");
        Ok(Self {
            depth,
            files: Slab::new(),
            fixed,
            wakeup: Arc::default(),
            homes: Vec::new(),
            running: false,
            in_flight: ManuallyDrop::default(),
            registry: ManuallyDrop::new(registry),
            runtime: ManuallyDrop::new(runtime),
        })
    }

    /// The operation's way from here to its completion.
    fn carry_out(&self, mut op: Op) -> impl Future<Output = Completion> + use<> {
        let file = self.files.get(op.file.key()).cloned();
        let fixed = op.action.transfer().and_then(|transfer| self.fixed_buffer(transfer));
        async move {
            let result = match file {
                Some(file) => perform(&mut op.action, &file, fixed).await,
                None => Err(not_attached(op.file)),
            };
            Completion { op, result }
        }
    }

    /// The transfer's buffer as tokio-uring knows it, if it is registered.
    fn fixed_buffer(&self, transfer: &Transfer) -> Option<FixedBuf> {
        let index = self.fixed.known(&transfer.buffer)?;
        // tokio-uring panics at an empty slice.
        let registry = self.registry.as_ref().filter(|_| transfer.len > 0)?;
        registry.check_out(index.into())
    }
}

/// A runtime whose ring has room for all operations at once: tokio-uring panics where it has to make
/// room and cannot.
fn runtime(depth: usize) -> io::Result<Runtime> {
    let mut ring = tokio_uring::uring_builder();
    ring.dontfork();
    let entries = u32::try_from(depth).map_err(|_| io::ErrorKind::InvalidInput)?;
    // A seccomp filter may let a ring be set up, and deny its use: the runtime would wait for ever.
    ring.build(1)?.submit()?;
    Runtime::new(tokio_uring::builder().entries(entries).uring_builder(&ring))
}

/// Registers the leading buffers of a pool. Says how many tokio-uring kept: it drops those over 1024
/// (`UIO_MAXIOV`) without a word.
fn register(
    runtime: &Runtime,
    pool: &Pool,
    count: usize,
) -> io::Result<(FixedBufRegistry<Memory>, usize)> {
    let block_bytes = pool.block_bytes();
    let buffers = (0..count)
        .map(|slot| Memory { at: pool.base().wrapping_add(slot * block_bytes), len: block_bytes });
    let registry = FixedBufRegistry::new(buffers);
    runtime.block_on(async { registry.register() })?;
    let kept = (0..count).take_while(|&slot| registry.check_out(slot).is_some()).count();
    Ok((registry, kept))
}

/// Memory that an operation moves. Says where it lies and no more: that it stays, and is used by
/// nobody else, is up to who holds its [`Buffer`](crate::pool::Buffer).
struct Memory {
    at: *mut u8,
    len: usize,
}

impl Memory {
    /// A transfer's bytes, as many as the kernel moves at once; checked to be there.
    fn of(transfer: &mut Transfer) -> Self {
        let at = transfer.buffer.as_mut_ptr().wrapping_add(transfer.start);
        Self { at, len: transfer.len.min(TRANSFER_MAX) }
    }
}

// SAFETY: the address does not change. The bytes are a pool's or a buffer's: initialised from the
// beginning, and kept by the operation's future, or the pool by `Fixed`, until the kernel is done.
unsafe impl IoBuf for Memory {
    fn stable_ptr(&self) -> *const u8 {
        self.at
    }

    fn bytes_init(&self) -> usize {
        self.len
    }

    fn bytes_total(&self) -> usize {
        self.len
    }
}

// SAFETY: as above; the operation's future owns the buffer, so nobody else writes to it.
unsafe impl IoBufMut for Memory {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.at
    }

    unsafe fn set_init(&mut self, _: usize) {}
}

/// Moves the bytes, or syncs. Not to be dropped before its end: the buffer in `action` is the kernel's
/// until then.
async fn perform(action: &mut Action, file: &File, fixed: Option<FixedBuf>) -> io::Result<usize> {
    if let Some(transfer) = action.transfer() {
        transfer.check()?;
    }
    match (action, fixed) {
        (Action::Write(t), Some(buffer)) => {
            file.write_fixed_at(buffer.slice(t.start..t.start + t.len), t.offset).await.0
        }
        (Action::Write(t), None) => file.write_at(Memory::of(t), t.offset).submit().await.0,
        (Action::Read(t), Some(buffer)) => {
            file.read_fixed_at(buffer.slice(t.start..t.start + t.len), t.offset).await.0
        }
        (Action::Read(t), None) => file.read_at(Memory::of(t), t.offset).await.0,
        (Action::Sync, _) => file.sync_all().await.map(|()| 0),
    }
}

/// Takes what has completed.
fn reap(in_flight: &mut InFlight, context: &mut Context<'_>, done: &mut Vec<Completion>) {
    while let Poll::Ready(Some(completion)) = Pin::new(&mut *in_flight).poll_next(context) {
        done.push(completion);
    }
}

impl Engine for TokioUring {
    fn name(&self) -> &'static str {
        "tokio-uring"
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

    fn attach(&mut self, file: Arc<StdFile>) -> io::Result<FileId> {
        // tokio-uring closes what it is given, so it gets a descriptor of its own.
        let file = Rc::new(File::from_std(file.try_clone()?));
        Ok(FileId(self.files.insert(file) as u32))
    }

    fn detach(&mut self, file: FileId) {
        self.files.try_remove(file.key());
    }

    fn submit(&mut self, op: Op) {
        if self.in_flight.is_empty() {
            self.homes.clear();
        }
        let home = op.action.transfer().and_then(|transfer| transfer.buffer.home());
        let is_new = |home: &&_| !self.homes.iter().any(|known| Arc::ptr_eq(known, home));
        self.homes.extend(home.filter(is_new).cloned());
        // Only the next wait can start it: outside of `block_on` there is no ring to be had.
        let operation = self.carry_out(op);
        self.in_flight.push(Box::pin(operation));
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        let (in_flight, wakeup, before) = (&mut *self.in_flight, &self.wakeup, done.len());
        self.running = true;
        self.runtime.block_on(async {
            let mut notified = pin!(wakeup.notified());
            poll_fn(|context| {
                reap(in_flight, context, done);
                let woken = notified.as_mut().poll(context).is_ready();
                if woken || done.len() > before { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
        self.running = false;
        Ok(())
    }

    fn waker(&self) -> Waker {
        let wakeup = self.wakeup.clone();
        Arc::new(move || wakeup.notify_one())
    }
}

impl Drop for TokioUring {
    fn drop(&mut self) {
        if self.running {
            // The kernel may still use these buffers: they are never to be used again.
            tracing::error!("tokio-uring panicked; the buffers in flight are given up");
            return self.homes.iter().for_each(|home| home.give_up());
        }
        let (in_flight, registry) = (&mut *self.in_flight, self.registry.as_ref());
        self.runtime.block_on(async {
            let mut done = Vec::new();
            poll_fn(|context| {
                reap(in_flight, context, &mut done);
                if in_flight.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            // Gives the memory lock quota back now; the end of the ring does so only some time later.
            if let Some(registry) = registry {
                let _ = registry.unregister();
            }
        });
        // SAFETY: neither is used again. Nothing is in flight: the kernel has no address of ours left.
        unsafe {
            ManuallyDrop::drop(&mut self.in_flight);
            ManuallyDrop::drop(&mut self.registry);
            ManuallyDrop::drop(&mut self.runtime);
        }
    }
}
