//! An engine whose system is short of something for as long as its first operation is in flight.

use crossbeam_channel::{Receiver, Sender, unbounded};
use nix::libc::EAGAIN;
use ringstow::internals::engine::{Completion, Engine, FileId, Op, Waker};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a test has in hand of a [`Short`].
#[derive(Clone)]
pub struct Supply {
    post: Sender<Event>,
    refused: Arc<AtomicUsize>,
}

impl Supply {
    /// How many operations were refused with `EAGAIN`.
    pub fn refused(&self) -> usize {
        self.refused.load(Ordering::SeqCst)
    }

    /// Lets the first operation complete: from then on nothing is short.
    pub fn come(&self) {
        self.post.send(Event::Came).expect("the engine holds the receiver");
    }
}

enum Event {
    Woken,
    Came,
    Done(Completion),
}

/// Holds its first operation until the supply comes, and refuses all others until then. Moves no bytes.
pub struct Short {
    first: Option<Op>,
    has_come: bool,
    files: u32,
    events: Receiver<Event>,
    supply: Supply,
}

impl Short {
    /// The engine, and what ends the shortage.
    pub fn new() -> (Self, Supply) {
        let (post, events) = unbounded();
        let supply = Supply { post, refused: Arc::default() };
        (Self { first: None, has_come: false, files: 0, events, supply: supply.clone() }, supply)
    }

    fn post(&self, event: Event) {
        self.supply.post.send(event).expect("the engine holds the receiver");
    }
}

fn moved(op: Op) -> Completion {
    let bytes = op.action.transfer().map_or(0, |transfer| transfer.len);
    Completion { op, result: Ok(bytes) }
}

impl Engine for Short {
    fn name(&self) -> &'static str {
        "short"
    }

    fn depth(&self) -> usize {
        4
    }

    fn attach(&mut self, _: Arc<File>) -> io::Result<FileId> {
        self.files += 1;
        Ok(FileId(self.files - 1))
    }

    fn detach(&mut self, _: FileId) {}

    fn submit(&mut self, op: Op) {
        if self.has_come {
            return self.post(Event::Done(moved(op)));
        }
        if self.first.is_none() {
            self.first = Some(op);
            return;
        }
        self.supply.refused.fetch_add(1, Ordering::SeqCst);
        let result = Err(io::Error::from_raw_os_error(EAGAIN));
        self.post(Event::Done(Completion { op, result }));
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        match self.events.recv().expect("the engine holds a sender") {
            Event::Woken => {}
            Event::Done(completion) => done.push(completion),
            Event::Came => {
                self.has_come = true;
                done.extend(self.first.take().map(moved));
            }
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let post = self.supply.post.clone();
        Arc::new(move || {
            // Fails only after the engine was dropped; then nothing waits.
            let _ = post.send(Event::Woken);
        })
    }
}
