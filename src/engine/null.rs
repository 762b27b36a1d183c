//! The engine to nowhere: for measuring all of a save or load but its disk. No configuration leads
//! to it; who wants it hands it to [`Runtime::with_engine`](crate::Runtime::with_engine).

use super::slots::Slots;
use super::{Action, Completion, Engine, FileId, Op, Waker, not_attached};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Completes every operation at once and in full: a write leaves the file as it is, a read gives
/// zeros, a sync does nothing. What is saved through it is lost, though the save succeeds.
///
/// Like any engine it refuses what lies outside of a buffer, and files that are not attached.
pub struct Null {
    depth: usize,
    files: Slots<()>,
    /// `None` is the waker's.
    events: Receiver<Option<Completion>>,
    post: Sender<Option<Completion>>,
}

impl Null {
    /// Takes `depth` operations at once, at least one.
    pub fn new(depth: usize) -> Self {
        let (post, events) = unbounded();
        Self { depth: depth.max(1), files: Slots::new(), events, post }
    }
}

fn perform(action: &mut Action) -> io::Result<usize> {
    let writes = matches!(action, Action::Write(_));
    let Some(transfer) = action.transfer_mut() else { return Ok(0) };
    transfer.check()?;
    if !writes {
        transfer.buffer[transfer.start..transfer.start + transfer.len].fill(0);
    }
    Ok(transfer.len)
}

impl Engine for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn attach(&mut self, _file: Arc<File>) -> io::Result<FileId> {
        Ok(self.files.insert_with(|_| ()))
    }

    fn detach(&mut self, file: FileId) {
        self.files.remove(file);
    }

    fn submit(&mut self, mut op: Op) {
        let result = match self.files.get(op.file) {
            Some(()) => perform(&mut op.action),
            None => Err(not_attached(op.file)),
        };
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
            // Fails only when the engine is gone, and then nobody waits.
            let _ = post.send(None);
        })
    }
}
