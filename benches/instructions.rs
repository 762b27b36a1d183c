//! Runs one case: `instructions CASE SIZE`. `tools/bench_check.py` runs each case in two sizes under callgrind;
//! the difference is the cost of an item.
//!
//! All cases use the engine `Null`, which skips the disk, and one filler. Callgrind counts inside the function `measured`, which it
//! finds by name; it counts cases with several threads from beginning to end.

#[path = "../tests/common/nowhere.rs"]
mod nowhere;

use nowhere::{Sparse, boxes, items, layout, mixed, runtime, state, vast};
use ringstow::internals::{
    format::{content_hash, names, receipt},
    plan::{
        load::{Unit, Want},
        share::{Place, SharedFile, plan_share},
    },
};
use ringstow::{
    Base, Checkpoint, Chunk, Config, Dtype, FileEntry, LoadOptions, Manifest, Receipt, SaveReport,
    StateDict, TensorEntry,
};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [case, size] if size.parse::<usize>().is_ok() => {
            run(case, size.parse().expect("checked above"));
        }
        // `cargo bench` runs this program as well.
        _ => println!("usage: instructions CASE SIZE; `make bench-check` counts all cases"),
    }
}

fn run(case: &str, size: usize) {
    match case {
        "layout of a tensor" => {
            let items = items(size, mixed);
            measured(|| layout(&items));
        }
        "pieces of a block" => {
            let plan = layout(&items(size * 1024, |_| 4096));
            let pieces = || plan.blocks.iter().map(|b| plan.pieces(b).len()).sum::<usize>();
            pieces(); // the first large allocation also cleans up what the layout freed
            measured(pieces);
        }
        "manifest's entry written" => {
            let manifest = manifest(size);
            measured(|| manifest.encode());
        }
        "manifest's entry read" => {
            let text = manifest(size).encode().expect("it can be written");
            measured(|| Manifest::decode(text, Path::new("manifest.json")).expect("it is valid"));
        }
        "receipt of 100 chunks packed" => {
            let receipts = receipts(size);
            measured(|| receipts.iter().map(|one| one.encode().len()).sum::<usize>());
        }
        "receipt of 100 chunks merged" => {
            let packed: Vec<_> = receipts(size).iter().map(Receipt::encode).collect();
            measured(|| receipt::merge_packed(&packed).expect("they are valid"));
        }
        "100 chunks of a manifest written" => {
            let manifest = merged(size);
            measured(|| manifest.encode());
        }
        "100 chunks of a manifest read" => {
            let text = merged(size).encode().expect("it can be written");
            measured(|| Manifest::decode(text, Path::new("manifest.json")).expect("it is valid"));
        }
        "read of a tensor planned" => {
            let plan = layout(&items(size, mixed));
            let shard = &plan.shards[0];
            let want = |e: &ringstow::internals::plan::save::ItemRange| Want {
                file: 0,
                range: e.range.clone(),
            };
            let wants: Vec<Want> = shard.items.iter().map(want).collect();
            let unit = Unit::Blocks { bytes: 1 << 20, most: 4 << 20 };
            measured(|| unit.reads(&wants, &[shard.bytes]));
        }
        "checksum of 64 KiB" => {
            let data = vec![7u8; size << 16];
            measured(|| crc32fast::hash(&data));
        }
        "hash of 64 KiB" => {
            let data = vec![7u8; size << 16];
            measured(|| content_hash::of_run(&data));
        }
        "place in a shared file planned" => {
            let (file, places) = shares(size);
            measured(|| plan_share(&[file], &places, 4 << 20).expect("they are valid"));
        }
        "block saved" => drop(save(&vast(Box::new(Sparse(size as u64 * BLOCK))))),
        "block saved at a rate" => {
            // A block is due a nanosecond after the one before: nothing sleeps.
            let config = Config { write_rate: u64::MAX, ..config() };
            drop(save_with(config, &vast(Box::new(Sparse(size as u64 * BLOCK)))));
        }
        "tensor saved" => drop(save(&state(size, |_| 512))),
        "tensor saved, and not again" => save_twice(size),
        "tensor saved and loaded" => load(&state(size, |_| 512)),
        "box of a tensor laid out" => {
            let items = boxes(size);
            measured(|| layout(&items));
        }
        "block saved and loaded" => load(&vast(Box::new(Sparse(size as u64 * BLOCK)))),
        other => panic!("no case {other:?}"),
    }
}

#[inline(never)]
fn measured<T>(work: impl FnOnce() -> T) {
    black_box(work());
}

fn manifest(tensors: usize) -> Manifest {
    let items = items(tensors, mixed);
    nowhere::manifest(&items, &layout(&items))
}

/// The receipts of as many ranks, which have a row each of 100 tensors.
fn receipts(ranks: usize) -> Vec<Receipt> {
    let tensor = |rank: u64, number: u64| TensorEntry {
        name: nowhere::name(number as usize),
        dtype: Dtype::F32,
        shape: [ranks as u64, 16].into(),
        chunks: [Chunk::region(0, 4096 + 64 * number, (&[rank, 0], &[1, 16]))].into(),
        object: false,
    };
    let receipt = |rank| Receipt {
        rank,
        session: "a".into(),
        write: "b".into(),
        block_bytes: 1 << 20,
        files: vec![FileEntry {
            name: names::shard(rank, 0, 0),
            bytes: 16 << 10,
            crc32: vec![0],
            hashes: Vec::new(),
        }],
        tensors: (0..100).map(|number| tensor(rank.into(), number)).collect(),
        apart: Vec::new(),
    };
    (0..ranks as u32).map(receipt).collect()
}

fn merged(ranks: usize) -> Manifest {
    let merged = receipt::merge(&receipts(ranks)).expect("they are valid");
    let state = serde_json::value::to_raw_value(&()).expect("null is JSON");
    Manifest::new(0, ranks as u32, merged.block_bytes, merged.files, merged.tensors, state)
}

/// A file of which another rank writes every other page, and the places in the rest.
fn shares(count: usize) -> (SharedFile, Vec<Place>) {
    const PAGE: u64 = 4096;
    let place = |n: usize| Place {
        file: 0,
        offset: 2 * n as u64 * PAGE,
        item: n,
        from: 0,
        bytes: PAGE,
        round: 0,
    };
    let file = SharedFile { name: names::MODEL.into(), bytes: 2 * count as u64 * PAGE };
    (file, (0..count).map(place).collect())
}

/// Small blocks, so that the cost per block stands out from the cost per byte.
const BLOCK: u64 = 64 << 10;

fn config() -> Config {
    Config { block_bytes: BLOCK, pool_bytes: 8 * BLOCK, fillers: 1, ..Config::default() }
}

fn save(state: &StateDict) -> tempfile::TempDir {
    save_with(config(), state)
}

fn save_with(config: Config, state: &StateDict) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("there is a place for it");
    save_to(config, state, &dir.path().join("to"));
    dir
}

fn save_to(config: Config, state: &StateDict, path: &Path) -> SaveReport {
    let runtime = runtime(config);
    ringstow::internals::store::save(&runtime, state, path, &Arc::default())
        .expect("the save works")
}

/// Saves, and then with that as the base: all is compared, and nothing is written.
fn save_twice(tensors: usize) {
    let dir = tempfile::tempdir().expect("there is a place for it");
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
    let mut state = state(tensors, |_| 512);
    save_to(config(), state.base(Base::none()), &first);
    let report = save_to(config(), state.base(Base::at(first)), &second);
    assert_eq!(report.linked_bytes, report.file_bytes);
}

/// Saves, and loads if asked; the cost of a load is the difference to a save.
fn load(state: &StateDict) {
    let dir = save(state);
    let checkpoint = Checkpoint::open(dir.path().join("to")).expect("it was saved");
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
    let options = LoadOptions { verify: false, ..LoadOptions::default() };
    black_box(checkpoint.load_names(names, options.on(&runtime(config()), &Arc::default())))
        .expect("the load works");
}
