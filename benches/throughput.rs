//! Measures each part in bytes per second: saves and loads in every I/O mode, on this disk and in memory;
//! checksums; the planner; the manifest.
//!
//! Environment variables: `RINGSTOW_BENCH_DIR` (the directory, by default under `target/`), `RINGSTOW_BENCH_MB`
//! (the size, by default 256), `RINGSTOW_BENCH_LARGE` (if set, also manifests of 1,000,000 tensors).
//! `cargo bench -- --test` runs everything once, in small.
//!
//! On a shared disk, figures are comparable only within one run. The bench `against_fio` compares with what the
//! disk can do.

#[path = "../tests/common/nowhere.rs"]
mod nowhere;

mod common;

use common::{bench_dir, is_smoke_test};
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use nowhere::{items, layout};
use ringstow::internals::{
    engine::io_mode::{self, EngineKind},
    plan::load::{Unit, Want},
    sys::file,
};
use ringstow::{Config, Dtype, EngineChoice, LoadOptions, Manifest, Runtime, StateDict, Switch};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn bench_bytes() -> usize {
    let asked = std::env::var("RINGSTOW_BENCH_MB").ok().and_then(|mb| mb.parse::<usize>().ok());
    asked.unwrap_or(if is_smoke_test() { 8 } else { 256 }) << 20
}

/// Tensors of the sizes that a model has, with most bytes in large ones.
fn tensors(bytes: usize) -> Vec<(String, Vec<u8>)> {
    let sizes = [bytes / 2, bytes / 4, bytes / 8, bytes / 16];
    let small = (0..64).map(|_| bytes / 1024);
    let all = sizes.into_iter().chain(small).enumerate();
    all.map(|(i, len)| (format!("layer.{i}.weight"), vec![i as u8; len])).collect()
}

fn state(tensors: &[(String, Vec<u8>)]) -> StateDict<'_> {
    let mut state = StateDict::new();
    for (name, data) in tensors {
        state.bytes(name, Dtype::U8, &[data.len() as u64], data).expect("sizes are right");
    }
    state
}

/// Each I/O mode, by name, with the configuration that allows it alone.
fn modes() -> Vec<(String, Config)> {
    let rings = [
        (EngineChoice::Uring, EngineKind::Uring.is_built()),
        (EngineChoice::TokioUring, EngineKind::TokioUring.is_built()),
    ];
    let on = |yes| if yes { Switch::On } else { Switch::Off };
    let mut all = Vec::new();
    for (engine, _) in rings.into_iter().filter(|(_, built)| *built) {
        all.extend([(true, true), (false, true), (false, false)].map(|(fixed, direct)| Config {
            engine,
            fixed: on(fixed),
            direct: on(direct),
            ..Config::default()
        }));
    }
    all.extend([true, false].map(|direct| Config {
        engine: EngineChoice::Portable,
        direct: on(direct),
        ..Config::default()
    }));
    let name = |config: &Config| io_mode::modes(config).expect("no contradictions")[0].to_string();
    all.into_iter().map(|config| (name(&config), config)).collect()
}

/// A group of benches on so much data that a few samples suffice.
fn group<'a>(
    criterion: &'a mut Criterion,
    name: &str,
    throughput: Throughput,
) -> BenchmarkGroup<'a, criterion::measurement::WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.throughput(throughput).sample_size(10).warm_up_time(Duration::from_secs(1));
    group
}

/// Times durable saves into new directories, without removing these.
fn time_saves(iterations: u64, state: &StateDict, dir: &Path, config: &Config) -> Duration {
    (0..iterations)
        .map(|_| {
            let _ = std::fs::remove_dir_all(dir);
            let started = Instant::now();
            ringstow::Store::new(config.clone()).unwrap().save(state, dir).expect("the save works");
            started.elapsed()
        })
        .sum()
}

/// Times loads with a cold page cache.
fn time_loads(iterations: u64, dir: &Path, runtime: &Runtime) -> Duration {
    let checkpoint = ringstow::Checkpoint::open(dir).expect("it was just saved");
    let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
    (0..iterations)
        .map(|_| {
            for shard in &checkpoint.manifest().files {
                let shard = std::fs::File::open(dir.join(&shard.name)).expect("it is there");
                file::drop_page_cache(&shard).expect("the cache can be dropped");
            }
            let started = Instant::now();
            let (options, job) = (LoadOptions::default(), Arc::default());
            let loaded = checkpoint.load_names(&names, options.on(runtime, &job));
            black_box(loaded.expect("the load works"));
            started.elapsed()
        })
        .sum()
}

/// Saves and loads in each I/O mode that `dir` supports.
fn save_and_load(criterion: &mut Criterion, place: &str, dir: &Path, all: Vec<(String, Config)>) {
    let tensors = tensors(bench_bytes());
    let state = state(&tensors);
    let bytes = Throughput::BytesDecimal(tensors.iter().map(|(_, data)| data.len() as u64).sum());
    for (name, config) in all {
        let dir = dir.join("ringstow-bench");
        if let Err(why) = ringstow::Store::new(config.clone()).unwrap().save(&state, &dir) {
            println!("{place}: left out {name}: {why}");
            continue;
        }
        group(criterion, &format!("save/{place}"), bytes.clone()).bench_function(
            &name,
            |bencher| {
                bencher.iter_custom(|iterations| time_saves(iterations, &state, &dir, &config));
            },
        );
        ringstow::Store::new(config.clone()).unwrap().save(&state, &dir).expect("it worked before");
        let runtime = Runtime::new(config).expect("it was valid before");
        group(criterion, &format!("load/{place}"), bytes.clone()).bench_function(
            &name,
            |bencher| {
                bencher.iter_custom(|iterations| time_loads(iterations, &dir, &runtime));
            },
        );
        let _ = std::fs::remove_dir_all(&dir);
    }
    Runtime::release_shared();
}

fn disk(criterion: &mut Criterion) {
    let dir = bench_dir();
    std::fs::create_dir_all(&dir).expect("the bench directory can be made");
    save_and_load(criterion, "disk", &dir, modes());
}

/// Measures the software alone, with a file system in memory in place of a disk.
fn memory(criterion: &mut Criterion) {
    let dir = Path::new("/dev/shm");
    if dir.is_dir() {
        save_and_load(criterion, "memory", dir, vec![("auto".into(), Config::default())]);
    }
}

fn checksum(criterion: &mut Criterion) {
    for kib in [256, 4096] {
        let data = vec![7u8; kib << 10];
        let bytes = Throughput::BytesDecimal(data.len() as u64);
        group(criterion, "checksum", bytes).bench_function(format!("crc32 of {kib} KiB"), |b| {
            b.iter(|| crc32fast::hash(black_box(&data)));
        });
    }
}

fn planner(criterion: &mut Criterion) {
    let count = if is_smoke_test() { 1000 } else { 100_000 };
    let items = items(count, |_| 4096);
    let plan = layout(&items);
    let mut group = group(criterion, "planner", Throughput::BytesDecimal(plan.tensor_bytes));
    group.bench_function(format!("layout of {count} tensors"), |b| b.iter(|| layout(&items)));
    group.bench_function(format!("pieces of all blocks of {count} tensors"), |b| {
        b.iter(|| plan.blocks.iter().map(|block| plan.pieces(block).len()).sum::<usize>());
    });
    let place = |extent: &ringstow::internals::plan::save::ItemRange| Want {
        file: 0,
        range: extent.range.clone(),
    };
    let unit = Unit::Blocks { bytes: 1 << 20, most: 4 << 20 };
    let wants: Vec<Want> = plan.shards[0].items.iter().map(place).collect();
    let file_bytes: Vec<u64> = plan.shards.iter().map(|shard| shard.bytes).collect();
    group.bench_function(format!("reads of {count} tensors"), |b| {
        b.iter(|| unit.reads(&wants, &file_bytes));
    });
}

fn manifest(criterion: &mut Criterion) {
    let large = std::env::var_os("RINGSTOW_BENCH_LARGE").map(|_| 1_000_000);
    for count in large.into_iter().chain([if is_smoke_test() { 1000 } else { 100_000 }]) {
        let items = items(count, |_| 4096);
        let manifest = nowhere::manifest(&items, &layout(&items));
        let text = manifest.encode().expect("it can be written");
        let mut group = group(criterion, "manifest", Throughput::BytesDecimal(text.len() as u64));
        group.bench_function(format!("write {count} tensors"), |b| b.iter(|| manifest.encode()));
        group.bench_function(format!("read {count} tensors"), |b| {
            b.iter(|| {
                Manifest::decode(text.clone(), Path::new("manifest.json")).expect("it is valid")
            });
        });
    }
}

criterion_group!(benches, checksum, planner, manifest, memory, disk);
criterion_main!(benches);
