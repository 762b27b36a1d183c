//! What happened to each block of a save or load, and when, in Chrome's trace format, which Perfetto and
//! `chrome://tracing` open.
//!
//! Format: the "Trace Event Format" document of the Chromium project. The work of a thread is a row of
//! complete events; what runs meanwhile (a GPU's copies, transfers) are asynchronous events.

use crate::sys::file::create_or_empty;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// A step of a save or load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum What {
    /// Laying out the shards.
    Plan,
    /// Linking files of the base, and comparing the tensors with it.
    Compare,
    /// Memory, files, the trial transfer.
    Prepare,
    /// Waiting for a free buffer.
    #[serde(rename = "wait for a buffer")]
    Wait,
    /// Copying a block's tensors into its buffer, with the checksum of what is in host memory.
    Fill,
    /// A GPU's copies from or to a buffer.
    #[serde(rename = "GPU copy")]
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
    /// Starts an empty trace now. A later change of directory does not move its file.
    pub fn new(path: &Path) -> Self {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
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

    /// Writes the file, event by event: a large save has hundreds of thousands.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<()> {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = BufWriter::new(create_or_empty(&self.path)?);
        write!(file, r#"{{"displayTimeUnit":"ms","traceEvents":["#)?;
        let mut separator = "";
        let rows = (1..=record.threads.len()).map(name_of_row);
        let spans = record.spans.iter().enumerate().flat_map(|(id, span)| self.events(id, span));
        for event in rows.chain(spans) {
            write!(file, "{separator}\n{event}")?;
            separator = ",";
        }
        write!(file, "\n]}}")?;
        file.flush()
    }

    /// The events of a span, in the format's names.
    fn events(&self, id: usize, span: &Span) -> Vec<Value> {
        let mut args = json!({ "bytes": span.bytes });
        if let Some(block) = span.block {
            args["block"] = block.into();
        }
        let event = |phase, moment: Instant| {
            let (name, ts) = (span.what, microseconds(self.began, moment));
            let (tid, args) = (span.row + 1, &args);
            json!({ "name": name, "cat": name, "ph": phase, "ts": ts, "pid": 1, "tid": tid, "args": args })
        };
        if span.what.is_asynchronous() {
            let mut pair = vec![event("b", span.from), event("e", span.until)];
            pair.iter_mut().for_each(|event| event["id"] = id.into());
            return pair;
        }
        let mut complete = event("X", span.from);
        complete["dur"] = microseconds(span.from, span.until).into();
        vec![complete]
    }
}

/// Says what a row is called.
fn name_of_row(row: usize) -> Value {
    let args = json!({ "name": format!("thread {row}") });
    json!({ "name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": args })
}

fn microseconds(from: Instant, until: Instant) -> f64 {
    until.saturating_duration_since(from).as_nanos() as f64 / 1e3
}
