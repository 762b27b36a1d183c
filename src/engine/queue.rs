//! The thread that drives an engine, and the handle with which other threads use it.
//!
//! A request is carried to its end: short transfers are continued, interrupted ones repeated (see
//! `retry`). Every request is answered exactly once, whatever becomes of the engine. What to
//! write where, and what a failure means for the checkpoint, is not decided here.

mod actor;

use super::ladder::Fallback;
use super::{Action, Engine, FileId, Transfer, Waker};
use crate::pool::Buffer;
use crate::sys::inherited::Inherited;
use actor::Actor;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// One thing to be done with a file.
pub struct Request {
    /// The file, from [`Attached::id`]. Keep the [`Attached`] until the answer.
    pub file: FileId,
    /// What to do.
    pub action: Action,
    /// Bytes after which a transfer is complete, at most its length. A direct read of a file's
    /// last block asks for a whole block and gets less. 0 for a sync.
    pub needed: usize,
    /// Once set, the request is answered with [`cancelled`] instead of being started or continued.
    pub abort: Option<Arc<AtomicBool>>,
    /// Where the answer goes.
    pub reply: Reply,
}

/// The end of a request.
#[derive(Debug)]
pub struct Outcome {
    /// [`io::ErrorKind::UnexpectedEof`] for a file that ends before the bytes needed, the system's
    /// error as it came, or [`cancelled`].
    pub result: io::Result<()>,
    /// The buffer of a transfer. `None` for a sync, and when the engine died with it.
    pub buffer: Option<Buffer>,
    /// When the engine was given it; `None` if it never was.
    pub started: Option<Instant>,
}

/// Takes the answer to one [`Request`], on the I/O thread: it must be quick, must not call the
/// queue's blocking functions, and may submit more. Called exactly once, with an error if the
/// engine dies first.
pub struct Reply(Option<Box<dyn FnOnce(Outcome) + Send>>);

impl Reply {
    /// Answers by calling `take`.
    pub fn new(take: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self(Some(Box::new(take)))
    }

    fn send(mut self, outcome: Outcome) {
        if let Some(take) = self.0.take() {
            take(outcome);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(take) = self.0.take() {
            // Possibly while the thread unwinds, when a second panic would end the process.
            let outcome = Outcome { result: Err(gone()), buffer: None, started: None };
            let _ = catch_unwind(AssertUnwindSafe(|| take(outcome)));
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

fn gone() -> io::Error {
    io::Error::other("the I/O thread has ended before the request was done")
}

/// A handle on an engine that runs in a thread of its own. Dropping it finishes what was submitted
/// and joins the thread.
pub struct Queue {
    line: Arc<Line>,
    about: About,
    thread: Option<JoinHandle<()>>,
}

/// What the engine says about itself.
#[derive(Clone)]
struct About {
    name: &'static str,
    depth: usize,
    account: Arc<Mutex<Account>>,
}

/// What changes while it works: buffers are registered when they are first used.
#[derive(Clone, PartialEq, Default)]
struct Account {
    registered: usize,
    fallbacks: Vec<Fallback>,
}

impl Account {
    fn of(engine: &dyn Engine) -> Self {
        Self { registered: engine.registered(), fallbacks: engine.fallbacks() }
    }
}

/// The way to the I/O thread.
struct Line {
    commands: Sender<Command>,
    waker: Waker,
    /// Set by who rings, cleared by the I/O thread before it looks at the commands: of many
    /// commands in a row only the first costs a system call.
    rung: Arc<AtomicBool>,
    /// False from the moment at which the engine is given up, before anyone is told.
    alive: Arc<AtomicBool>,
}

enum Command {
    Attach(Arc<File>, Sender<io::Result<FileId>>),
    Detach(FileId),
    /// Answered when all commands before it have been carried out.
    Settle(Sender<()>),
    Submit(Request),
    Stop,
}

impl Line {
    /// Hands back the command if the I/O thread is gone.
    fn send(&self, command: Command) -> Result<(), Command> {
        self.commands.send(command).map_err(|refused| refused.0)?;
        if !self.rung.swap(true, Ordering::AcqRel) {
            (self.waker)();
        }
        Ok(())
    }
}

/// Says, when dropped, that the engine is gone.
struct Life(Arc<AtomicBool>);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Queue {
    /// Starts a thread of that name and builds the engine in it (a ring belongs to the thread that
    /// built it).
    ///
    /// # Errors
    /// What `build` returned, or the system's when it has no more threads.
    pub fn start(
        name: &str,
        build: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
    ) -> io::Result<Self> {
        let (commands, receiver) = unbounded();
        let (hello, first_word) = bounded(1);
        let rung = Arc::new(AtomicBool::new(false));
        let alive = Arc::new(AtomicBool::new(true));
        let (seen, life) = (rung.clone(), Life(alive.clone()));
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let engine = match build() {
                Ok(engine) => engine,
                Err(error) => return drop(hello.send(Err(error))),
            };
            let account = Arc::new(Mutex::new(Account::of(&*engine)));
            let (name, depth) = (engine.name(), engine.depth());
            let about = About { name, depth, account: account.clone() };
            let _ = hello.send(Ok((about, engine.waker())));
            Actor::new(engine, life, receiver, (seen, account)).run();
        })?;
        let (about, waker) = first_word.recv().unwrap_or_else(|_| Err(gone()))?;
        let line = Arc::new(Line { commands, waker, rung, alive });
        Ok(Self { line, about, thread: Some(thread) })
    }

    /// The engine's name, for reports.
    pub fn name(&self) -> &'static str {
        self.about.name
    }

    /// Whether the engine still works. Who was told that it broke is told here as well: asking the
    /// thread instead would find it running for a moment longer.
    pub fn is_alive(&self) -> bool {
        self.line.alive.load(Ordering::Acquire)
    }

    /// How many operations are in flight at most; what is submitted beyond waits its turn.
    pub fn depth(&self) -> usize {
        self.about.depth
    }

    /// How many of the pool's buffers are fixed buffers of this engine by now.
    pub fn registered(&self) -> usize {
        self.account().registered
    }

    /// What the engine wanted and could not have, so far.
    pub fn fallbacks(&self) -> Vec<Fallback> {
        self.account().fallbacks.clone()
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.about.account.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes a file known to the engine, until the guard is dropped, and noted to be closed in a forked child. Waits for
    /// the I/O thread.
    ///
    /// # Errors
    /// The system's.
    pub fn attach(&self, file: Arc<File>) -> io::Result<Attached> {
        let noted = Noted { _inherited: Inherited::note(&file), _file: file.clone() };
        let (reply, answer) = bounded(1);
        self.line.send(Command::Attach(file, reply)).map_err(|_| gone())?;
        let id = answer.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(Attached { noted: Some(noted), id, line: self.line.clone() })
    }

    /// Queues a request. Never blocks; the answer comes through its [`Reply`].
    pub fn submit(&self, request: Request) {
        if let Err(Command::Submit(refused)) = self.line.send(Command::Submit(request)) {
            let buffer = refused.action.into_buffer();
            refused.reply.send(Outcome { result: Err(gone()), buffer, started: None });
        }
    }

    /// Moves bytes and waits for the end. The buffer is lost only with the engine.
    ///
    /// # Errors
    /// As [`Outcome::result`].
    pub fn transfer(
        &self,
        file: &Attached,
        write: bool,
        transfer: Transfer,
        needed: usize,
    ) -> (io::Result<()>, Option<Buffer>) {
        let action = if write { Action::Write(transfer) } else { Action::Read(transfer) };
        let outcome = self.call(file, action, needed);
        (outcome.result, outcome.buffer)
    }

    /// Syncs a file and waits for it. Covers the writes that have been answered.
    ///
    /// # Errors
    /// As [`Outcome::result`].
    pub fn sync(&self, file: &Attached) -> io::Result<()> {
        self.start_sync(file).wait()
    }

    /// Waits until files that were detached before, and have nothing in flight, are closed.
    pub fn settle(&self) {
        let (send, settled) = bounded(1);
        if self.line.send(Command::Settle(send)).is_ok() {
            let _ = settled.recv(); // an I/O thread that dies closes them all
        }
    }

    /// [`Queue::sync`] without waiting yet. A file system that is asked for several files at once commits
    /// its journal, and flushes the disk, for all of them together.
    pub fn start_sync(&self, file: &Attached) -> Syncing {
        Syncing(self.start_call(file, Action::Sync, 0))
    }

    fn call(&self, file: &Attached, action: Action, needed: usize) -> Outcome {
        wait(&self.start_call(file, action, needed))
    }

    fn start_call(&self, file: &Attached, action: Action, needed: usize) -> Receiver<Outcome> {
        let (send, answer) = bounded(1);
        let reply = Reply::new(move |outcome| drop(send.send(outcome)));
        self.submit(Request { file: file.id(), action, needed, abort: None, reply });
        answer
    }
}

fn wait(answer: &Receiver<Outcome>) -> Outcome {
    answer.recv().unwrap_or_else(|_| Outcome { result: Err(gone()), buffer: None, started: None })
}

/// A sync that is under way.
#[must_use = "a sync that fails says so only to who waits for it"]
pub struct Syncing(Receiver<Outcome>);

impl Syncing {
    /// Waits for its end.
    ///
    /// # Errors
    /// As [`Outcome::result`].
    pub fn wait(self) -> io::Result<()> {
        wait(&self.0).result
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("engine", &self.about.name).finish_non_exhaustive()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.line.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // The last handle may be dropped by a reply, on the I/O thread itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A file that the engine knows. Dropping it lets the engine close the file, after the requests
/// already submitted.
pub struct Attached {
    /// Dropped before the engine closes the file.
    noted: Option<Noted>,
    id: FileId,
    line: Arc<Line>,
}

/// The note of an open file, and what keeps it open for as long, whatever becomes of the engine.
struct Noted {
    _inherited: Inherited,
    _file: Arc<File>,
}

impl Attached {
    /// The file's number, for a [`Request`].
    pub fn id(&self) -> FileId {
        self.id
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.noted = None;
        let _ = self.line.send(Command::Detach(self.id));
    }
}
