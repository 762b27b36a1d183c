//! What happened to each block of a save or load, and when, in Chrome's trace format, which Perfetto and
//! `chrome://tracing` open.
//!
//! Format: the "Trace Event Format" document of the Chromium project. The work of a thread is a row of
//! complete events; what runs meanwhile (a GPU's copies, transfers) are asynchronous events.

use crate::sys::file::create_or_empty;
use serde::Serialize;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// A step of a save or load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Laying out the shards.
    Plan,
    /// Memory, files, the trial transfer.
    Prepare,
    /// Waiting for a free buffer.
    Wait,
    /// Copying a block's tensors into its buffer, with the checksum of what is in host memory.
    Fill,
    /// A GPU's copies from or to a buffer.
    Device,
    /// A checksum.
    Checksum,
    /// From the submission of a transfer until the engine starts it.
    Queued,
    /// Being written.
    Write,
    /// Being read.
    Read,
    /// Copying a block to where it goes.
    Deliver,
    /// Making the data durable.
    Sync,
    /// Manifest and renames.
    Commit,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Prepare => "prepare",
            Self::Wait => "wait for a buffer",
            Self::Fill => "fill",
            Self::Device => "GPU copy",
            Self::Checksum => "checksum",
            Self::Queued => "queued",
            Self::Write => "write",
            Self::Read => "read",
            Self::Deliver => "deliver",
            Self::Sync => "sync",
            Self::Commit => "commit",
        }
    }

    /// Whether it runs while the thread that started it does something else.
    fn is_asynchronous(self) -> bool {
        matches!(self, Self::Device | Self::Queued | Self::Write | Self::Read)
    }
}

/// Start and end.
pub(crate) type Interval = (Instant, Instant);

/// The steps so far, and the file to write them to.
#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    began: Instant,
    record: Mutex<Record>,
}

#[derive(Debug, Default)]
struct Record {
    spans: Vec<Span>,
    /// Row by row, the thread that is meant.
    threads: Vec<ThreadId>,
}

#[derive(Debug)]
struct Span {
    what: What,
    from: Instant,
    until: Instant,
    row: usize,
    block: Option<usize>,
    bytes: u64,
}

impl Trace {
    /// Starts an empty trace now.
    pub fn new(path: PathBuf) -> Self {
        Self { path, began: Instant::now(), record: Mutex::default() }
    }

    /// The file to write it to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a step of this thread, or one that it started. `block` is the block's number in the plan, and
    /// `bytes` the number of bytes moved.
    pub fn add(&self, what: What, (from, until): Interval, block: Option<usize>, bytes: u64) {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let me = thread::current().id();
        let row = record.threads.iter().position(|&thread| thread == me).unwrap_or_else(|| {
            record.threads.push(me);
            record.threads.len() - 1
        });
        record.spans.push(Span { what, from, until, row, block, bytes });
    }

    /// Writes the file.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<()> {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = (0..record.threads.len()).map(Event::name_of);
        let spans = record.spans.iter().enumerate().flat_map(|(id, span)| self.events(id, span));
        let events = Events { trace_events: rows.chain(spans).collect(), display_time_unit: "ms" };
        let mut file = BufWriter::new(create_or_empty(&self.path)?);
        serde_json::to_writer(&mut file, &events)?;
        file.flush()
    }

    fn events(&self, id: usize, span: &Span) -> Vec<Event> {
        let event = |phase, moment: Instant| Event {
            name: span.what.name(),
            cat: span.what.name(),
            ph: phase,
            ts: microseconds(moment.saturating_duration_since(self.began)),
            dur: None,
            pid: 1,
            tid: span.row + 1,
            id: None,
            args: Arguments { block: span.block, bytes: Some(span.bytes), name: None },
        };
        if span.what.is_asynchronous() {
            let (begin, end) = (event("b", span.from), event("e", span.until));
            return vec![Event { id: Some(id), ..begin }, Event { id: Some(id), ..end }];
        }
        let dur = Some(microseconds(span.until.saturating_duration_since(span.from)));
        vec![Event { dur, ..event("X", span.from) }]
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// The file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Events {
    trace_events: Vec<Event>,
    display_time_unit: &'static str,
}

/// An event, with the format's names.
#[derive(Serialize)]
struct Event {
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    args: Arguments,
}

#[derive(Serialize)]
struct Arguments {
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl Event {
    /// Says what a row is called.
    fn name_of(row: usize) -> Self {
        let name = Some(format!("thread {}", row + 1));
        let args = Arguments { block: None, bytes: None, name };
        let (pid, tid) = (1, row + 1);
        Self { name: "thread_name", cat: "", ph: "M", ts: 0.0, dur: None, pid, tid, id: None, args }
    }
}
