//! The bench `gpu`, which `make gpu-bundle` ships.

use super::fake;
use super::gpu_bench::{Options, run};
use ringstow::Config;
use std::fs;
use std::path::Path;

fn options(dir: &Path) -> Options {
    let config = Config { pool_bytes: 1 << 20, block_bytes: 64 << 10, ..Config::default() };
    Options { gpu: 0, bytes: 10_000_000, rounds: 2, dir: dir.into(), copies_only: false, config }
}

#[test]
fn gpu_bench_measures_and_leaves_nothing() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let measured = run(&options(dir.path())).unwrap();
    assert!(measured.gpu.to_nowhere_of_large_copy.unwrap().median > 0.0);
    for figures in [measured.save.unwrap(), measured.load.unwrap()] {
        assert!(figures.copies_gb_per_s.min > 0.0, "the GPU copies: {figures:?}");
        assert!(figures.gpu_of_host.min > 0.0, "{figures:?}");
    }
    let copies_only = Options { copies_only: true, ..options(dir.path()) };
    assert!(run(&copies_only).unwrap().save.is_none());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn missing_gpu_is_an_error_before_a_byte_is_written() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let error = run(&Options { gpu: 7, ..options(dir.path()) }).unwrap_err().to_string();
    assert!(error.contains("GPU 7") && error.contains("nvidia-smi -L"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
