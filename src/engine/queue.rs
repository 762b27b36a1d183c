//! The thread that drives an engine, and the handle with which other threads use it.
//!
//! A request is carried to its end: short transfers are continued, interrupted ones repeated (see
//! `retry`). Every request is answered exactly once, whatever becomes of the engine. What to
//! write where, and what a failure means for the checkpoint, is not decided here.

mod actor;
mod channel;
mod request;

pub use request::{Outcome, Reply, Request, cancelled, is_cancelled};

use super::fallback::Fallback;
use super::{Action, Engine, FileId, Transfer};
use crate::pool::Buffer;
use crate::sys::inherited::Inherited;
use actor::Actor;
use channel::{AliveGuard, Command, CommandChannel, EngineStatus, PublishedStatus, channel};
use crossbeam_channel::{Receiver, bounded};
use request::gone;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// A handle on an engine that runs in a thread of its own. Dropping it finishes what was submitted
/// and joins the thread.
pub struct Queue {
    channel: Arc<CommandChannel>,
    about: About,
    thread: Option<JoinHandle<()>>,
}

/// What the engine says about itself.
#[derive(Clone)]
struct About {
    name: &'static str,
    depth: usize,
    status: PublishedStatus,
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
        let (sender, commands) = channel();
        let wake_pending = commands.wake_pending.clone();
        let alive = Arc::new(AtomicBool::new(true));
        let guard = AliveGuard(alive.clone());
        let (built, first_answer) = bounded(1);
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let engine = match build() {
                Ok(engine) => engine,
                Err(error) => return drop(built.send(Err(error))),
            };
            let status = PublishedStatus::new(EngineStatus::of(&*engine));
            let (name, depth) = (engine.name(), engine.depth());
            let about = About { name, depth, status: status.clone() };
            let _ = built.send(Ok((about, engine.waker())));
            Actor::new(engine, guard, commands, status).run();
        })?;
        let (about, waker) = first_answer.recv().unwrap_or_else(|_| Err(gone()))?;
        let channel = Arc::new(CommandChannel { commands: sender, waker, wake_pending, alive });
        Ok(Self { channel, about, thread: Some(thread) })
    }

    /// The engine's name, for reports.
    pub fn name(&self) -> &'static str {
        self.about.name
    }

    /// Whether the engine still works: false before any request is answered with the engine's
    /// failure. Looking at the thread instead would find it running for a moment longer.
    pub fn is_alive(&self) -> bool {
        self.channel.alive.load(Ordering::Acquire)
    }

    /// How many operations are in flight at most; further requests wait their turn.
    pub fn depth(&self) -> usize {
        self.about.depth
    }

    /// How many of the pool's buffers are fixed buffers of this engine by now.
    pub fn registered(&self) -> usize {
        self.about.status.lock().registered
    }

    /// The engine's fallbacks so far.
    pub fn fallbacks(&self) -> Vec<Fallback> {
        self.about.status.lock().fallbacks.clone()
    }

    /// Attaches a file to the engine until the guard is dropped, and notes it to be closed in a forked child. Waits
    /// for the I/O thread.
    ///
    /// # Errors
    /// The system's.
    pub fn attach(&self, file: Arc<File>) -> io::Result<Attached> {
        let noted = Noted { _inherited: Inherited::note(&file), _file: file.clone() };
        let (reply, answer) = bounded(1);
        self.channel.send(Command::Attach(file, reply)).map_err(|_| gone())?;
        let id = answer.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(Attached { noted: Some(noted), id, channel: self.channel.clone() })
    }

    /// Queues a request. Never blocks; the answer comes through its [`Reply`].
    pub fn submit(&self, request: Request) {
        if let Err(Command::Submit(refused)) = self.channel.send(Command::Submit(request)) {
            let buffer = refused.action.into_buffer();
            refused.reply.send(Outcome { buffer, ..Outcome::gone() });
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
        if self.channel.send(Command::Settle(send)).is_ok() {
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
    answer.recv().unwrap_or_else(|_| Outcome::gone())
}

/// A sync that is in progress.
#[must_use = "only waiting for a sync shows whether it failed"]
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
        let _ = self.channel.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // The last handle may be dropped by a reply, on the I/O thread itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// An attached file. Dropping this lets the engine close the file, after the requests already
/// submitted.
pub struct Attached {
    /// Dropped before the engine closes the file.
    noted: Option<Noted>,
    id: FileId,
    channel: Arc<CommandChannel>,
}

/// The note of an open file for forked children. It keeps the file open for as long, whatever
/// becomes of the engine: the descriptor's number must not be reused while it is noted.
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
        let _ = self.channel.send(Command::Detach(self.id));
    }
}
