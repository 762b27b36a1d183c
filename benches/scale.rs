//! Measures how cost grows: the cost of a tensor in each step of a save or load with the number of tensors, and
//! the cost of a block with the number of blocks. The engine `fake_engines::AtOnce::null` completes every transfer at
//! once, so no disk is involved.
//!
//! Figures are items per second: if ten times as many items take as long each, the cost is linear. With
//! `RINGSTOW_BENCH_LARGE` also measures 1,000,000 tensors, and 64 GB in one. `cargo bench --bench scale -- --test`
//! runs everything once, in small.

#[path = "../tests/common/nowhere.rs"]
mod nowhere;

mod common;

use common::is_smoke_test;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use nowhere::{Endless, Sparse, boxes, items, layout, mixed, runtime, state, vast};
use ringstow::internals::{
    format::names,
    plan::{
        load::{Unit, Want},
        save::{SavePlan, Shard},
    },
};
use ringstow::{
    Checkpoint, Chunk, Config, Dtype, FileEntry, Item, LoadOptions, Manifest, Receipt, Runtime,
    StateDict, Store, Target, TensorEntry,
};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn large() -> bool {
    std::env::var_os("RINGSTOW_BENCH_LARGE").is_some()
}

/// Numbers of tensors, each ten times the previous one.
fn counts() -> Vec<usize> {
    match (is_smoke_test(), large()) {
        (true, _) => vec![100],
        (false, false) => vec![1_000, 10_000, 100_000],
        (false, true) => vec![1_000, 10_000, 100_000, 1_000_000],
    }
}

/// Benches `work` on each of `sizes`, per item. Does not time `prepare`.
fn each<T>(
    criterion: &mut Criterion,
    name: &str,
    sizes: &[usize],
    prepare: impl Fn(usize) -> T,
    work: impl Fn(&T),
) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(2));
    for &size in sizes {
        let input = prepare(size);
        group.throughput(Throughput::Elements(size as u64));
        group.bench_function(BenchmarkId::from_parameter(size), |b| b.iter(|| work(&input)));
    }
}

fn laid_out(count: usize) -> (Vec<Item>, SavePlan) {
    let items = items(count, mixed);
    let plan = layout(&items);
    (items, plan)
}

/// The headers of all shards.
fn headers((items, plan): &(Vec<Item>, SavePlan)) -> usize {
    plan.shards.iter().map(|shard| shard.header_bytes(items).len()).sum()
}

/// Plans and encodes a save, without any I/O.
fn planning(criterion: &mut Criterion) {
    let counts = counts();
    each(criterion, "state", &counts, |n| n, |&n| drop(black_box(state(n, mixed))));
    each(criterion, "layout", &counts, |n| items(n, mixed), |i| drop(black_box(layout(i))));
    let boxed = &counts[..counts.len().min(2)];
    each(criterion, "layout of boxes of one tensor", boxed, boxes, |i| drop(black_box(layout(i))));
    each(criterion, "headers", &counts, laid_out, |made| {
        black_box(headers(made));
    });
    each(criterion, "entries", &counts, laid_out, |(i, p)| {
        p.entries(i).iter().for_each(|entry| drop(black_box(entry)));
    });
    let made = |n| {
        let (items, plan) = laid_out(n);
        nowhere::manifest(&items, &plan)
    };
    each(criterion, "manifest/encode", &counts, made, |m| drop(black_box(m.encode())));
    let text = |n| made(n).encode().expect("it can be written");
    each(criterion, "manifest/decode", &counts, text, |t| {
        black_box(Manifest::decode(t.clone(), Path::new("manifest.json")).expect("it is valid"));
    });
}

/// Plans the reads of all tensors, of every tenth, and of one; per tensor of the checkpoint.
fn reads(criterion: &mut Criterion) {
    for (part, every) in [("all", 1), ("a tenth", 10), ("one", usize::MAX)] {
        let wants = |n| {
            let (_, plan) = laid_out(n);
            let of = |(file, shard): (usize, &Shard)| {
                let want =
                    |e: &ringstow::internals::plan::save::ItemRange| (e.item, e.range.clone());
                let all: Vec<_> = shard.items.iter().map(want).collect();
                all.into_iter().map(move |(item, range)| (item, Want { file, range }))
            };
            let all = plan.shards.iter().enumerate().flat_map(of);
            let wanted = all.filter(|(item, _)| item % every == 0).map(|(_, want)| want).collect();
            let file_bytes: Vec<u64> = plan.shards.iter().map(|shard| shard.bytes).collect();
            (wanted, file_bytes)
        };
        let unit = Unit::Blocks { bytes: 1 << 20, most: 4 << 20 };
        each(
            criterion,
            &format!("reads of {part}"),
            &counts(),
            wants,
            |(wants, file_bytes): &(Vec<Want>, Vec<u64>)| {
                black_box(unit.reads(wants, file_bytes));
            },
        );
    }
}

/// The directory of checkpoints saved through `AtOnce::null`. Their files have their full length but no data: if possible,
/// the directory is on a file system where such files take no space.
struct Place(Option<Endless>);

impl Place {
    fn new() -> Self {
        let endless = Endless::new();
        if let Err(why) = &endless {
            println!("left out 64 GB, which need root: {why}");
        }
        Self(endless.ok())
    }

    fn path(&self) -> PathBuf {
        let here = Path::new(env!("CARGO_TARGET_TMPDIR"));
        self.0.as_ref().map_or(here, Endless::path).join("ringstow-scale")
    }
}

fn save(runtime: &Runtime, state: &StateDict, dir: &Path) {
    ringstow::internals::store::save(runtime, state, dir, &Arc::default()).expect("the save works");
}

/// Loads every `every`th tensor of a checkpoint.
fn load(runtime: &Runtime, dir: &Path, every: usize) {
    let checkpoint = Checkpoint::open(dir).expect("it was saved");
    let names = checkpoint.tensors().iter().step_by(every).map(|tensor| tensor.name.as_str());
    // Nowhere returns zeros, which do not match the checksums.
    let options = LoadOptions { verify: false, ..LoadOptions::default() };
    black_box(
        checkpoint.load_names(names, options.on(runtime, &Arc::default())).expect("it works"),
    );
}

/// Loads all tensors, of 4 KiB each, into existing memory.
fn load_into(runtime: &Runtime, checkpoint: &Checkpoint, memory: &mut [u8]) {
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
    let targets: Vec<_> = names.zip(memory.chunks_mut(4096).map(Target::new)).collect();
    let options = LoadOptions { verify: false, ..LoadOptions::default() };
    checkpoint.load_into(&targets, options.on(runtime, &Arc::default())).expect("it works");
}

/// A whole save and load, except for the disk.
fn pipeline(criterion: &mut Criterion) {
    let (place, runtime, counts) = (Place::new(), runtime(Config::default()), counts());
    let dir = place.path();
    let mixed_state = |n| state(n, mixed);
    each(criterion, "save/mixed sizes", &counts, mixed_state, |s| save(&runtime, s, &dir));
    let alike = |n| state(n, |_| 4096);
    each(criterion, "save/4 KiB", &counts, alike, |s| save(&runtime, s, &dir));
    let saved = |n| save(&runtime, &state(n, mixed), &dir);
    each(criterion, "open", &counts, saved, |()| {
        black_box(Checkpoint::open(&dir).expect("it was saved"));
    });
    for (part, every) in [("all", 1), ("a tenth", 10), ("one", usize::MAX)] {
        each(criterion, &format!("load/{part}"), &counts, saved, |()| load(&runtime, &dir, every));
    }
    let saved = |n| {
        save(&runtime, &state(n, |_| 4096), &dir);
        (Checkpoint::open(&dir).expect("it was saved"), Mutex::new(vec![1; n * 4096]))
    };
    each(criterion, "load into/4 KiB", &counts, saved, |(checkpoint, memory)| {
        load_into(&runtime, checkpoint, &mut memory.lock().expect("nobody else has it"));
    });
    let blocks: &[usize] = match (is_smoke_test(), large() && place.0.is_some()) {
        (true, _) => &[10],
        (false, false) => &[200, 2_000],
        (false, true) => &[1_500, 15_000],
    };
    let vast = |n| vast(Box::new(Sparse(n as u64 * (4 << 20) - 4096)));
    each(criterion, "save/blocks of one tensor", blocks, vast, |s| save(&runtime, s, &dir));
    let _ = std::fs::remove_dir_all(&dir);
}

/// The result of as many ranks that write a tensor each: receipts, files of the right length, and marks.
fn write_ranks(ranks: usize, dir: &Path) -> Vec<Receipt> {
    let note = std::fs::read(dir.join(names::UNCOMMITTED_MANIFEST)).expect("the session has begun");
    let note: serde_json::Value = serde_json::from_slice(&note).expect("it is JSON");
    let receipt = |rank: usize| {
        let (session, write) = (note["session"].as_str().expect("it says"), "0000000000000000");
        let (session, write) = (session.to_owned(), write.to_owned());
        let name = names::shard(rank as u32, 0, 0);
        let part = dir.join(names::uncommitted_write(&name, &write));
        let file = std::fs::File::create(part).expect("it can be made");
        file.set_len(8192).expect("it can be as long");
        let chunk = Chunk::whole(0, 4096);
        let tensor = TensorEntry {
            name: nowhere::name(rank),
            dtype: Dtype::F32,
            shape: [64, 16].into(),
            chunks: [chunk].into(),
            object: false,
        };
        let files = vec![FileEntry { name, bytes: 8192, crc32: vec![0], hashes: Vec::new() }];
        let (rank, block_bytes, tensors) = (rank as u32, 1 << 20, vec![tensor]);
        let receipt =
            Receipt { rank, session, write, block_bytes, files, tensors, apart: Vec::new() };
        let done = dir.join(names::done(receipt.rank));
        std::fs::write(done, receipt.mark()).expect("it can be made");
        receipt
    };
    (0..ranks).map(receipt).collect()
}

fn commit(ranks: usize, dir: &Path) -> Duration {
    let _ = std::fs::remove_dir_all(dir);
    let session =
        Store::found().unwrap().begin(dir, ranks as u32).expect("nobody else saves there");
    let receipts = write_ranks(ranks, dir);
    let tree = serde_json::value::to_raw_value(&()).expect("null is JSON");
    let started = Instant::now();
    session.commit(receipts, tree).expect("all parts are there");
    started.elapsed()
}

/// Commits a session, from the ranks' receipts to the last rename.
fn ranks(criterion: &mut Criterion) {
    let place = Place::new();
    let mut group = criterion.benchmark_group("commit of ranks");
    group.sample_size(10).warm_up_time(Duration::from_millis(200));
    for ranks in if is_smoke_test() { vec![16] } else { vec![256, 1024, 4096] } {
        group.throughput(Throughput::Elements(ranks as u64));
        group.bench_function(BenchmarkId::from_parameter(ranks), |b| {
            b.iter_custom(|times| (0..times).map(|_| commit(ranks, &place.path())).sum());
        });
    }
    let _ = std::fs::remove_dir_all(place.path());
}

criterion_group!(benches, planning, reads, pipeline, ranks);
criterion_main!(benches);
