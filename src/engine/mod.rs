//! Engines move buffers to and from files, and do nothing else.
//!
//! One thread drives an [`Engine`]: the engine takes operations, each with the [`Buffer`] that it moves,
//! and returns them as [`Completion`]s, in any order, possibly short, possibly failed: it is as raw as
//! the kernel. [`queue`] wraps an engine in its thread, continues short and interrupted transfers, and keeps no more in flight than the engine takes. [`io_mode`] says
//! which engine to try first and what each failure means.

pub mod fallback;
#[cfg(all(target_os = "linux", any(feature = "uring", feature = "tokio-uring")))]
mod fixed;
pub mod io_mode;
pub mod portable;
pub mod queue;
mod retry;
#[cfg(all(target_os = "linux", feature = "tokio-uring"))]
pub mod tokio_uring;
#[cfg(all(target_os = "linux", feature = "uring"))]
pub mod uring;

use crate::limits::ALIGN;
use crate::pool::Buffer;
use fallback::Fallback;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// A file attached to an engine. Numbers are reused once detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId(pub u32);

impl FileId {
    /// The number as the key of an engine's `Slab` of files.
    fn key(self) -> usize {
        self.0 as usize
    }
}

/// One operation.
#[derive(Debug)]
pub struct Op {
    /// Chosen by the caller, returned unchanged. Unique among the operations in flight.
    pub token: u64,
    /// The file.
    pub file: FileId,
    /// What to do.
    pub action: Action,
}

/// What an [`Op`] does.
#[derive(Debug)]
pub enum Action {
    /// Write to the file.
    Write(Transfer),
    /// Read from the file.
    Read(Transfer),
    /// `fsync`: data and metadata of the file are on the disk when this completes. Covers writes
    /// that completed before it was submitted, none in flight.
    Sync,
}

impl Action {
    /// The bytes moved, if it moves any.
    pub fn transfer(&self) -> Option<&Transfer> {
        match self {
            Self::Write(transfer) | Self::Read(transfer) => Some(transfer),
            Self::Sync => None,
        }
    }

    /// Like [`Action::transfer`], to change it.
    pub fn transfer_mut(&mut self) -> Option<&mut Transfer> {
        match self {
            Self::Write(transfer) | Self::Read(transfer) => Some(transfer),
            Self::Sync => None,
        }
    }

    /// The buffer, if it has one.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Write(transfer) | Self::Read(transfer) => Some(transfer.buffer),
            Self::Sync => None,
        }
    }
}

/// Which bytes of a buffer go to or come from where.
#[derive(Debug)]
pub struct Transfer {
    /// Byte offset in the file.
    pub offset: u64,
    /// The memory. Owned by the engine until the completion.
    pub buffer: Buffer,
    /// First byte of the buffer to move.
    pub start: usize,
    /// Bytes to move; `start + len` is within the buffer.
    pub len: usize,
}

impl Transfer {
    /// The first `len` bytes of a buffer, to or from `offset`.
    pub fn of(buffer: Buffer, len: usize, offset: u64) -> Self {
        Self { offset, buffer, start: 0, len }
    }

    /// Whether file offset, memory address and length are multiples of [`ALIGN`], as a direct
    /// transfer's must be.
    pub fn is_aligned(&self) -> bool {
        let address = self.buffer.as_ptr() as usize + self.start;
        self.offset.is_multiple_of(ALIGN as u64)
            && address.is_multiple_of(ALIGN)
            && self.len.is_multiple_of(ALIGN)
    }

    /// Checks that the bytes lie within the buffer and the file's range of offsets. Engines call this
    /// before they pass a bare address to the kernel.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] with the numbers.
    pub fn check(&self) -> io::Result<()> {
        let in_buffer =
            self.start.checked_add(self.len).is_some_and(|end| end <= self.buffer.len());
        let in_file =
            self.offset.checked_add(self.len as u64).is_some_and(|end| end <= i64::MAX as u64);
        if in_buffer && in_file {
            return Ok(());
        }
        let Self { offset, buffer, start, len } = self;
        let size = buffer.len();
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{len} bytes from {start} of a buffer of {size}, file offset {offset}"),
        ))
    }
}

/// An operation that ended.
#[derive(Debug)]
pub struct Completion {
    /// The operation as it was submitted, its buffer with it.
    pub op: Op,
    /// Bytes moved (0 for a sync, and for a read at the file's end), or the system's error.
    pub result: io::Result<usize>,
}

/// Makes [`Engine::wait`] return soon, from any thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// The seam between ringstow and an operating system's way of doing I/O.
///
/// All calls come from one thread, the one that built the engine. Dropping an engine waits for
/// what is in flight, since the kernel owns those buffers until then.
pub trait Engine {
    /// For reports: `"uring"`, `"portable"`, `"tokio-uring"`.
    fn name(&self) -> &'static str;

    /// How many operations may be in flight at once.
    fn depth(&self) -> usize;

    /// How many of the pool's buffers are registered with the kernel as fixed buffers.
    fn registered(&self) -> usize {
        0
    }

    /// What the engine wanted and could not get so far, with reason and remedy.
    fn fallbacks(&self) -> &[Fallback] {
        &[]
    }

    /// Makes a file known.
    ///
    /// # Errors
    /// The system's.
    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId>;

    /// Forgets a file that has nothing in flight.
    fn detach(&mut self, file: FileId);

    /// Starts an operation. The caller keeps at most [`Engine::depth`] in flight. An operation that
    /// cannot be started comes back from [`Engine::wait`] as failed.
    fn submit(&mut self, op: Op);

    /// Waits until something has completed or the waker was called, and appends what completed.
    ///
    /// # Errors
    /// Only if the engine as a whole is broken and will return no more completions.
    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()>;

    /// Interrupts [`Engine::wait`] from any thread.
    fn waker(&self) -> Waker;
}

/// The largest transfer that Linux makes in one go (`MAX_RW_COUNT`); more comes back short.
#[cfg(all(target_os = "linux", any(feature = "uring", feature = "tokio-uring")))]
const TRANSFER_MAX: usize = 0x7fff_f000;

/// The error of an operation on a file that is not attached.
fn not_attached(file: FileId) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("file {} is not attached", file.0))
}
