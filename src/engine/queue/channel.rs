//! The command channel to the I/O thread, and what that thread publishes about its engine.

use super::request::Request;
use crate::engine::fallback::Fallback;
use crate::engine::{Engine, FileId, Waker};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

pub(super) enum Command {
    Attach(Arc<File>, Sender<io::Result<FileId>>),
    Detach(FileId),
    /// Answered when all commands before it have been carried out.
    Settle(Sender<()>),
    Submit(Request),
    Stop,
}

/// Both ends of a command channel that is yet to get the engine's waker.
pub(super) fn channel() -> (Sender<Command>, Commands) {
    let (sender, receiver) = unbounded();
    (sender, Commands { receiver, wake_pending: Arc::default() })
}

/// The I/O thread's end.
pub(super) struct Commands {
    receiver: Receiver<Command>,
    /// Set by the sender that wakes the I/O thread, cleared by that thread before it looks at the
    /// commands: of many commands in a row only the first costs a system call.
    pub wake_pending: Arc<AtomicBool>,
}

impl Commands {
    /// Call this before looking for commands: one that is sent after the look wakes the thread again.
    pub fn acknowledge_wake(&self) {
        self.wake_pending.swap(false, Ordering::AcqRel);
    }

    /// The next command that has been sent by now.
    pub fn next(&self) -> Option<Command> {
        self.receiver.try_recv().ok()
    }
}

/// The other threads' end.
pub(super) struct CommandChannel {
    pub commands: Sender<Command>,
    pub waker: Waker,
    pub wake_pending: Arc<AtomicBool>,
    /// False from the moment at which the engine is given up, before any request gets that answer.
    pub alive: Arc<AtomicBool>,
}

impl CommandChannel {
    /// Sends a command, or returns it if the I/O thread is gone.
    pub fn send(&self, command: Command) -> Result<(), Command> {
        self.commands.send(command).map_err(|refused| refused.0)?;
        if !self.wake_pending.swap(true, Ordering::AcqRel) {
            (self.waker)();
        }
        Ok(())
    }
}

/// Marks the engine as gone when dropped.
pub(super) struct AliveGuard(pub Arc<AtomicBool>);

impl Drop for AliveGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// What changes about an engine while it works: it registers buffers when they are first used.
#[derive(Clone, Default)]
pub(super) struct EngineStatus {
    pub registered: usize,
    pub fallbacks: Vec<Fallback>,
}

impl EngineStatus {
    pub fn of(engine: &dyn Engine) -> Self {
        Self { registered: engine.registered(), fallbacks: engine.fallbacks().to_vec() }
    }

    /// Whether this still describes the engine. Cheap: the I/O thread asks at every turn.
    pub fn is_current(&self, engine: &dyn Engine) -> bool {
        self.registered == engine.registered() && self.fallbacks == engine.fallbacks()
    }
}

/// An engine's latest [`EngineStatus`], for other threads.
#[derive(Clone)]
pub(super) struct PublishedStatus(Arc<Mutex<EngineStatus>>);

impl PublishedStatus {
    pub fn new(status: EngineStatus) -> Self {
        Self(Arc::new(Mutex::new(status)))
    }

    pub fn lock(&self) -> MutexGuard<'_, EngineStatus> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
