//! What other threads ask of the I/O thread, and the answer.

use crate::engine::{Action, FileId};
use crate::pool::Buffer;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// One thing to do with a file.
pub struct Request {
    /// The file, from [`Attached::id`](super::Attached::id). Keep the [`Attached`](super::Attached) until the answer.
    pub file: FileId,
    /// What to do.
    pub action: Action,
    /// Bytes after which a transfer is complete, at most its length. A direct read of a file's
    /// last block asks for a whole block and gets less. 0 for a sync.
    pub needed: usize,
    /// Whether many of its kind may wait at once, which others must not wait for.
    pub is_bulk: bool,
    /// Once set, the request is answered with [`cancelled`] instead of being started or continued.
    pub abort: Option<Arc<AtomicBool>>,
    /// Receives the answer.
    pub reply: Reply,
}

/// How a request ended.
#[derive(Debug)]
pub struct Outcome {
    /// [`io::ErrorKind::UnexpectedEof`] for a file that ends before the bytes needed, the system's
    /// error as it came, or [`cancelled`].
    pub result: io::Result<()>,
    /// The buffer of a transfer. `None` for a sync, and when the engine died with the buffer.
    pub buffer: Option<Buffer>,
    /// When the engine got the request; `None` if it never did.
    pub started: Option<Instant>,
}

impl Outcome {
    /// The answer to a request that the I/O thread did not live to see.
    pub(super) fn gone() -> Self {
        Self { result: Err(gone()), buffer: None, started: None }
    }
}

/// Receives the answer to one [`Request`], on the I/O thread: it must be quick, must not call the
/// queue's blocking functions, and may submit more. Called exactly once, with an error if the
/// engine dies first.
pub struct Reply(Option<Box<dyn FnOnce(Outcome) + Send>>);

impl Reply {
    /// Answers by calling `take`.
    pub fn new(take: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self(Some(Box::new(take)))
    }

    /// Answers.
    pub(crate) fn send(mut self, outcome: Outcome) {
        if let Some(take) = self.0.take() {
            take(outcome);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(take) = self.0.take() {
            // The thread may be unwinding, when a second panic would abort the process.
            let _ = catch_unwind(AssertUnwindSafe(|| take(Outcome::gone())));
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cancelled")]
struct Cancelled;

/// The answer to a request whose `abort` was set. Its kind is `Other`, so that nobody takes it for
/// an interrupted system call and tries again.
pub fn cancelled() -> io::Error {
    io::Error::other(Cancelled)
}

/// Whether an error is [`cancelled`].
pub fn is_cancelled(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Cancelled>())
}

pub(super) fn gone() -> io::Error {
    io::Error::other("the I/O thread has ended before the request was done")
}
