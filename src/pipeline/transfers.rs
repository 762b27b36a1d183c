//! The transfers of one save or load: its threads submit them, the I/O thread ends each.

use super::in_flight::InFlight;
use super::job::Job;
use super::trace::What;
use crate::engine::Action;
use crate::engine::queue::{Attached, Outcome, Queue, Reply, Request};
use crate::error::{Error, Result};
use crate::object::ObjectFile;
use crate::sys::inherited::Inherited;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A file while a save or load moves its blocks.
pub(super) struct OpenFile {
    pub path: Arc<Path>,
    pub file: Arc<File>,
    pub attached: Attached,
    /// The queue that serves it: directories on unlike file systems may have queues of their own.
    pub queue: Arc<Queue>,
    /// The same file, if a load is to read from it what the page cache holds.
    pub cached: Option<CachedFile>,
}

/// An open file without O_DIRECT.
pub(super) struct CachedFile {
    /// Of a descriptor besides the engine's.
    _inherited: Option<Inherited>,
    pub file: Arc<File>,
}

impl CachedFile {
    /// The file that the engine has.
    pub fn shared(file: &Arc<File>) -> Self {
        Self { _inherited: None, file: file.clone() }
    }

    /// A descriptor of its own.
    pub fn own(file: File) -> Self {
        Self { _inherited: Some(Inherited::note(&file)), file: Arc::new(file) }
    }
}

/// What blocks are moved to or from.
pub(super) enum Opened {
    File(OpenFile),
    /// An object, which is only read.
    Object(ObjectFile),
}

/// The open files of a save or load, and the transfers to and from them.
///
/// Dropping it waits until no transfer is in flight and the engines have closed the files, which they
/// do in their own time: a save that writes over a recycled file must be the only one to have it open.
pub(super) struct OpenFiles {
    /// `None` for a file of which nothing is read.
    files: Vec<Option<Opened>>,
    transfers: Arc<Transfers>,
}

impl OpenFiles {
    pub fn new(files: Vec<Option<OpenFile>>, job: &Arc<Job>) -> Self {
        let files = files.into_iter().map(|file| file.map(Opened::File)).collect();
        Self::of(files, job)
    }

    pub fn of(files: Vec<Option<Opened>>, job: &Arc<Job>) -> Self {
        Self { files, transfers: Arc::new(Transfers::new(job)) }
    }

    /// What was opened of this number in the plan.
    fn get(&self, number: usize) -> &Opened {
        self.files[number].as_ref().expect("every file that a block lies in is open")
    }

    /// The open file of this number, of a save or stream: these open no objects.
    pub fn file(&self, number: usize) -> &OpenFile {
        match self.get(number) {
            Opened::File(open) => open,
            Opened::Object(object) => unreachable!("{} is an object", object.path().display()),
        }
    }

    /// Where it is, for messages.
    pub fn path(&self, number: usize) -> &Arc<Path> {
        match self.get(number) {
            Opened::File(open) => &open.path,
            Opened::Object(object) => object.path(),
        }
    }

    /// What to read from that the page cache holds of a file, if anything.
    pub fn cached(&self, number: usize) -> Option<&File> {
        match self.get(number) {
            Opened::File(open) => open.cached.as_ref().map(|cached| &*cached.file),
            Opened::Object(_) => None,
        }
    }

    /// The files, objects not among them.
    pub fn iter(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.iter().flatten().filter_map(|opened| match opened {
            Opened::File(open) => Some(open),
            Opened::Object(_) => None,
        })
    }

    /// The queues that serve the files, each once.
    pub fn queues(&self) -> Vec<Arc<Queue>> {
        let mut queues: Vec<Arc<Queue>> = Vec::new();
        for open in self.iter() {
            if !queues.iter().any(|known| Arc::ptr_eq(known, &open.queue)) {
                queues.push(open.queue.clone());
            }
        }
        queues
    }

    /// Submits the transfer of a block of `bytes` bytes. A write moves its padding too; a read need not, since the
    /// file may end before. When the transfer ends, the I/O thread traces it and calls `end`.
    pub fn submit(
        &self,
        file: usize,
        (block, bytes): (usize, usize),
        action: Action,
        end: impl FnOnce(&Transfers, Outcome) + Send + 'static,
    ) {
        let (opened, transfers) = (self.get(file), self.transfers.clone());
        let (what, needed) = match &action {
            Action::Write(transfer) => (What::Write, transfer.len),
            _ => (What::Read, bytes),
        };
        transfers.in_flight.begin();
        let queued = Instant::now();
        let (is_bulk, abort) = (transfers.job.is_background(), Some(transfers.job.stop_flag()));
        let reply = Reply::new(move |outcome: Outcome| {
            transfers.job.note_transfer(what, (queued, outcome.started), block, bytes as u64);
            end(&transfers, outcome);
            transfers.in_flight.end();
        });
        match opened {
            Opened::File(open) => {
                let file = open.attached.id();
                open.queue.submit(Request { file, action, needed, is_bulk, abort, reply });
            }
            Opened::Object(object) => object.submit(action, needed, abort, reply),
        }
    }

    /// Stops the save or load with this error, unless another came first.
    pub fn fail(&self, error: Error) {
        self.transfers.fail(error);
    }

    /// Waits until no transfer is in flight. `dir` is the checkpoint's, for messages.
    ///
    /// # Errors
    /// The first failure; [`Error::Cancelled`] if the job was cancelled.
    pub fn settle(&self, dir: &Path) -> Result<()> {
        match self.transfers.in_flight.settle() {
            Some(error) => Err(error),
            None if self.transfers.job.stopped() => Err(Error::Cancelled { path: dir.into() }),
            None => Ok(()),
        }
    }
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        self.transfers.in_flight.settle();
        let queues = self.queues();
        self.files.clear();
        queues.iter().for_each(|queue| queue.settle());
    }
}

/// The transfers of one save or load, as the I/O thread sees them.
#[derive(Debug)]
pub(super) struct Transfers {
    job: Arc<Job>,
    in_flight: InFlight<Error>,
}

impl Transfers {
    fn new(job: &Arc<Job>) -> Self {
        Self { job: job.clone(), in_flight: InFlight::new() }
    }

    /// The save or load whose transfers these are.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Keeps the first failure, and stops the job.
    pub fn fail(&self, error: Error) {
        self.in_flight.fail(error);
        self.job.cancel();
    }
}
