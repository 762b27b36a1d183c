//! The manifest of a very large distributed save, and the plan of one rank's reads: 4,096 ranks, each with a
//! part of 244 tensors, make a million chunks.
//!
//! `cargo bench --bench manifest -- --test` runs everything once, in small.

mod common;

use common::is_smoke_test;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringstow::Dtype;
use ringstow::internals::format::{Chunk, FileEntry, Manifest, Receipt, TensorEntry, receipt};
use ringstow::internals::plan::load::{Scattered, Unit};
use ringstow::internals::plan::slab::{Dense, Place, Slab, dense_strides};
use std::path::Path;
use std::time::Duration;

const BLOCK: u64 = 1 << 20;
const TENSORS: u64 = 244;
/// Elements per row, and rows of each tensor per rank.
const WIDTH: u64 = 8192;
const ROWS: u64 = 4;

fn ranks() -> u64 {
    if is_smoke_test() { 16 } else { 4096 }
}

/// Tensors cut along their first dimension, with one chunk and one file per rank.
fn manifest(ranks: u64) -> Manifest {
    let chunk_bytes = ROWS * WIDTH * 2;
    let bytes = (1 << 16) + TENSORS * chunk_bytes;
    let file = |rank| FileEntry {
        name: format!("rank{rank:05}-0.safetensors"),
        bytes,
        crc32: vec![0x1234_5678; bytes.div_ceil(BLOCK) as usize],
    };
    let tensor = |t: u64| TensorEntry {
        name: format!("model.layers.{t}.mlp.down_proj.weight"),
        dtype: Dtype::BF16,
        shape: [ranks * ROWS, WIDTH].into(),
        chunks: (0..ranks)
            .map(|rank| Chunk {
                file: rank as u32,
                begin: (1 << 16) + t * chunk_bytes,
                offsets: Some([rank * ROWS, 0].into()),
                sizes: Some([ROWS, WIDTH].into()),
            })
            .collect(),
        object: false,
    };
    let state = serde_json::value::to_raw_value(&()).expect("null is JSON");
    let files = (0..ranks).map(file).collect();
    Manifest::new(0, 4096, BLOCK, files, (0..TENSORS).map(tensor).collect(), state)
}

/// The reads of one rank, when as many ranks load as saved.
fn slabs(manifest: &Manifest, rank: usize) -> Vec<Slab> {
    let slab = |tensor: &TensorEntry| {
        let chunk = &tensor.chunks[rank];
        let sizes = chunk.sizes.as_deref().expect("it is a part");
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
            let TensorEntry { name, dtype, shape, chunks, object } = tensor;
            let chunks = [Chunk { file: 0, ..chunks[rank].clone() }].into();
            let (name, shape) = (name.clone(), shape.clone());
            TensorEntry { name, dtype: *dtype, shape, chunks, object: *object }
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
        receipt.encode().expect("it can be written")
    };
    manifest.files.iter().enumerate().map(of).collect()
}

fn million(criterion: &mut Criterion) {
    let ranks = ranks();
    let manifest = manifest(ranks);
    let text = manifest.encode().expect("it can be written");
    let mut group = criterion.benchmark_group(format!("{} chunks", TENSORS * ranks));
    group.sample_size(10).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::BytesDecimal(text.len() as u64));
    group.bench_function("encode", |b| b.iter(|| manifest.encode()));
    group.bench_function("decode", |b| {
        b.iter(|| Manifest::decode(text.clone(), Path::new("manifest.json")).expect("it is valid"));
    });
    let sent = receipts(&manifest);
    group.throughput(Throughput::BytesDecimal(sent.iter().map(|text| text.len() as u64).sum()));
    group.bench_function("all ranks' receipts into one", |b| {
        b.iter(|| {
            let decoded = sent.iter().map(|text| Receipt::decode(text));
            receipt::merge(decoded.collect::<Result<_, _>>().expect("they are valid"))
        });
    });
    group.throughput(Throughput::Elements(TENSORS));
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

criterion_group!(benches, million);
criterion_main!(benches);
