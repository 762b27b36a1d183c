//! Tests of the layout.

use super::*;
use crate::format::lists::LONG_DIMS_MAX;
use crate::format::{Dtype, Region, TensorInfo};
use crate::plan::deal::HEADER_BYTES_FULL;
use proptest::prelude::*;
use std::collections::HashSet;

fn options(block_bytes: u64, shard_bytes: u64) -> Options<'static> {
    Options { rank: 0, generation: 0, block_bytes, shard_bytes, lanes: 1, apart: &[] }
}

fn in_lanes(lanes: usize) -> Options<'static> {
    Options { lanes, ..options(4096, 0) }
}

fn item(name: String, dtype: Dtype, n: u64) -> Item {
    TensorInfo { name, dtype, shape: vec![n] }.into()
}

fn items(sizes: &[(Dtype, u64)]) -> Vec<Item> {
    let item = |(i, &(dtype, n))| item(format!("layer.{i}"), dtype, n);
    sizes.iter().enumerate().map(item).collect()
}

/// Bytes `from..to` of a tensor of `of` bytes.
fn region(name: &str, from: u64, to: u64, of: u64) -> Item {
    let region = Some(Region { shape: vec![of], offsets: vec![from] });
    Item { region, ..item(name.into(), Dtype::U8, to - from) }
}

fn any_sizes() -> impl Strategy<Value = Vec<(Dtype, u64)>> {
    let dtype = prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C128]);
    prop::collection::vec((dtype, prop_oneof![0..9u64, 0..9000u64]), 0..40)
}

proptest! {
    #[test]
    fn blocks_hold_every_byte_of_every_file_once_and_in_order(
        sizes in any_sizes(),
        block in prop::sample::select(vec![4096u64, 8192, 65536]),
        shard_bytes in prop::sample::select(vec![0u64, 10_000, 100_000]),
        lanes in 1..6usize,
    ) {
        let items = items(&sizes);
        let options = Options { lanes, ..options(block, shard_bytes) };
        let plan = plan(&items, options).unwrap();
        let mut copied = vec![0u64; items.len()];
        for (s, shard) in plan.shards.iter().enumerate() {
            let mut at = 0;
            for block in plan.blocks.iter().filter(|b| b.shard == s) {
                prop_assert_eq!(block.offset, at);
                for piece in plan.pieces(block) {
                    if let PieceSource::Item(t) = piece.from {
                        let extent = shard.items.iter().find(|e| e.item == t).unwrap();
                        prop_assert_eq!(extent.range.start + piece.range.start as u64, at);
                        copied[t] += piece.range.len() as u64;
                    }
                    at += piece.range.len() as u64;
                }
                prop_assert_eq!(at, block.offset + block.len as u64);
            }
            prop_assert_eq!(at, shard.bytes);
        }
        let all: Vec<u64> = items.iter().map(|t| t.info.nbytes().unwrap()).collect();
        prop_assert_eq!(copied, all);
    }

    #[test]
    fn no_file_holds_tensors_of_two_groups_and_none_is_empty(
        groups in prop::collection::vec((0..3usize, 0..3000u64), 0..40),
        shard_bytes in prop::sample::select(vec![0u64, 5_000]),
        lanes in 1..4usize,
    ) {
        let names = ["model", "optimizer", "ema"];
        let named = |(i, &(group, n)): (usize, &(usize, u64))| {
            item(format!("{}.{i}", names[group]), Dtype::U8, n)
        };
        let items: Vec<Item> = groups.iter().enumerate().map(named).collect();
        let apart = ["optimizer", "ema", "absent"].map(|name| Part::named(&[name.into()]));
        let plan = plan(&items, Options { apart: &apart, ..Options { shard_bytes, ..in_lanes(lanes) } }).unwrap();
        let mut placed = HashSet::new();
        for shard in &plan.shards {
            let of: HashSet<usize> = shard.items.iter().map(|extent| groups[extent.item].0).collect();
            prop_assert!(of.len() == 1 || items.is_empty());
            prop_assert!(shard.items.iter().all(|extent| placed.insert(extent.item)));
        }
        prop_assert_eq!(placed.len(), items.len());
    }

    #[test]
    fn lanes_differ_by_one_tensor_at_most_and_none_is_empty(
        sizes in any_sizes(),
        lanes in 1..9usize,
    ) {
        let items = items(&sizes);
        let plan = plan(&items, in_lanes(lanes)).unwrap();
        let nbytes = |item: &Item| item.info.nbytes().unwrap();
        let bytes: Vec<u64> = plan.shards.iter().map(|shard| {
            shard.items.iter().map(|extent| nbytes(&items[extent.item])).sum()
        }).collect();
        let largest = items.iter().map(nbytes).max().unwrap_or(0);
        let least = if plan.shards.len() < lanes { 0 } else { *bytes.iter().min().unwrap() };
        prop_assert!(*bytes.iter().max().unwrap() <= least + largest);
        let with_bytes = items.iter().filter(|item| nbytes(item) > 0).count();
        prop_assert_eq!(plan.shards.len(), with_bytes.clamp(1, lanes));
        prop_assert!(plan.shards.iter().enumerate().all(|(l, shard)| shard.lane == l));
        // Each file has the order that one file of all tensors would have.
        let rank = |extent: &ItemRange| {
            let item = &items[extent.item];
            (Reverse(header::natural_alignment(nbytes(item), item.info.dtype)), extent.item)
        };
        prop_assert!(plan.shards.iter().all(|shard| shard.items.is_sorted_by_key(rank)));
    }

    #[test]
    fn blocks_of_all_lanes_take_turns(
        sizes in any_sizes(),
        lanes in 1..6usize,
        shard_bytes in prop::sample::select(vec![0u64, 10_000]),
    ) {
        let options = Options { shard_bytes, ..in_lanes(lanes) };
        let plan = plan(&items(&sizes), options).unwrap();
        let mut written = vec![0usize; lanes];
        let mut blocks_of = vec![0usize; lanes];
        for block in &plan.blocks {
            blocks_of[plan.shards[block.shard].lane] += 1;
        }
        for block in &plan.blocks {
            let lane = plan.shards[block.shard].lane;
            // No lane that has blocks left is behind by more than one.
            for other in 0..lanes {
                prop_assert!(written[other] >= written[lane].min(blocks_of[other]));
            }
            written[lane] += 1;
        }
        prop_assert_eq!(written, blocks_of);
    }

    #[test]
    fn every_tensor_is_aligned_to_its_dtype(sizes in any_sizes()) {
        let items = items(&sizes);
        let plan = plan(&items, options(4096, 0)).unwrap();
        for extent in plan.shards.iter().flat_map(|s| &s.items) {
            let info = &items[extent.item].info;
            let natural = header::natural_alignment(info.nbytes().unwrap(), info.dtype);
            prop_assert_eq!(extent.range.start % natural, 0);
        }
    }

    #[test]
    fn shards_are_valid_safetensors_files(sizes in any_sizes()) {
        let items = items(&sizes);
        let plan = plan(&items, options(4096, 20_000)).unwrap();
        let mut seen = 0;
        for shard in &plan.shards {
            let mut file = shard.header_bytes(&items);
            file.resize(shard.bytes as usize, 0);
            seen += safetensors::SafeTensors::deserialize(&file).unwrap().len();
        }
        prop_assert_eq!(seen, items.len());
    }
}

#[test]
fn tensor_larger_than_a_fair_share_gets_its_own_lane() {
    let items = items(&[
        (Dtype::U8, 10_000),
        (Dtype::U8, 1000),
        (Dtype::U8, 0),
        (Dtype::U8, 800),
        (Dtype::U8, 100),
    ]);
    let files = |lanes| -> Vec<Vec<usize>> {
        let plan = plan(&items, in_lanes(lanes)).unwrap();
        let members = |shard: &Shard| shard.items.iter().map(|e| e.item).collect();
        plan.shards.iter().map(members).collect()
    };
    assert_eq!(files(3), [vec![2, 0], vec![1], vec![3, 4]]);
    assert_eq!(files(64), [vec![2, 0], vec![1], vec![3], vec![4]]);
    assert_eq!(files(3), files(3));
}

#[test]
fn empty_state_is_one_file_with_a_header() {
    let plan = plan(&[], options(4096, 0)).unwrap();
    assert_eq!((plan.shards.len(), plan.blocks.len()), (1, 1));
    assert_eq!(plan.shards[0].bytes, 4096);
}

#[test]
fn headers_stay_below_the_limit_of_safetensors() {
    let many: Vec<Item> =
        (0..1500).map(|i| item(format!("{i:08}{}", "n".repeat(20_000)), Dtype::U8, 1)).collect();
    let plan = plan(&many, options(4096, 0)).unwrap();
    // 40 kB each, since the header has every name twice.
    let headers: Vec<u64> = plan.shards.iter().map(|shard| shard.header.bytes()).collect();
    assert_eq!(headers.len(), 2);
    assert!((HEADER_BYTES_FULL - 50_000..=HEADER_BYTES_FULL).contains(&headers[0]));
}

#[test]
fn name_too_long_for_any_header_is_refused() {
    let long = |len| item("\u{1}".repeat(len), Dtype::U8, 1);
    // 6 + 7 bytes per character.
    let error = plan(&[long(8_000_000)], options(4096, 0)).unwrap_err();
    assert!(error.to_string().contains("8000000 bytes"), "{error}");
    let two = plan(&[long(7_000_000), long(1_000_000)], options(4096, 0)).unwrap();
    let headers: Vec<u64> = two.shards.iter().map(|shard| shard.header.bytes()).collect();
    assert_eq!(headers.len(), 2);
    assert!(headers[0] > 91_000_000 && headers[0] <= 100_000_000, "{headers:?}");
}

#[test]
fn duplicate_name_is_refused() {
    let mut two = items(&[(Dtype::U8, 1), (Dtype::U8, 1)]);
    two[1].info.name = "layer.0".into();
    let error = plan(&two, options(4096, 0)).unwrap_err();
    assert!(error.to_string().contains("layer.0"));
    let twice = [region("w", 0, 2, 4), region("w", 2, 4, 4), region("w", 2, 4, 4)];
    assert!(plan(&twice, options(4096, 0)).is_err());
}

#[test]
fn regions_of_one_tensor_go_to_different_files() {
    let items = [
        region("w", 0, 2, 6),
        region("v", 0, 3, 6),
        region("w", 2, 4, 6),
        region("w", 4, 6, 6),
        region("v", 3, 6, 6),
    ];
    let plan = plan(&items, options(4096, 0)).unwrap();
    let members = |shard: &Shard| {
        let mut members: Vec<usize> = shard.items.iter().map(|extent| extent.item).collect();
        members.sort_unstable();
        members
    };
    let files: Vec<Vec<usize>> = plan.shards.iter().map(members).collect();
    assert_eq!(files, [vec![0, 1], vec![2, 4], vec![3]]);
    let dealt = super::plan(&items, in_lanes(2)).unwrap();
    for shard in &dealt.shards {
        let names: Vec<&str> =
            shard.items.iter().map(|e| items[e.item].info.name.as_str()).collect();
        assert!(names.iter().collect::<HashSet<_>>().len() == names.len(), "{names:?}");
    }
    let entries: Vec<TensorEntry> = plan.entries(&items).iter().collect();
    let names: Vec<(&str, usize)> =
        entries.iter().map(|entry| (entry.name.as_str(), entry.chunks.len())).collect();
    assert_eq!(names, [("w", 3), ("v", 2)]);
    assert_eq!(entries[0].chunks[1].offsets(), Some(&[2][..]));
}

#[test]
fn region_outside_of_its_tensor_is_refused() {
    let error = plan(&[region("w", 3, 7, 6)], options(4096, 0)).unwrap_err();
    assert!(error.to_string().contains("[4] at [3]"), "{error}");
}

#[test]
fn more_dimensions_than_a_reader_takes_are_refused() {
    let of = |dims: usize| {
        let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![1; dims] };
        order(&[Item::from(info)])
    };
    assert!(of(LONG_DIMS_MAX).is_ok());
    let error = of(LONG_DIMS_MAX + 9).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("32768 dimensions"), "{error}");
}

#[test]
fn longest_name_that_fits_decides_in_any_order() {
    let items = ["opt.x", "opt.y.a", "model"].map(|name| item(name.into(), Dtype::U8, 10));
    for apart in [["opt", "opt.y"], ["opt.y", "opt"]] {
        let apart = apart.map(|name| Part::named(&[name.into()]));
        let plan = plan(&items, Options { apart: &apart, ..in_lanes(1) }).unwrap();
        assert!(plan.shards.iter().all(|shard| shard.items.len() == 1), "{apart:?}");
    }
}
