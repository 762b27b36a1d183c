//! What is saved is what is loaded, through every engine and every way of opening files.

use crate::common::noise;
use ringstow::{
    Checkpoint, Config, Dtype, EngineChoice, LoadOptions, Runtime, StateDict, Switch, Value,
};
use std::sync::Arc;

/// Sizes in bytes: empty, tiny, odd, a page, around a block, several blocks.
const SIZES: [usize; 9] = [0, 1, 7, 4096, 65535, 65536, 65537, 300_000, 1_048_576];

fn configs() -> Vec<Config> {
    let small = Config { block_bytes: 65536, pool_bytes: 4 * 65536, ..Config::default() };
    let mut all = Vec::new();
    let built = [
        (EngineChoice::Portable, true),
        (EngineChoice::Uring, cfg!(all(target_os = "linux", feature = "uring"))),
        (EngineChoice::TokioUring, cfg!(all(target_os = "linux", feature = "tokio-uring"))),
    ];
    for (engine, _) in built.into_iter().filter(|(_, built)| *built) {
        for direct in [Switch::Auto, Switch::Off] {
            for fixed in [Switch::Auto, Switch::Off] {
                for fillers in [1, 3] {
                    all.push(Config { engine, direct, fixed, fillers, ..small.clone() });
                }
            }
        }
    }
    all.push(Config { shard_bytes: 200_000, ..small });
    all
}

#[test]
fn every_tensor_comes_back_through_every_engine() {
    let tensors: Vec<(String, Vec<u8>)> =
        SIZES.iter().map(|&n| (format!("t{n}"), noise(n as u64, n))).collect();
    for config in configs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ckpt");
        let mut state = StateDict::new();
        for (name, data) in &tensors {
            state.bytes(name, Dtype::U8, &[data.len() as u64], data).unwrap();
        }
        state.value("step", 7);
        let report = ringstow::Store::new(config.clone()).unwrap().save(&state, &path).unwrap();
        if config.engine != EngineChoice::Auto {
            let name = serde_json::to_value(config.engine).unwrap();
            assert_eq!(report.moved.engine, name, "what is asked for by name is used");
        }
        assert_eq!(report.tensor_bytes, SIZES.iter().sum::<usize>() as u64);
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.state().unwrap().get("step"), Some(&Value::Int(7)));
        let runtime = Runtime::new(config.clone()).unwrap();
        let names = tensors.iter().map(|(name, _)| name);
        let loaded = checkpoint
            .load_names(names, LoadOptions::default().on(&runtime, &Arc::default()))
            .unwrap();
        for (name, data) in &tensors {
            assert_eq!(loaded.tensor(name).unwrap().data(), data, "{name} with {config:?}");
        }
        let report = ringstow::internals::store::verify(&runtime, &path, &Arc::default()).unwrap();
        assert!(report.damage.is_empty());
    }
}

#[test]
fn save_over_an_older_one_replaces_and_removes_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = configs().remove(0);
    for step in 0..3u8 {
        let data = vec![step; 100_000];
        let mut state = StateDict::new();
        state.bytes("w", Dtype::U8, &[100_000], &data).unwrap();
        ringstow::Store::new(config.clone()).unwrap().save(&state, dir.path()).unwrap();
        let loaded = ringstow::load(dir.path()).unwrap();
        assert_eq!(loaded.tensor("w").unwrap().data(), data);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "manifest and one shard");
    }
}

#[test]
fn an_empty_state_is_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    ringstow::Store::new(configs()[0].clone())
        .unwrap()
        .save(&StateDict::new(), dir.path())
        .unwrap();
    assert_eq!(ringstow::load(dir.path()).unwrap().tensors().count(), 0);
}

#[test]
fn a_part_is_loaded_without_reading_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let config = configs().remove(0);
    let data: Vec<Vec<u8>> = (0..16).map(|i| noise(i, 1 << 20)).collect();
    let mut state = StateDict::new();
    for (i, bytes) in data.iter().enumerate() {
        state.bytes(format!("layer.{i}"), Dtype::F32, &[1 << 18], bytes).unwrap();
    }
    ringstow::Store::new(config.clone()).unwrap().save(&state, dir.path()).unwrap();
    let runtime = Runtime::new(config.clone()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let loaded = checkpoint
        .load_names(["layer.5"], LoadOptions::default().on(&runtime, &Arc::default()))
        .unwrap();
    assert_eq!(loaded.tensor("layer.5").unwrap().data(), data[5]);
    assert!(loaded.report.read_bytes <= (1 << 20) + 2 * config.block_bytes);
    assert_eq!(loaded.tensor("layer.5").unwrap().as_slice::<f32>().unwrap().len(), 1 << 18);
    assert!(loaded.tensor("layer.5").unwrap().as_slice::<u32>().is_err());
}

/// Wakes the thread that polls.
struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn background_save_is_awaited_without_a_runtime() {
    use std::future::Future;
    use std::task::{Context, Poll, Waker};
    let dir = tempfile::tempdir().unwrap();
    let mut state = StateDict::new();
    state.source(
        ringstow::TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![1 << 20] },
        Box::new(noise(1, 1 << 20)),
    );
    let handle =
        ringstow::Store::new(configs()[0].clone()).unwrap().save_async(state, dir.path()).unwrap();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut handle = std::pin::pin!(handle);
    let report = loop {
        match handle.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(report) => break report.unwrap(),
            Poll::Pending => std::thread::park(),
        }
    };
    assert_eq!(report.tensor_bytes, 1 << 20);
    assert!(handle.staged() && handle.done());
    assert_eq!(ringstow::load(dir.path()).unwrap().tensor("w").unwrap().data(), noise(1, 1 << 20));
}
