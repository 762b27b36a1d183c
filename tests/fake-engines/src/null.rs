//! An engine that skips the disk, to measure the rest of a save or load.

use crossbeam_channel::{Receiver, Sender, unbounded};
use ringstow::internals::engine::{Action, Completion, Engine, FileId, Op, Waker};
use slab::Slab;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Completes every operation immediately and in full: a write leaves the file unchanged, a read returns
/// zeros, a sync does nothing. A save through it succeeds, and its data is lost.
///
/// Like every engine, it refuses ranges outside of a buffer and files that are not attached.
pub struct Null {
    depth: usize,
    files: Slab<()>,
    /// The waker sends `None`.
    events: Receiver<Option<Completion>>,
    post: Sender<Option<Completion>>,
}

impl Null {
    /// Takes `depth` operations at once, at least one.
    pub fn new(depth: usize) -> Self {
        let (post, events) = unbounded();
        Self { depth: depth.max(1), files: Slab::new(), events, post }
    }

    fn perform(&self, op: &mut Op) -> io::Result<usize> {
        if !self.files.contains(op.file.0 as usize) {
            let reason = format!("file {} is not attached", op.file.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let is_read = matches!(op.action, Action::Read(_));
        let Some(transfer) = op.action.transfer_mut() else { return Ok(0) };
        transfer.check()?;
        if is_read {
            transfer.buffer[transfer.start..transfer.start + transfer.len].fill(0);
        }
        Ok(transfer.len)
    }
}

impl Engine for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn attach(&mut self, _file: Arc<File>) -> io::Result<FileId> {
        Ok(FileId(self.files.insert(()) as u32))
    }

    fn detach(&mut self, file: FileId) {
        self.files.try_remove(file.0 as usize);
    }

    fn submit(&mut self, mut op: Op) {
        let result = self.perform(&mut op);
        self.post.send(Some(Completion { op, result })).expect("the engine holds the receiver");
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        let first = self.events.recv().expect("the engine holds a sender");
        done.extend(std::iter::once(first).chain(self.events.try_iter()).flatten());
        Ok(())
    }

    fn waker(&self) -> Waker {
        let post = self.post.clone();
        Arc::new(move || {
            // Fails only after the engine was dropped; then nothing waits.
            let _ = post.send(None);
        })
    }
}
