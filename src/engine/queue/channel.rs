//! The command channel to the I/O thread, and what that thread publishes about its engine.

use super::request::Request;
use super::wake::WakePending;
use crate::engine::fallback::Fallback;
use crate::engine::{Engine, FileId, Waker};
use crossbeam_channel::Sender;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

pub(super) enum Command {
    Attach(Arc<File>, Sender<io::Result<FileId>>),
    Detach(FileId),
    /// Answered when all commands before it have been carried out.
    Settle(Sender<()>),
    Submit(Request),
    Stop,
}

/// What the I/O thread and the others both see.
#[derive(Default)]
pub(super) struct Shared {
    pub wake: WakePending,
    status: Mutex<EngineStatus>,
}

/// What changes about an engine while it works: it registers buffers when they are first used.
#[derive(Default)]
pub(super) struct EngineStatus {
    pub registered: usize,
    pub fallbacks: Vec<Fallback>,
}

impl Shared {
    /// Publishes what has changed about the engine. Cheap if nothing has: the I/O thread calls it at every turn.
    pub fn publish(&self, engine: &dyn Engine) {
        let mut status = self.status();
        status.registered = engine.registered();
        if status.fallbacks != engine.fallbacks() {
            status.fallbacks = engine.fallbacks().to_vec();
        }
    }

    /// The engine's latest status.
    pub fn status(&self) -> MutexGuard<'_, EngineStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The other threads' end.
pub(super) struct CommandChannel {
    pub commands: Sender<Command>,
    pub waker: Waker,
    pub shared: Arc<Shared>,
    /// Dangling from the moment at which the engine is given up, before any request gets that answer.
    pub alive: Weak<()>,
}

impl CommandChannel {
    /// Sends a command, or returns it if the I/O thread is gone.
    pub fn send(&self, command: Command) -> Result<(), Command> {
        self.commands.send(command).map_err(|refused| refused.0)?;
        if self.shared.wake.claim() {
            (self.waker)();
        }
        Ok(())
    }
}
