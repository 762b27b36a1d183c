//! The thread that drives an engine, and the handle with which other threads use it.
//!
//! A request is carried to its end: short transfers are continued, interrupted ones repeated (see
//! `retry`). Every request is answered exactly once, whatever becomes of the engine. What to
//! write where, and what a failure means for the checkpoint, is not decided here.

mod actor;
mod channel;
mod request;
mod wake;

pub use request::{Outcome, Reply, Request, cancelled, is_cancelled};

use super::fallback::Fallback;
use super::{Action, Engine, FileId};
use crate::sys::inherited::Inherited;
use actor::Actor;
use channel::{Command, CommandChannel, Shared};
use crossbeam_channel::{Receiver, bounded, unbounded};
use request::gone;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// A handle on an engine that runs in a thread of its own. Dropping it finishes what was submitted
/// and joins the thread.
pub struct Queue {
    channel: Arc<CommandChannel>,
    name: &'static str,
    thread: Option<JoinHandle<()>>,
}

impl Queue {
    /// Starts a thread of that name and builds the engine in it (a ring belongs to the thread that
    /// built it).
    ///
    /// # Errors
    /// What `build` returned, or the system's when it has no more threads.
    pub fn start(
        thread_name: &str,
        build: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
    ) -> io::Result<Self> {
        let (commands, received) = unbounded();
        let (shared, alive) = (Arc::<Shared>::default(), Arc::new(()));
        let (published, still_alive) = (shared.clone(), Arc::downgrade(&alive));
        let (built, first_answer) = bounded(1);
        let thread = thread::Builder::new().name(thread_name.into()).spawn(move || {
            let engine = match build() {
                Ok(engine) => engine,
                Err(error) => return drop(built.send(Err(error))),
            };
            published.publish(&*engine);
            let _ = built.send(Ok((engine.name(), engine.waker())));
            Actor::new(engine, alive, received, published).run();
        })?;
        let (name, waker) = first_answer.recv().unwrap_or_else(|_| Err(gone()))?;
        let channel = CommandChannel { commands, waker, shared, alive: still_alive };
        Ok(Self { channel: Arc::new(channel), name, thread: Some(thread) })
    }

    /// The engine's name, for reports.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the engine still works: false before any request is answered with the engine's
    /// failure. Looking at the thread instead would find it running for a moment longer.
    pub fn is_alive(&self) -> bool {
        self.channel.alive.strong_count() > 0
    }

    /// How many of the pool's buffers are fixed buffers of this engine by now.
    pub fn registered(&self) -> usize {
        self.channel.shared.status().registered
    }

    /// The engine's fallbacks so far.
    pub fn fallbacks(&self) -> Vec<Fallback> {
        self.channel.shared.status().fallbacks.clone()
    }

    /// Attaches a file to the engine until the guard is dropped, and notes it to be closed in a forked child. Waits
    /// for the I/O thread.
    ///
    /// # Errors
    /// The system's.
    pub fn attach(&self, file: Arc<File>) -> io::Result<Attached> {
        let noted = (Inherited::note(&file), file.clone());
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

    /// Queues one action; the caller can wait for its end. A transfer must move at least `needed` bytes. Start several
    /// syncs before you wait for one: the file system then commits its journal, and flushes the disk, once for all.
    pub fn start_one(&self, file: &Attached, action: Action, needed: usize) -> Answer {
        let (send, answer) = bounded(1);
        let reply = Reply::new(move |outcome| drop(send.send(outcome)));
        self.submit(Request {
            file: file.id(),
            action,
            needed,
            is_bulk: false,
            abort: None,
            reply,
        });
        Answer(answer)
    }

    /// Waits until files that were detached before, and have nothing in flight, are closed.
    pub fn settle(&self) {
        let (send, settled) = bounded(1);
        if self.channel.send(Command::Settle(send)).is_ok() {
            let _ = settled.recv(); // an I/O thread that dies closes them all
        }
    }
}

/// The answer that one action will get.
#[must_use = "only waiting shows whether the action failed"]
pub struct Answer(Receiver<Outcome>);

impl Answer {
    /// Waits for it.
    pub fn wait(self) -> Outcome {
        self.0.recv().unwrap_or_else(|_| Outcome::gone())
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("engine", &self.name).finish_non_exhaustive()
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
    /// The note for forked children, dropped before the engine closes the file. It keeps the file open for as long,
    /// whatever becomes of the engine: the descriptor's number must not be reused while it is noted.
    noted: Option<(Inherited, Arc<File>)>,
    id: FileId,
    channel: Arc<CommandChannel>,
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
