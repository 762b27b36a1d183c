//! What is saved is what is loaded, through every engine and every way of opening files.

use crate::common::{assert_undamaged, held, noise, on};
use ringstow::{Checkpoint, Config, Dtype, EngineChoice, Runtime, StateDict, Switch, Value};
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
        let loaded = checkpoint.load_names(names, on(&runtime)).unwrap();
        for (name, data) in &tensors {
            assert_eq!(loaded.tensor(name).unwrap().data(), data, "{name} with {config:?}");
        }
        assert_undamaged(&runtime, &path);
    }
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
    let loaded = checkpoint.load_names(["layer.5"], on(&runtime)).unwrap();
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
    let state = held::only(noise(1, 1 << 20));
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
    assert_eq!(ringstow::load(dir.path()).unwrap().tensor("t").unwrap().data(), noise(1, 1 << 20));
}
