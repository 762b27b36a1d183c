//! What the driver refuses, and what fails on the way.

use super::*;
use ringstow::internals::device::cuda::Device;
use ringstow::{Error, Result};
use std::sync::mpsc;
use std::time::Duration;

const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;
const ILLEGAL_ADDRESS: i32 = 700;

fn save(runtime: &Runtime, tensors: &[Tensor], path: &Path) -> Result<SaveReport> {
    ringstow::internals::store::save(runtime, &state_of(tensors, &streams()), path, &Arc::default())
}

fn tensors() -> Vec<Tensor> {
    (0..8).map(|i| Tensor::dense(&format!("layer.{i}"), 0, noise(i, 100_000))).collect()
}

#[test]
fn unpinnable_memory_is_copied_pageable_and_reported() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let (runtime, tensors) = (runtime(), tensors());
    fake.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY);
    let report = save(&runtime, &tensors, dir.path()).unwrap();
    assert_eq!(report.moved.pinned, Some(false));
    let said = report
        .moved
        .fallbacks
        .iter()
        .find(|f| f.kind == ringstow::FallbackKind::PinnedMemory)
        .unwrap();
    assert!(said.reason.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{}", said.reason);
    assert!(said.remedy.contains("pool_bytes"), "{}", said.remedy);
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
    let to = Tensor::dense("layer.3", 0, vec![0; 100_000]);
    fake.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY);
    let report = loads::load_into(dir.path(), &to, &streams());
    assert_eq!(report.moved.pinned, Some(false));
    assert!(to.memory.read() == tensors[3].bytes);
}

#[test]
fn a_pool_that_is_pinned_in_part_is_not_pinned() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let config = Config { pool_bytes: 160 << 20, block_bytes: 4 << 20, ..Config::default() };
    let (runtime, tensors) = (Runtime::new(config).unwrap(), tensors());
    let before = fake.live("registrations");
    fake.fail("cuMemHostRegister_v2", 2, OUT_OF_MEMORY);
    let report = save(&runtime, &tensors, dir.path()).unwrap();
    assert_eq!(fake.calls("cuMemHostRegister_v2"), 3, "64 MiB at a time");
    assert_eq!((report.moved.pinned, fake.live("registrations")), (Some(false), before));
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
}

/// The save fails and names what it was at; what was there before is there still, and the next one
/// works, if the GPU does.
fn fails_cleanly(fake: &Fake, function: &str, after: u32, code: i32, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (runtime, tensors) = (runtime(), tensors());
    save(&runtime, &tensors[..1], dir.path()).unwrap();
    fake.fail(function, after, code);
    let error = save(&runtime, &tensors, dir.path()).unwrap_err();
    assert!(matches!(error, Error::Gpu { device: 0, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains(name) && message.contains("\"layer."), "{message}");
    assert!(message.contains("GPU 0"), "{message}");
    mend(fake);
    assert_eq!(ringstow::load(dir.path()).unwrap().tensors().count(), 1);
    save(&runtime, &tensors, dir.path()).unwrap();
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
}

#[test]
fn failed_save_says_which_gpu_it_waits_for_and_lets_nothing_go_before() {
    let fake = fake();
    let (said, warnings) = mpsc::channel();
    tracing::subscriber::set_global_default(Warnings(said)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (runtime, tensors) = (runtime(), tensors());
    fake.hold();
    fake.fail("cuMemcpyDtoHAsync_v2", 3, LAUNCH_FAILED);
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| save(&runtime, &tensors, dir.path()).map(drop));
        let warning = warnings.recv_timeout(Duration::from_secs(300));
        let is_waiting = !saving.is_finished();
        fake.release();
        assert!(matches!(saving.join().unwrap(), Err(Error::Gpu { device: 0, .. })));
        let warning = warning.expect("it says that it waits");
        assert!(warning.contains("waits for GPU 0 to end copying to the host"), "{warning}");
        assert!(is_waiting, "the copies were in flight");
    });
    let more: Vec<String> = warnings.try_iter().collect();
    assert!(more.is_empty(), "{more:?}");
    mend(&fake);
    save(&runtime, &tensors, dir.path()).unwrap();
}

#[test]
fn refused_copy_fails_only_its_save() {
    let fake = fake();
    fails_cleanly(&fake, "cuMemcpyDtoHAsync_v2", 3, LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED");
}

#[test]
fn failed_device_copy_fails_only_its_save() {
    let fake = fake();
    fails_cleanly(&fake, "execute", 4, ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS");
}

#[test]
fn refused_event_fails_only_its_save() {
    let fake = fake();
    for after in [2, 3, 5] {
        fails_cleanly(&fake, "cuEventRecord", after, OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY");
    }
    fails_cleanly(&fake, "cuEventQuery", 3, LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED");
}

#[test]
fn a_load_that_fails_on_the_device_says_so() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(1, 500_000);
    saved(dir.path(), &[Tensor::dense("weight", 0, bytes)], &config());
    let (to, streams) = (Tensor::dense("weight", 0, vec![0; 500_000]), streams());
    let checkpoint = ringstow::Checkpoint::open(dir.path()).unwrap();
    for (function, after) in [("cuMemcpyHtoDAsync_v2", 1), ("execute", 2)] {
        let mut ready = Ready::default();
        let targets = [("weight", to.target(&streams, &mut ready))];
        fake.fail(function, after, ILLEGAL_ADDRESS);
        let loaded = checkpoint.load_into(&targets, on(&runtime()));
        let message = loaded.unwrap_err().to_string();
        assert!(message.contains("copying from the host to GPU 0"), "{message}");
        assert!(message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{message}");
        mend(&fake);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let fake = fake();
    let message = Device::get(7).unwrap_err().to_string();
    assert!(message.contains("GPU 7") && message.contains("CUDA_VISIBLE_DEVICES"), "{message}");
    assert_eq!(Device::count().unwrap(), 2);
    assert_eq!(fake.live("contexts"), 0);
}

#[test]
fn a_gpu_that_does_not_open_leaves_nothing_behind() {
    let fake = fake();
    for (function, after) in [("cuDevicePrimaryCtxRetain", 0), ("cuStreamCreate", 1)] {
        fake.fail(function, after, OUT_OF_MEMORY);
        let message = Device::get(1).unwrap_err().to_string();
        assert!(message.contains("opening GPU 1"), "{message}");
        assert_eq!((fake.live("contexts"), fake.live("streams")), (0, 0));
    }
}
