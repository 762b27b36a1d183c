//! The engine for every unix: a few threads with positioned reads and writes.
//!
//! Direct I/O where the file was opened for it; no registered buffers, no unsafe code.

use super::{Action, Completion, Engine, FileId, Op, Waker, not_attached};
use crossbeam_channel::{Receiver, Sender, unbounded};
use slab::Slab;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// More threads than this gain nothing: they wait for the same disk.
const THREADS_MAX: usize = 8;

/// Positioned reads and writes on a few threads.
pub struct Portable {
    depth: usize,
    files: Slab<Arc<File>>,
    /// `None` once the engine is being dropped, which is what ends the threads.
    jobs: Option<Sender<Job>>,
    /// What has completed; `None` wakes.
    events: Receiver<Option<Completion>>,
    post: Sender<Option<Completion>>,
    threads: Vec<JoinHandle<()>>,
}

type Job = (Op, Arc<File>);

impl Portable {
    /// Starts `depth` threads, at most eight.
    ///
    /// # Errors
    /// The system's, when it has no more threads.
    pub fn new(depth: usize) -> io::Result<Self> {
        let (jobs, queued) = unbounded::<Job>();
        let (post, events) = unbounded();
        let mut engine =
            Self { depth, files: Slab::new(), jobs: Some(jobs), events, post, threads: Vec::new() };
        for number in 0..depth.clamp(1, THREADS_MAX) {
            let (queued, post) = (queued.clone(), engine.post.clone());
            let thread = thread::Builder::new().name(format!("ringstow-rw{number}"));
            engine.threads.push(thread.spawn(move || work(&queued, &post))?);
        }
        Ok(engine)
    }
}

/// A thread's life: do jobs until there are no more to come.
fn work(queued: &Receiver<Job>, post: &Sender<Option<Completion>>) {
    for (mut op, file) in queued {
        let result = perform(&mut op.action, &file);
        // Closed before the completion is seen: who detaches the file then has really let go of it.
        drop(file);
        if post.send(Some(Completion { op, result })).is_err() {
            return;
        }
    }
}

#[allow(clippy::disallowed_methods)] // an engine makes its own system calls
fn perform(action: &mut Action, file: &File) -> io::Result<usize> {
    match action {
        Action::Write(t) => {
            t.check()?;
            file.write_at(&t.buffer[t.start..t.start + t.len], t.offset)
        }
        Action::Read(t) => {
            t.check()?;
            file.read_at(&mut t.buffer[t.start..t.start + t.len], t.offset)
        }
        Action::Sync => file.sync_all().map(|()| 0),
    }
}

impl Engine for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        Ok(FileId(self.files.insert(file) as u32))
    }

    fn detach(&mut self, file: FileId) {
        self.files.try_remove(file.key());
    }

    fn submit(&mut self, op: Op) {
        let file = self.files.get(op.file.key()).cloned();
        match (file, &self.jobs) {
            (Some(file), Some(jobs)) => {
                jobs.send((op, file)).expect("the threads live as long as the engine");
            }
            _ => {
                let result = Err(not_attached(op.file));
                let failed = Some(Completion { op, result });
                self.post.send(failed).expect("the engine holds the receiver");
            }
        }
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        let first = self.events.recv().expect("the engine holds a sender");
        done.extend(first.into_iter().chain(self.events.try_iter().flatten()));
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

impl Drop for Portable {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
