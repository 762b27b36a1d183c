//! Reading what several processes wrote: boxes of chunks into strided memory, whole tensors put
//! together from their chunks; and what is refused before a byte moves.
#![cfg(unix)]

use crate::common::*;
use proptest::prelude::*;
use ringstow::internals::format::names;
use ringstow::{
    Checkpoint, Chunk, Config, Dtype, Error, LoadOptions, LoadReport, RankShare, Receipt, Region,
    Runtime, Session, Slice, StateDict, Store, StridedTarget, Target, TensorInfo,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BLOCK: u64 = 4096;

/// A tensor whose element number n is n, cut into parts: (rank, offsets, sizes).
struct Parts {
    name: &'static str,
    shape: Vec<u64>,
    parts: Vec<(usize, Vec<u64>, Vec<u64>)>,
}

impl Parts {
    fn new(name: &'static str, shape: &[u64], parts: &[(usize, &[u64], &[u64])]) -> Self {
        let parts = parts.iter().map(|&(rank, o, s)| (rank, o.to_vec(), s.to_vec())).collect();
        Self { name, shape: shape.to_vec(), parts }
    }

    /// The elements of a box, in row-major order.
    fn values(&self, offsets: &[u64], sizes: &[u64]) -> Vec<u32> {
        (0..sizes.iter().product::<u64>())
            .map(|mut n| {
                let (mut at, mut stride) = (0, 1);
                for d in (0..sizes.len()).rev() {
                    at += (offsets[d] + n % sizes[d]) * stride;
                    n /= sizes[d];
                    stride *= self.shape[d];
                }
                at as u32
            })
            .collect()
    }

    fn all(&self) -> Vec<u32> {
        self.values(&vec![0; self.shape.len()], &self.shape)
    }
}

fn bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Saves a checkpoint of one shard a rank.
fn write(dir: &Path, tensors: &[Parts]) {
    let ranks = 1 + tensors.iter().flat_map(|t| &t.parts).map(|p| p.0).max().unwrap();
    let session = Store::found().unwrap().begin(dir, ranks as u32).unwrap();
    let receipts = (0..ranks).map(|rank| write_part(dir, rank, tensors)).collect();
    session.commit(receipts, serde_json::value::to_raw_value(&()).unwrap()).unwrap();
}

fn write_part(dir: &Path, rank: usize, tensors: &[Parts]) -> Receipt {
    let mut state = StateDict::new();
    for tensor in tensors {
        for (_, offsets, sizes) in tensor.parts.iter().filter(|part| part.0 == rank) {
            let (name, shape) = (tensor.name.into(), tensor.shape.clone());
            let info = TensorInfo { name, dtype: Dtype::U32, shape: sizes.clone() };
            let region = Region { shape, offsets: offsets.clone() };
            state.region(info, region, Box::new(bytes(&tensor.values(offsets, sizes))));
        }
    }
    let config = Config { block_bytes: BLOCK, ..small_config() };
    ringstow::Store::new(config.clone()).unwrap().write_rank(&state, rank as u32, dir).unwrap().0
}

/// A matrix cut by rows over four ranks, one cut in a grid, and a small one that is whole.
fn tensors() -> Vec<Parts> {
    let rows: Vec<(usize, Vec<u64>, Vec<u64>)> =
        (0..4).map(|r| (r, vec![r as u64 * 64, 0], vec![64, 128])).collect();
    vec![
        Parts { name: "rows", shape: vec![256, 128], parts: rows },
        Parts::new(
            "grid",
            &[48, 80],
            &[
                (0, &[0, 0], &[16, 30]),
                (1, &[0, 30], &[16, 50]),
                (2, &[16, 0], &[32, 30]),
                (3, &[16, 30], &[32, 50]),
            ],
        ),
        Parts::new("whole", &[7], &[(2, &[0], &[7])]),
        Parts::new("empty", &[0, 4], &[(1, &[0, 0], &[0, 4])]),
    ]
}

fn written() -> (tempfile::TempDir, PathBuf, Vec<Parts>) {
    let root = scratch();
    let dir = root.path().join("step-1");
    let tensors = tensors();
    write(&dir, &tensors);
    (root, dir, tensors)
}

/// Saves what each of four ranks has as a checkpoint of its own; returns that of rank 2.
fn written_alone(root: &Path, tensors: &[Parts]) -> ringstow::Result<PathBuf> {
    for rank in 0..4 {
        let part_of = RankShare { rank, ranks: 4, save: "a-1".into() };
        write_alone(&root.join(names::rank_dir(rank)), tensors, rank, Some(part_of))?;
    }
    Ok(root.join(names::rank_dir(2)))
}

fn write_alone(
    dir: &Path,
    tensors: &[Parts],
    rank: u32,
    part_of: Option<RankShare>,
) -> ringstow::Result<()> {
    let session = part_of.into_iter().fold(Store::found()?.begin(dir, 1)?, Session::rank_share);
    let receipt = write_part(dir, rank as usize, tensors);
    session.commit(vec![receipt], serde_json::value::to_raw_value(&()).unwrap()).map(drop)
}

fn runtime() -> Arc<Runtime> {
    Runtime::shared(&small_config()).unwrap()
}

fn read(dir: &Path, slices: &[Slice], verify: bool) -> ringstow::Result<LoadReport> {
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.read(
        slices,
        LoadOptions { verify, ..LoadOptions::default() }.on(&runtime(), &Arc::default()),
    )
}

#[test]
fn tensors_of_several_chunks_are_put_together() {
    let (_root, dir, tensors) = written();
    for verify in [true, false] {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let names: Vec<&str> = tensors.iter().rev().map(|t| t.name).collect();
        let options = LoadOptions { verify, ..LoadOptions::default() };
        let loaded =
            checkpoint.load_names(&names, options.on(&runtime(), &Arc::default())).unwrap();
        for tensor in &tensors {
            let view = loaded.tensor(tensor.name).unwrap();
            assert_eq!(view.shape(), tensor.shape);
            assert_eq!(view.as_slice::<u32>().unwrap(), tensor.all(), "{}", tensor.name);
        }
        assert!(loaded.tensors().map(|t| t.0).eq(names));
        assert_eq!(loaded.report.tensor_bytes, (256 * 128 + 48 * 80 + 7) * 4);
        assert_eq!(loaded.report.verified, verify);

        let mut memory: Vec<Vec<u8>> = tensors.iter().map(|t| vec![0; t.all().len() * 4]).collect();
        let targets: Vec<(&str, Target)> = tensors
            .iter()
            .zip(&mut memory)
            .map(|(t, memory)| (t.name, Target::new(memory)))
            .collect();
        checkpoint.load_into(&targets, options.on(&runtime(), &Arc::default())).unwrap();
        drop(targets);
        for (tensor, memory) in tensors.iter().zip(memory) {
            assert_eq!(numbers(&memory), tensor.all(), "{}", tensor.name);
        }
    }
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());
}

#[test]
fn boxes_of_chunks_go_to_memory_of_any_strides() {
    let (_root, dir, tensors) = written();
    let grid = &tensors[1];
    for verify in [true, false] {
        // A box of the last chunk transposed, the same one again upside down, and one of another.
        let (mut turned, mut flipped, mut other) = ([0; 80], [0; 80], [0; 16]);
        let slices = [
            Slice {
                name: "grid",
                chunk: 3,
                offsets: &[5, 7],
                lengths: &[5, 4],
                to: StridedTarget::new(&mut turned, 0, &[4, 20]),
            },
            Slice {
                name: "grid",
                chunk: 3,
                offsets: &[5, 7],
                lengths: &[5, 4],
                to: StridedTarget::new(&mut flipped, 64, &[-16, 4]),
            },
            Slice {
                name: "whole",
                chunk: 0,
                offsets: &[2],
                lengths: &[4],
                to: StridedTarget::new(&mut other, 0, &[4]),
            },
        ];
        let report = read(&dir, &slices, verify).unwrap();
        assert_eq!((report.tensors, report.tensor_bytes), (2, 80 + 80 + 16));
        assert_eq!(report.verified, verify);
        drop(slices);
        let boxed = grid.values(&[16 + 5, 30 + 7], &[5, 4]);
        let expected: Vec<u32> = (0..4)
            .flat_map(|x| (0..5).map(move |y| (x, y)))
            .map(|(x, y)| boxed[y * 4 + x])
            .collect();
        assert_eq!(numbers(&turned), expected);
        let expected: Vec<u32> = boxed.chunks(4).rev().flatten().copied().collect();
        assert_eq!(numbers(&flipped), expected);
        assert_eq!(numbers(&other), [2, 3, 4, 5]);
    }
}

#[test]
fn slice_of_rows_reads_little_more_than_its_bytes() {
    let root = scratch();
    let big = Parts::new("big", &[4096, 256], &[(0, &[0, 0], &[4096, 256])]);
    write(root.path(), std::slice::from_ref(&big));
    for verify in [true, false] {
        let mut memory = vec![0; 256 * 256 * 4];
        let to = StridedTarget::new(&mut memory, 0, &[1024, 4]);
        let slice = Slice { name: "big", chunk: 0, offsets: &[512, 0], lengths: &[256, 256], to };
        let report = read(root.path(), &[slice], verify).unwrap();
        assert_eq!(report.tensor_bytes, 256 << 10);
        let most = (report.tensor_bytes as f64 * 1.05) as u64 + BLOCK;
        assert!(report.read_bytes <= most, "{} > {most}", report.read_bytes);
        assert_eq!(numbers(&memory), big.values(&[512, 0], &[256, 256]));
    }
}

#[test]
fn damage_matters_to_those_who_read_the_block() {
    let (_root, dir, tensors) = written();
    let path = dir.join("rank00003-0.safetensors");
    let at = 4096 + 20_000; // in the chunk of "rows", rows 39 and on
    flip(&path, at);
    let read_rows = |first: u64, verify| {
        let mut memory = vec![0; 2 * 512];
        let (offsets, to) = ([first, 0], StridedTarget::new(&mut memory, 0, &[512, 4]));
        let slice = Slice { name: "rows", chunk: 3, offsets: &offsets, lengths: &[2, 128], to };
        read(&dir, &[slice], verify).map(|_| numbers(&memory))
    };
    assert_eq!(read_rows(2, true).unwrap(), tensors[0].values(&[194, 0], &[2, 128]));
    match read_rows(39, true).unwrap_err() {
        Error::Corrupt { path: found, offset, .. } => {
            assert_eq!((found, offset), (path, at as u64 / BLOCK * BLOCK));
        }
        other => panic!("{other:?}"),
    }
    assert!(read_rows(39, false).is_ok());
}

#[test]
fn unreadable_slices_are_all_named_before_any_read() {
    let (_root, dir, _) = written();
    let mut memory = [[7u8; 64]; 5];
    let [a, b, c, d, e] = &mut memory;
    let slice = |name, chunk, offsets, lengths, memory| Slice {
        name,
        chunk,
        offsets,
        lengths,
        to: StridedTarget::new(memory, 0, &[8, 4]),
    };
    let mut slices = vec![
        slice("rows", 0, &[0, 0], &[2, 2], a),
        slice("rows", 0, &[63, 0], &[2, 2], b),
        slice("rows", 4, &[0, 0], &[2, 2], c),
        slice("grid", 1, &[u64::MAX, 0], &[2, 2], d),
        slice("grid", 0, &[0, 0], &[9, 2], e),
    ];
    let error = read(&dir, &slices, true).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert_says(&error, &["4 of 5", "outside", "4 chunk(s)", "do not fit in the memory"]);
    let (mut f, mut g) = ([7; 64], [7; 64]);
    slices.push(slice("absent", 0, &[0, 0], &[1, 1], &mut f));
    slices.push(slice("gone", 0, &[0, 0], &[1, 1], &mut g));
    let error = read(&dir, &slices, true).unwrap_err();
    assert!(matches!(error, Error::Keys { .. }), "{error:?}");
    assert_says(&error, &["absent", "gone", "outside"]);
    drop(slices);
    assert!(memory.iter().all(|memory| *memory == [7; 64]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// A matrix cut in a grid at any places, asked for in any part by way of its chunks.
    #[test]
    fn any_slice_of_any_grid_reads_like_one_array(
        shape in (1..90u64, 1..90u64),
        cuts in prop::collection::vec((any::<u64>(), any::<bool>()), 0..5),
        from in (any::<u64>(), any::<u64>()),
        turned in any::<bool>(),
        verify in any::<bool>(),
    ) {
        let (rows, columns) = shape;
        let edges = |size: u64, along: bool| {
            let cuts = cuts.iter().filter(|cut| cut.1 == along).map(|cut| cut.0 % (size + 1));
            let mut edges: Vec<u64> = cuts.chain([0, size]).collect();
            edges.sort_unstable();
            edges
        };
        let mut parts = Vec::new();
        for y in edges(rows, true).windows(2) {
            for x in edges(columns, false).windows(2) {
                let sizes = vec![y[1] - y[0], x[1] - x[0]];
                parts.push((parts.len() % 3, vec![y[0], x[0]], sizes));
            }
        }
        let root = scratch();
        let grid = Parts { name: "grid", shape: vec![rows, columns], parts };
        write(root.path(), std::slice::from_ref(&grid));

        let (top, left) = (from.0 % rows, from.1 % columns);
        let (high, wide) = (rows - top, columns - left);
        let strides =
            if turned { [4, 4 * high as isize] } else { [4 * wide as isize, 4] };
        let mut memory = vec![0u8; (high * wide * 4) as usize];
        let base = memory.as_mut_ptr();
        let checkpoint = Checkpoint::open(root.path()).unwrap();
        let chunks = &checkpoint.tensor("grid").unwrap().chunks;
        // What each chunk has of the part: offsets in the chunk, lengths, and where it goes.
        let boxes: Vec<(usize, [u64; 2], [u64; 2], isize)> = chunks
            .iter()
            .enumerate()
            .filter_map(|(i, chunk)| {
                let (o, s) = (chunk.offsets()?, chunk.sizes()?);
                let start = [o[0].max(top), o[1].max(left)];
                let lengths = [0, 1].map(|d| (o[d] + s[d]).saturating_sub(start[d]));
                let at = (start[0] - top) as isize * strides[0]
                    + (start[1] - left) as isize * strides[1];
                let offsets = [0, 1].map(|d| (start[d] - o[d]).min(s[d]));
                Some((i, offsets, lengths, at))
            })
            .collect();
        let slices: Vec<Slice> = boxes
            .iter()
            .map(|(chunk, offsets, lengths, at)| {
                // SAFETY: the boxes tile the part, so each has elements of `memory` to itself.
                #[allow(unsafe_code)]
                let to = unsafe {
                    StridedTarget::from_raw(base.wrapping_offset(*at), strides.to_vec())
                };
                Slice { name: "grid", chunk: *chunk, offsets, lengths, to }
            })
            .collect();
        let report = read(root.path(), &slices, verify).unwrap();
        drop(slices);
        prop_assert_eq!(report.tensor_bytes, high * wide * 4);
        let part = grid.values(&[top, left], &[high, wide]);
        let expected: Vec<u32> = match turned {
            false => part,
            true => (0..wide)
                .flat_map(|x| (0..high).map(move |y| (y * wide + x) as usize))
                .map(|i| part[i])
                .collect(),
        };
        prop_assert_eq!(numbers(&memory), expected);
        let names = ["grid"];
        let (options, job) = (LoadOptions { verify, ..LoadOptions::default() }, Arc::default());
        let loaded = checkpoint.load_names(names, options.on(&runtime(), &job)).unwrap();
        let whole = loaded.tensor("grid").unwrap().as_slice::<u32>().unwrap();
        prop_assert_eq!(whole, grid.all());
    }
}

#[test]
fn overlapping_chunks_fail_commit_and_read() {
    let (root, committed) = (scratch(), scratch());
    let parts: &[(usize, &[u64], &[u64])] = &[(0, &[0, 0], &[4, 8]), (1, &[2, 0], &[4, 8])];
    let overlapping = [Parts::new("w", &[8, 8], parts)];
    let session = Store::found().unwrap().begin(committed.path(), 2).unwrap();
    let receipts = (0..2).map(|rank| write_part(committed.path(), rank, &overlapping)).collect();
    let error =
        session.commit(receipts, serde_json::value::to_raw_value(&()).unwrap()).unwrap_err();
    assert_says(&error, &["\"w\"", "overlap"]);

    let parts: &[(usize, &[u64], &[u64])] = &[(0, &[0, 0], &[4, 8]), (1, &[4, 0], &[4, 8])];
    write(root.path(), &[Parts::new("w", &[8, 8], parts)]);
    let mut manifest = Checkpoint::open(root.path()).unwrap().manifest().clone();
    let chunk = &mut manifest.tensors[0].chunks[1];
    *chunk = Chunk::region(chunk.file, chunk.begin, (&[2, 0], &[4, 8]));
    fs::write(root.path().join("manifest.json"), manifest.encode().unwrap()).unwrap();
    let error = Checkpoint::open(root.path()).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    assert_says(&error, &["\"w\"", "overlap"]);
}

/// Buffers of 2 MiB, each with two checksums.
#[test]
fn a_checksum_covers_one_mebibyte_of_a_larger_buffer() {
    const MIB: usize = 1 << 20;
    let config = Config { block_bytes: 2 << 20, pool_bytes: 8 << 20, ..Config::default() };
    let runtime = Runtime::new(config.clone()).unwrap();
    let root = scratch();
    let data = noise(7, 5 * MIB + 123);
    let mut state = StateDict::new();
    state.bytes("w", Dtype::U8, &[data.len() as u64], &data).unwrap();
    ringstow::Store::new(config.clone()).unwrap().save(&state, root.path()).unwrap();

    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let manifest = checkpoint.manifest();
    let shard = root.path().join(&manifest.files[0].name);
    let mut bytes = fs::read(&shard).unwrap();
    assert_eq!(manifest.block_bytes, MIB as u64);
    let crc32: Vec<u32> = bytes.chunks(MIB).map(crc32fast::hash).collect();
    assert_eq!(manifest.files[0].crc32, crc32);

    let mut memory = vec![0; MIB];
    let to = StridedTarget::new(&mut memory, 0, &[1]);
    let slice =
        Slice { name: "w", chunk: 0, offsets: &[2 * MIB as u64], lengths: &[MIB as u64], to };
    let report = checkpoint.read(&[slice], on(&runtime)).unwrap();
    assert_eq!(report.read_bytes, 2 * MIB as u64, "the header puts it across two blocks");
    assert_eq!(memory, data[2 * MIB..3 * MIB]);

    bytes[3 * MIB + 17] ^= 1;
    bytes[5 * MIB] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    let report = verify(&runtime, root.path()).unwrap();
    let damaged: Vec<u64> = report.damage.iter().map(|damage| damage.offset).collect();
    assert_eq!((damaged, report.blocks), (vec![3 * MIB as u64, 5 * MIB as u64], 6));
    let load = |_| checkpoint.load_names(["w"], on(&runtime));
    assert!(matches!(load(()), Err(Error::Corrupt { .. })));
}

#[test]
fn rank_share_loads_whole_tensors_and_names_the_others() {
    let (root, tensors) = (scratch(), tensors());
    let dir = written_alone(root.path(), &tensors).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let rows = checkpoint.tensor("rows").unwrap();
    assert_eq!((rows.held_bytes(), rows.nbytes()), (64 * 128 * 4, 256 * 128 * 4));
    let hole = |row, rows| (vec![row, 0], vec![rows, 128]);
    assert_eq!(rows.holes(), [hole(0, 128), hole(192, 64)]);
    checkpoint.check_coverage(["whole", "no such tensor"]).unwrap();
    let said = ["rank 2's share", "4 ranks", "32768 of 131072 bytes of \"rows\"", "dcp.load"];
    let refused = |error: Error, words: &[&str]| {
        assert!(matches!(error, Error::MissingShare { .. }), "{error:?}");
        assert_says(&error, words);
    };
    refused(checkpoint.check_coverage(["grid", "rows"]).unwrap_err(), &said);
    refused(checkpoint.check_coverage(["grid"]).unwrap_err(), &["3840 of 15360 bytes of \"grid\""]);
    for verify in [true, false] {
        let (options, job) = (LoadOptions { verify, ..LoadOptions::default() }, Arc::default());
        let load = |names: &[&str]| checkpoint.load_names(names, options.on(&runtime(), &job));
        let loaded = load(&["whole"]).unwrap();
        assert_eq!(loaded.tensor("whole").unwrap().as_slice::<u32>().unwrap(), tensors[2].all());
        refused(load(&["whole", "rows"]).unwrap_err(), &said);
        let (mut whole, mut memory) = (vec![7; 28], vec![7; 256 * 128 * 4]);
        let targets = [("whole", Target::new(&mut whole)), ("rows", Target::new(&mut memory))];
        refused(checkpoint.load_into(&targets, options.on(&runtime(), &job)).unwrap_err(), &said);
        drop(targets);
        assert!(whole.iter().chain(&memory).all(|&byte| byte == 7), "nothing was changed");
    }
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());
}

#[test]
fn rank_share_reads_its_own_regions_only() {
    let (root, tensors) = (scratch(), tensors());
    let dir = written_alone(root.path(), &tensors).unwrap();
    let mut memory = vec![0; 10 * 128 * 4];
    let mut rows = |chunk, row| {
        let to = StridedTarget::new(&mut memory, 0, &[512, 4]);
        let slice = Slice { name: "rows", chunk, offsets: &[row, 0], lengths: &[10, 128], to };
        read(&dir, &[slice], true).map(drop)
    };
    assert_says(&rows(1, 0).unwrap_err(), &["rows", "1 chunk(s)"]);
    assert_says(&rows(0, 60).unwrap_err(), &["rows", "chunk 0"]);
    rows(0, 54).unwrap();
    assert_eq!(numbers(&memory), tensors[0].values(&[128 + 54, 0], &[10, 128]));
}

#[test]
fn single_rank_share_holds_whole_tensors() {
    let root = scratch();
    let alone = RankShare { rank: 0, ranks: 1, save: "a-1".into() };
    for part_of in [None, Some(alone)] {
        let dir = root.path().join("step-1");
        let error = write_alone(&dir, &tensors(), 0, part_of).unwrap_err();
        assert_says(&error, &["\"rows\"", "hold 32768 of 131072 bytes"]);
        assert!(!dir.exists(), "nothing is left of it");
    }
}
