//! What is saved is what the tensors hold at the moment of the call, and training goes on.

use super::*;
use ringstow::Error;
use ringstow::Job;
use serde_json::Value;

#[test]
fn save_holds_work_queued_before_the_call() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let streams = streams();
    let mut tensor = Tensor::dense("weight", 0, noise(1, 300_000));
    let busy = streams[0].gate();
    streams[0].memset(tensor.memory.ptr(), 7, 300_000);
    let handle =
        store().save_async(state_of(std::slice::from_ref(&tensor), &streams), dir.path()).unwrap();
    assert!(!handle.staged(), "nothing can be copied yet");
    busy.open();
    assert!(handle.wait_staged(None));
    streams[0].memset(tensor.memory.ptr(), 9, 300_000);
    streams[0].synchronize();
    handle.result().unwrap();
    tensor.bytes.fill(7);
    assert_holds(&ringstow::load(dir.path()).unwrap(), &[tensor]);
}

#[test]
fn copies_wait_only_for_work_queued_before_the_call() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let streams = streams();
    let tensors = [Tensor::dense("weight", 0, noise(1, 300_000))];
    let state = state_of(&tensors, &streams);
    let busy = streams[0].gate();
    store().save(&state, dir.path()).unwrap();
    busy.open();
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
}

#[test]
fn save_is_staged_once_the_last_copy_has_ended() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let streams = streams();
    let tensors = [Tensor::dense("weight", 0, noise(1, 300_000))];
    let state = state_of(&tensors, &streams);
    fake.hold();
    let handle = store().save_async(state, dir.path()).unwrap();
    // All five blocks find a buffer, and so are begun.
    while fake.calls("cuMemcpyDtoHAsync_v2") < 5 {
        std::thread::yield_now();
    }
    assert!(!handle.staged());
    fake.release();
    assert!(handle.wait_staged(None));
    handle.result().unwrap();
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
}

#[test]
fn save_that_fits_the_pool_begins_all_copies_before_a_checksum() {
    const BLOCKS: usize = 60; // enough that the first has landed before the last is begun
    let _fake = fake();
    let (dir, streams) = (tempfile::tempdir().unwrap(), streams());
    let tensors = [Tensor::dense("weight", 0, noise(1, (BLOCKS << 16) - 1))];
    let config = Config { pool_bytes: 64 << 16, fillers: 1, ..config() };
    let (runtime, file) = (Runtime::new(config).unwrap(), dir.path().join("trace.json"));
    let (state, path) = (state_of(&tensors, &streams), dir.path().join("checkpoint"));
    let job = Arc::new(Job::tracing(&file));
    ringstow::internals::store::save(&runtime, &state, &path, &job).unwrap();

    let trace: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let begins = |name: &str| -> Vec<f64> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        events.filter(|event| event["name"] == name).map(|e| e["ts"].as_f64().unwrap()).collect()
    };
    let (fills, checksums) = (begins("fill"), begins("checksum"));
    // One more for the header.
    assert_eq!((fills.len(), checksums.len()), (BLOCKS + 1, BLOCKS + 1));
    assert!(fills.iter().all(|fill| checksums.iter().all(|checksum| fill <= checksum)));
}

#[test]
fn cancelled_save_leaves_no_copy_and_no_commit() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ckpt");
    let streams = streams();
    let busy = streams[0].gate();
    let tensors = [Tensor::dense("weight", 0, noise(1, 3_000_000))];
    let handle = store().save_async(state_of(&tensors, &streams), &path).unwrap();
    while fake.calls("cuMemcpyDtoHAsync_v2") == 0 {
        std::thread::yield_now();
    }
    handle.cancel();
    busy.open();
    assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    assert!(matches!(
        ringstow::load(&path),
        Err(Error::NotCommitted { .. } | Error::NoCheckpoint { .. } | Error::Io { .. })
    ));
    // Freed memory that a copy still used would be a violation, which the fake tells of.
    drop(tensors);
    Runtime::release_shared();
}

#[test]
fn a_graph_that_the_trainer_captures_is_not_disturbed() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let (streams, graph) = (streams(), Stream::new(0));
    let tensors = [Tensor::dense("weight", 0, noise(1, 300_000))];
    let mut to = Tensor::dense("weight", 0, vec![0; 300_000]);
    graph.begin_capture();
    let handle = store().save_async(state_of(&tensors, &streams), dir.path()).unwrap();
    handle.result().unwrap();
    // Also into and out of memory, on this thread.
    store().save(&state_of(&tensors, &streams), dir.path()).unwrap();
    loads::load_into(dir.path(), &to, &streams);
    assert_eq!(graph.end_capture(), 0);
    to.bytes = tensors[0].bytes.clone();
    assert!(to.memory.read() == to.bytes);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn capturing_stream_is_refused_and_its_graph_intact() {
    let _fake = fake();
    let graph = Stream::new(0);
    let tensor = Tensor::dense("weight", 0, noise(1, 1000));
    graph.begin_capture();
    let base = (0, tensor.memory.ptr());
    // SAFETY: the memory is there.
    let refused =
        unsafe { CudaSource::new(base, (1, &[1000], None), graph.handle(), &mut Ready::default()) };
    assert_eq!(graph.end_capture(), 0);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("captured into a CUDA graph"), "{message}");
    assert!(message.contains("before the capture begins"), "{message}");
}
