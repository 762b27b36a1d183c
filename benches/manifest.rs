//! The manifest of a very large distributed save, from the receipts of simulated ranks, and the plan of one rank's reads:
//! 4,096 ranks, each with a part of 244 tensors, make a million chunks.
//!
//! `cargo bench --bench manifest -- --test` runs everything once, in small. With `RINGSTOW_BENCH_LARGE=1` there are also
//! 16,384 ranks and ten million chunks, which take 4 GB of memory. Each size prints what a chunk takes on disk, in memory
//! and in receipts.
//!
//! With `RINGSTOW_BENCH_JSON=FILE` it measures nothing of that. It deals a million chunks out to 1 to 16,384 ranks, and
//! writes seconds and bytes per chunk to that file: `tools/bench_ranks.py` does so for docs/figures.md.

mod common;

use common::is_smoke_test;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringstow::internals::{
    format::receipt,
    plan::{
        load::{Scattered, Unit},
        slab::{Dense, Place, Slab, dense_strides},
    },
};
use ringstow::{Chunk, Dtype, FileEntry, Manifest, Receipt, TensorEntry};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK: u64 = 1 << 20;
/// Elements per row, and rows of each tensor per rank.
const WIDTH: u64 = 8192;
const ROWS: u64 = 4;

/// Ranks and tensors.
fn sizes() -> &'static [(u64, u64)] {
    match (is_smoke_test(), std::env::var_os("RINGSTOW_BENCH_LARGE").is_some()) {
        (true, _) => &[(16, 244)],
        (false, false) => &[(4096, 244)],
        (false, true) => &[(4096, 244), (16_384, 61), (4096, 2441), (16_384, 610)],
    }
}

/// Tensors cut along their first dimension, with one chunk and one file per rank.
fn manifest(ranks: u64, tensors: u64) -> Manifest {
    let chunk_bytes = ROWS * WIDTH * 2;
    let bytes = (1 << 16) + tensors * chunk_bytes;
    let file = |rank| FileEntry {
        name: format!("rank{rank:05}-0.safetensors"),
        bytes,
        crc32: vec![0x1234_5678; bytes.div_ceil(BLOCK) as usize],
        hashes: Vec::new(),
    };
    let tensor = |t: u64| TensorEntry {
        name: format!("model.layers.{t}.mlp.down_proj.weight"),
        dtype: Dtype::BF16,
        shape: [ranks * ROWS, WIDTH].into(),
        chunks: (0..ranks)
            .map(|rank| {
                let begin = (1 << 16) + t * chunk_bytes;
                Chunk::region(rank as u32, begin, (&[rank * ROWS, 0], &[ROWS, WIDTH]))
            })
            .collect(),
        object: false,
    };
    let state = serde_json::value::to_raw_value(&()).expect("null is JSON");
    let files = (0..ranks).map(file).collect();
    Manifest::new(0, ranks as u32, BLOCK, files, (0..tensors).map(tensor).collect(), state)
}

/// The reads of one rank, when as many ranks load as saved.
fn slabs(manifest: &Manifest, rank: usize) -> Vec<Slab> {
    let slab = |tensor: &TensorEntry| {
        let chunk = &tensor.chunks[rank];
        let sizes = chunk.sizes().expect("it is a part");
        let array =
            Dense { file: chunk.file as usize, begin: chunk.begin, dtype: tensor.dtype, sizes };
        let to = Place { at: 0, strides: &dense_strides(tensor.dtype, sizes) };
        Slab::new(array, &[0, 0], sizes, to).expect("the box is right").expect("it is not empty")
    };
    manifest.tensors.iter().map(slab).collect()
}

/// The receipt that each rank sends to the coordinator of that save.
fn receipts(manifest: &Manifest) -> Vec<Vec<u8>> {
    let of = |(rank, file): (usize, &FileEntry)| {
        let part = |tensor: &TensorEntry| {
            let mut chunk = tensor.chunks[rank].clone();
            chunk.file = 0;
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            let (dtype, object) = (tensor.dtype, tensor.object);
            TensorEntry { name, dtype, shape, chunks: [chunk].into(), object }
        };
        let tensors = manifest.tensors.iter().map(part).collect();
        let files = vec![file.clone()];
        let receipt = Receipt {
            rank: rank as u32,
            session: "a".into(),
            write: "b".into(),
            block_bytes: manifest.block_bytes,
            files,
            tensors,
            apart: Vec::new(),
        };
        receipt.encode()
    };
    manifest.files.iter().enumerate().map(of).collect()
}

/// What a commit does with the receipts, but for the files.
fn committed(receipts: &[Vec<u8>]) -> Manifest {
    let merged = receipt::merge_packed(receipts).expect("they are valid");
    let state = serde_json::value::to_raw_value(&()).expect("null is JSON");
    let ranks = receipts.len() as u32;
    let manifest = Manifest::new(0, ranks, merged.block_bytes, merged.files, merged.tensors, state);
    manifest.check().expect("it is valid");
    manifest.write(std::io::sink()).expect("a sink takes all");
    manifest
}

fn decoded(text: &[u8]) -> Manifest {
    Manifest::decode(text.to_vec(), Path::new("manifest.json")).expect("it is valid")
}

/// What a chunk takes, in bytes.
#[derive(serde::Serialize)]
struct ChunkBytes {
    disk: f64,
    receipts: f64,
    /// In memory, once the manifest is open; at most while opening and while merging.
    open: f64,
    opening: f64,
    merging: f64,
}

fn bytes_per_chunk(chunks: u64, text: &[u8], sent: &[Vec<u8>]) -> ChunkBytes {
    let per_chunk = |bytes: u64| bytes as f64 / chunks as f64;
    let opening = allocation_counter::measure(|| drop(black_box(decoded(text))));
    let open = allocation_counter::measure(|| std::mem::forget(decoded(text)));
    let merging = allocation_counter::measure(|| drop(black_box(committed(sent))));
    ChunkBytes {
        disk: per_chunk(text.len() as u64),
        receipts: per_chunk(sent.iter().map(|text| text.len() as u64).sum()),
        open: per_chunk(open.bytes_current as u64),
        opening: per_chunk(opening.bytes_max),
        merging: per_chunk(merging.bytes_max),
    }
}

fn print_bytes(chunks: u64, text: &[u8], sent: &[Vec<u8>]) {
    let each = bytes_per_chunk(chunks, text, sent);
    println!(
        "{chunks} chunks, bytes each: {:.1} on disk, {:.1} in receipts; {:.1} in memory once open, {:.1} at most while \
         opening, {:.1} at most while merging",
        each.disk, each.receipts, each.open, each.opening, each.merging,
    );
}

fn ranks(criterion: &mut Criterion, ranks: u64, tensors: u64) {
    let (manifest, chunks) = (manifest(ranks, tensors), tensors * ranks);
    let text = manifest.encode().expect("it can be written");
    let mut group = criterion.benchmark_group(format!("{ranks} ranks, {chunks} chunks"));
    group.sample_size(10).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(chunks));
    group.bench_function("encode", |b| b.iter(|| manifest.encode()));
    group.bench_function("decode", |b| b.iter(|| decoded(&text)));
    let sent = receipts(&manifest);
    print_bytes(chunks, &text, &sent);
    group.bench_function("receipts merged", |b| b.iter(|| receipt::merge_packed(&sent)));
    group.bench_function("receipts merged, checked and written", |b| b.iter(|| committed(&sent)));
    group.throughput(Throughput::Elements(tensors));
    let file_bytes: Vec<u64> = manifest.files.iter().map(|file| file.bytes).collect();
    let rank = ranks as usize / 2;
    for (name, unit) in
        [("blocks", Unit::Blocks { bytes: BLOCK, most: BLOCK }), ("pages", Unit::Pages(BLOCK))]
    {
        group.bench_function(format!("plan one rank's reads in {name}"), |b| {
            b.iter(|| Scattered::plan(&slabs(&manifest, rank), &file_bytes, unit));
        });
    }
}

/// The chunks that are dealt out to each of `RANKS`, and how often each is timed.
const CHUNKS: u64 = 1_000_000;
const RANKS: [u64; 8] = [1, 4, 16, 64, 256, 1024, 4096, 16_384];
const ROUNDS: usize = 3;

/// Times an action `ROUNDS` times, after one time that does not count, in seconds.
fn seconds<T>(action: impl Fn() -> T) -> Vec<f64> {
    let time = || {
        let start = Instant::now();
        let made = action();
        let took = start.elapsed().as_secs_f64();
        drop(made); // does not count: a job that ends here drops nothing
        took
    };
    time();
    (0..ROUNDS).map(|_| time()).collect()
}

/// What a commit and an open cost, with this number of chunks on so many ranks.
fn costs(ranks: u64, chunks: u64) -> serde_json::Value {
    let tensors = (chunks / ranks).max(1);
    let manifest = manifest(ranks, tensors);
    let text = manifest.encode().expect("it can be written");
    let sent = receipts(&manifest);
    drop(manifest);
    serde_json::json!({
        "ranks": ranks,
        "tensors": tensors,
        "chunks": ranks * tensors,
        "bytes_per_chunk": bytes_per_chunk(ranks * tensors, &text, &sent),
        "seconds": {
            "merged": seconds(|| receipt::merge_packed(&sent)),
            "committed": seconds(|| committed(&sent)),
            "opened": seconds(|| decoded(&text)),
        },
    })
}

fn write_json(file: &Path) {
    let chunks = if is_smoke_test() { 1000 } else { CHUNKS };
    let ranks = RANKS.iter().filter(|&&ranks| ranks <= chunks);
    let rows: Vec<_> = ranks.map(|&ranks| costs(ranks, chunks)).collect();
    let text = serde_json::json!({ "rounds": ROUNDS, "ranks": rows }).to_string();
    std::fs::write(file, text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

fn all(criterion: &mut Criterion) {
    if let Some(file) = std::env::var_os("RINGSTOW_BENCH_JSON") {
        return write_json(Path::new(&file));
    }
    sizes().iter().for_each(|&(count, tensors)| ranks(criterion, count, tensors));
}

criterion_group!(benches, all);
criterion_main!(benches);
