//! What a save and a load say of their blocks, read back as a viewer would.

use crate::common::held::{self, made};
use crate::common::{engine, noise, on, runtime, small_config};
use fake_engines::{Twist, Twisted};
use ringstow::internals::engine::{Engine, Op};
use ringstow::internals::store;
use ringstow::{Checkpoint, Job, LoadOptions, Runtime, StateDict};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

/// A stretch of time, in microseconds from the beginning.
#[derive(Debug, Clone, Copy)]
struct Span {
    from: f64,
    until: f64,
    block: u64,
}

impl Span {
    fn overlaps(self, other: Self) -> bool {
        self.from < other.until && other.from < self.until
    }
}

/// The events of this name, complete ones and pairs of a beginning and an end.
fn spans(trace: &Value, name: &str) -> Vec<Span> {
    let events = trace["traceEvents"].as_array().unwrap();
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
    let named = events.iter().filter(|event| event["name"] == name);
    let span = |event: &Value| {
        let from = number(event, "ts");
        let until = match event["ph"].as_str().unwrap() {
            "X" => from + number(event, "dur"),
            "b" => {
                let is_end = |other: &&Value| other["ph"] == "e" && other["id"] == event["id"];
                number(events.iter().find(is_end).unwrap(), "ts")
            }
            _ => return None,
        };
        Some(Span { from, until, block: event["args"]["block"].as_u64().unwrap_or(u64::MAX) })
    };
    named.filter_map(span).collect()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Steps that two threads wait for: the first block's write has begun, the last block is being filled.
#[derive(Default)]
struct Meeting {
    steps: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Meeting {
    fn step(&self, change: impl FnOnce(&mut (bool, bool)), until: impl Fn(&(bool, bool)) -> bool) {
        let mut steps = self.steps.lock().unwrap();
        change(&mut steps);
        self.changed.notify_all();
        drop(self.changed.wait_while(steps, |steps| !until(steps)).unwrap());
    }
}

/// Begins a write, and does no more before the last block is being filled.
struct Slow(Arc<Meeting>);

impl Twist for Slow {
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        // The trial write is of the first block.
        if op.action.transfer().is_some_and(|transfer| transfer.offset > 0) {
            self.0.step(|steps| steps.0 = true, |steps| steps.1);
        }
        inner.submit(op);
    }
}

/// A state of so many blocks.
fn state(blocks: usize) -> StateDict<'static> {
    held::only(noise(1, blocks * 4096))
}

#[test]
fn blocks_are_filled_while_others_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("save.json");
    let meeting = Arc::<Meeting>::default();
    let engines = meeting.clone();
    let build = move || Ok(Twisted::engine(engine("portable")?, Slow(engines.clone())));
    let runtime = Runtime::with_engine(small_config(), Arc::new(build)).unwrap();
    // The last bytes are had only when a write has begun.
    let bytes = noise(1, 5 * 4096);
    let state = held::only(made(bytes.len(), move |offset, to| {
        to.copy_from_slice(&bytes[offset..offset + to.len()]);
        if offset + to.len() == bytes.len() {
            meeting.step(|steps| steps.1 = true, |steps| steps.0);
        }
        Ok(())
    }));
    let job = Arc::new(Job::tracing(&file));
    let report = store::save(&runtime, &state, &dir.path().join("ckpt"), &job).unwrap();

    let trace = read(&file);
    let (fills, writes) = (spans(&trace, "fill"), spans(&trace, "write"));
    let blocks = report.file_bytes.div_ceil(4096) as usize;
    assert_eq!((fills.len(), writes.len()), (blocks, blocks));
    assert_eq!(spans(&trace, "queued").len(), blocks);
    let waits = |write: &Span| fills.iter().any(|f| f.block > write.block && f.overlaps(*write));
    assert!(writes.iter().any(waits), "no fill while a block before it was written: {trace}");
    for name in ["plan", "prepare", "sync", "commit"] {
        assert_eq!(spans(&trace, name).len(), 1, "{name}");
    }
    let [plan, commit] = ["plan", "commit"].map(|name| spans(&trace, name)[0]);
    assert!(writes.iter().all(|w| plan.until <= w.from && w.until <= commit.from));
}

#[test]
fn a_load_says_what_it_read_checked_and_delivered() {
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().join("ckpt"), dir.path().join("load.json"));
    let runtime = runtime();
    store::save(&runtime, &state(9), &path, &Arc::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let job = Arc::new(Job::tracing(&file));
    checkpoint.load_names(["t"], LoadOptions::default().on(&runtime, &job)).unwrap();
    let trace = read(&file);
    let (reads, checks) = (spans(&trace, "read"), spans(&trace, "checksum"));
    assert_eq!((reads.len(), checks.len()), (9, 9));
    for check in checks {
        let read = reads.iter().find(|read| read.block == check.block).unwrap();
        assert!(read.until <= check.from);
    }
}

#[test]
fn an_export_says_the_same_as_a_save() {
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().join("model"), dir.path().join("export.json"));
    store::export(&runtime(), &state(1), &path, &Arc::new(Job::tracing(&file))).unwrap();
    let trace = read(&file);
    for name in ["plan", "prepare", "sync", "commit"] {
        assert_eq!(spans(&trace, name).len(), 1, "{name}");
    }
}

#[test]
fn failed_save_is_traced_and_failed_trace_still_saves() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let nowhere = Arc::new(Job::tracing(dir.path().join("no/such/directory.json")));
    store::save(&runtime, &state(1), &dir.path().join("ckpt"), &nowhere).unwrap();
    let file = dir.path().join("failed.json");
    let job = Arc::new(Job::tracing(&file));
    job.cancel();
    store::save(&runtime, &state(1), &dir.path().join("other"), &job).unwrap_err();
    assert_eq!(spans(&read(&file), "plan").len(), 1);
}

#[test]
fn configured_trace_is_written_for_any_job() {
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().join("ckpt"), dir.path().join("asked.json"));
    let config = ringstow::Config { trace: Some(file.clone()), ..small_config() };
    let runtime = Runtime::shared(&config).unwrap();
    store::save(&runtime, &state(1), &path, &Arc::default()).unwrap();
    assert_eq!(spans(&read(&file), "plan").len(), 1);
    fs::remove_file(&file).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.load_names(["t"], on(&runtime)).unwrap();
    assert!(!spans(&read(&file), "read").is_empty());
}
