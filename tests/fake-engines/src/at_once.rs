//! Engines that complete each operation while it is submitted: without the disk, to measure the rest of a save or load,
//! or on the disk, where the order of all transfers must be known.

use crossbeam_channel::{Receiver, Sender, unbounded};
use ringstow::internals::engine::{Action, Completion, Engine, FileId, Op, Waker};
use slab::Slab;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Moves the bytes of an operation whose ranges are valid; returns how many.
type Perform = fn(&File, &mut Action) -> io::Result<usize>;

/// Completes every operation immediately.
///
/// Like every engine, it refuses ranges outside of a buffer and files that are not attached.
pub struct AtOnce {
    name: &'static str,
    depth: usize,
    perform: Perform,
    files: Slab<Arc<File>>,
    /// The waker sends `None`.
    events: Receiver<Option<Completion>>,
    post: Sender<Option<Completion>>,
}

impl AtOnce {
    /// Skips the disk: a write leaves the file unchanged, a read returns zeros, a sync does nothing. A save through it
    /// succeeds, and its data is lost. Takes `depth` operations at once, at least one.
    pub fn null(depth: usize) -> Self {
        Self::of("null", depth.max(1), skip)
    }

    /// Writes, reads and syncs in its own thread. Takes one operation at once: the next begins after the failure of
    /// this one is known.
    pub fn in_order() -> Self {
        Self::of("in order", 1, make)
    }

    fn of(name: &'static str, depth: usize, perform: Perform) -> Self {
        let (post, events) = unbounded();
        Self { name, depth, perform, files: Slab::new(), events, post }
    }

    fn perform(&self, op: &mut Op) -> io::Result<usize> {
        let Some(file) = self.files.get(op.file.0 as usize) else {
            let reason = format!("file {} is not attached", op.file.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        };
        op.action.transfer().map_or(Ok(()), |transfer| transfer.check())?;
        (self.perform)(file, &mut op.action)
    }
}

fn skip(_: &File, action: &mut Action) -> io::Result<usize> {
    let is_read = matches!(action, Action::Read(_));
    let Some(transfer) = action.transfer_mut() else { return Ok(0) };
    if is_read {
        transfer.buffer[transfer.start..transfer.start + transfer.len].fill(0);
    }
    Ok(transfer.len)
}

fn make(file: &File, action: &mut Action) -> io::Result<usize> {
    match action {
        Action::Write(t) => file.write_at(&t.buffer[t.start..t.start + t.len], t.offset),
        Action::Read(t) => file.read_at(&mut t.buffer[t.start..t.start + t.len], t.offset),
        Action::Sync => file.sync_all().map(|()| 0),
    }
}

impl Engine for AtOnce {
    fn name(&self) -> &'static str {
        self.name
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        Ok(FileId(self.files.insert(file) as u32))
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
