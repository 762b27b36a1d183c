use super::*;
use crate::format::{Chunk, ChunkHash, Dtype};

fn receipt(rank: u32, tensors: Vec<TensorEntry>) -> Receipt {
    let name = crate::format::names::shard(rank, 0, 0);
    let hashes = vec![ChunkHash { begin: 300, hash: u128::MAX - 5 }];
    let files = vec![FileEntry { name, bytes: 4096, crc32: vec![0], hashes }];
    let (session, write, apart) = ("s".into(), "w".into(), Vec::new());
    Receipt { rank, session, write, block_bytes: 4096, files, tensors, apart }
}

fn tensor(name: &str, shape: &[u64], boxes: &[(u64, u64)]) -> TensorEntry {
    let chunk = |&(offset, size): &(u64, u64)| Chunk::region(0, 0, (&[offset], &[size]));
    let chunks = boxes.iter().map(chunk).collect();
    TensorEntry { name: name.into(), dtype: Dtype::U8, shape: shape.into(), chunks, object: false }
}

#[test]
fn regions_of_all_ranks_are_merged_and_replicas_count_once() {
    let one = receipt(1, vec![tensor("w", &[4], &[(2, 2)]), tensor("r", &[1], &[(0, 1)])]);
    let zero = receipt(0, vec![tensor("w", &[4], &[(0, 2)]), tensor("r", &[1], &[(0, 1)])]);
    let merged = merge(&[one, zero]).unwrap();
    let names: Vec<&str> = merged.files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["rank00000-0.safetensors", "rank00001-0.safetensors"]);
    let [w, r] = &merged.tensors[..] else { panic!("two tensors") };
    let places: Vec<_> = w.chunks.iter().map(|c| (c.file, c.offsets().unwrap())).collect();
    assert_eq!(places, [(0, &[0][..]), (1, &[2][..])]);
    assert_eq!((r.chunks.len(), r.chunks[0].file), (1, 0));
}

#[test]
fn disagreeing_ranks_are_named() {
    let of = |shape: &[u64]| vec![tensor("w", shape, &[(0, 1)])];
    let error = merge(&[receipt(0, of(&[4])), receipt(1, of(&[5]))]).unwrap_err();
    assert!(error.to_string().contains("U8 [4] on rank 0 and U8 [5] on rank 1"), "{error}");
    let error = merge(&[receipt(3, of(&[4])), receipt(3, of(&[4]))]).unwrap_err();
    assert!(error.to_string().contains("rank 3"), "{error}");
    let other = Receipt { block_bytes: 8192, ..receipt(1, Vec::new()) };
    let error = merge(&[receipt(0, Vec::new()), other]).unwrap_err();
    assert!(error.to_string().contains("block_bytes"), "{error}");
    let other = Receipt { apart: vec!["opt".into()], ..receipt(1, Vec::new()) };
    let error = merge(&[receipt(0, Vec::new()), other]).unwrap_err();
    assert!(error.to_string().contains("rank 0 set [] apart, rank 1 [\"opt\"]"), "{error}");
}

#[test]
fn chunk_in_a_file_that_the_receipt_does_not_list_is_refused() {
    for file in [1, u32::MAX] {
        let mut astray = tensor("w", &[4], &[(0, 4)]);
        astray.chunks[0].file = file;
        let receipts = vec![receipt(0, vec![astray.clone()]), receipt(1, Vec::new())];
        let error = merge(&receipts).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains(&file.to_string()), "{error}");
        assert!(merge(&[receipt(0, Vec::new()), receipt(1, vec![astray])]).is_err());
    }
}

#[test]
fn receipt_round_trips() {
    let sent = receipt(2, vec![tensor("w", &[4], &[(0, 4)])]);
    assert_eq!(Receipt::decode(&sent.encode()).unwrap(), sent);
    assert!(Receipt::decode(b"{}").is_err());
}

/// Names that share their ends with each other, as those of layers do, or nothing.
fn layers(rank: u32) -> Receipt {
    let names = ["", "model.layers.9.w", "model.layers.10.w", "model.layers.10.weight", "w", "ww"];
    let long = "x".repeat(1000);
    let mut tensors: Vec<_> = names.iter().map(|name| tensor(name, &[4], &[(0, 4)])).collect();
    tensors.extend(
        [long.clone(), format!("{long}.b"), "été".into(), "\u{20ac}té".into()]
            .map(|name| tensor(&name, &[u64::MAX, 0, 1 << 63, 5], &[(u64::MAX - 1, 1), (3, 0)])),
    );
    tensors[0].chunks = [Chunk::whole(0, u64::MAX)].into();
    tensors[1].chunks.clear();
    tensors[2].object = true;
    let apart = vec!["optimizer".into()];
    Receipt { apart, ..receipt(rank, tensors) }
}

#[test]
fn receipt_of_any_names_and_numbers_round_trips() {
    let sent = layers(u32::MAX);
    assert_eq!(Receipt::decode(&sent.encode()).unwrap(), sent);
    let packed = sent.encode();
    let merged = merge_packed(&[packed]).unwrap();
    assert_eq!(merged.tensors, sent.tensors);
    assert_eq!((merged.files, merged.apart), (sent.files.clone(), sent.apart.clone()));
    assert_eq!(merged.writes[0].mark, sent.mark());
}

#[test]
fn damaged_receipt_is_refused_at_every_byte() {
    let whole = layers(3).encode();
    for end in 0..whole.len() {
        assert!(Receipt::decode(&whole[..end]).is_err(), "cut at {end}");
    }
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(Receipt::decode(&damaged).is_err(), "byte {at}");
    }
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let error = merge_packed(&[layers(0).encode(), damaged]).unwrap_err().to_string();
    assert!(error.contains("at place 1") && error.contains("damaged"), "{error}");
}

/// As from a rank that has another version of this library.
#[test]
fn receipt_of_another_version_is_refused_with_the_fix() {
    let mut other = layers(3).encode();
    other[8] = 7;
    let error = Receipt::decode(&other).unwrap_err().to_string();
    assert!(error.contains("version 7") && error.contains("same version of ringstow"), "{error}");
}

#[test]
fn order_of_the_receipts_does_not_matter() {
    let of = |rank: u32| {
        let own = tensor(&format!("own.{rank}"), &[1], &[(0, 1)]);
        receipt(rank, vec![own, tensor("w", &[8], &[(u64::from(rank), 1)])]).encode()
    };
    let merged = |order: [u32; 4]| {
        let merged = merge_packed(&order.map(of)).unwrap();
        let ranks: Vec<u32> = merged.writes.iter().map(|write| write.rank).collect();
        (merged.files, merged.tensors, ranks)
    };
    let (files, tensors, ranks) = merged([0, 1, 2, 3]);
    assert_eq!((files.len(), tensors.len(), &ranks[..]), (4, 5, &[0, 1, 2, 3][..]));
    assert_eq!(tensors[1].chunks.iter().map(|chunk| chunk.file).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(merged([3, 1, 0, 2]), (files, tensors, ranks));
}

#[test]
fn replica_of_the_whole_counts_once_beside_regions() {
    let whole = TensorEntry { chunks: [Chunk::whole(0, 0)].into(), ..tensor("w", &[4], &[]) };
    let region = tensor("w", &[4], &[(0, 2), (0, 2), (2, 2)]);
    for (order, file) in [([&whole, &region, &whole], 0), ([&region, &whole, &whole], 1)] {
        let receipts: Vec<_> =
            (0..).zip(order).map(|(rank, one)| receipt(rank, vec![one.clone()])).collect();
        assert_eq!(merge(&receipts).unwrap().tensors[0].chunks[..], [Chunk::whole(file, 0)]);
    }
    let regions = merge(&[receipt(0, vec![region.clone()]), receipt(1, vec![region])]).unwrap();
    let chunks = &regions.tensors[0].chunks;
    assert_eq!(
        chunks.iter().map(|c| (c.file, c.offsets().unwrap()[0])).collect::<Vec<_>>(),
        [(0, 0), (0, 2)]
    );
}

#[test]
fn merging_ranks_alike_takes_the_memory_of_what_is_merged() {
    let tensors =
        |rank: u64| (0..100).map(move |t| tensor(&format!("layers.{t}.w"), &[512], &[(rank, 1)]));
    let packed: Vec<_> =
        (0..512).map(|rank| receipt(rank as u32, tensors(rank).collect()).encode()).collect();
    let most = allocation_counter::measure(|| drop(merge_packed(&packed).unwrap()));
    let chunks = 512 * 100 * std::mem::size_of::<Chunk>() as u64;
    assert!(most.bytes_max < 2 * chunks, "{} bytes for {chunks} of chunks", most.bytes_max);
}
