//! A rank's receipt, and the merge of several.

use crate::memory;
use ringstow::internals::format::receipt;
use ringstow::{Manifest, Receipt};
use serde_json::value::RawValue;
use std::path::Path;

/// How many times its own length a receipt takes in memory: see `src/format/receipt/packed.rs`.
const GROWTH_MAX: usize = 64;

pub fn run(data: &[u8]) {
    // Without a checksum of its own: the input would never have the right one.
    let sealed = [data, &crc32fast::hash(data).to_le_bytes()].concat();
    let (most, read) = memory::most_during(|| Receipt::decode(&sealed));
    assert!(
        most <= GROWTH_MAX * sealed.len() + 4096,
        "{most} bytes of memory for {}",
        sealed.len()
    );
    let Ok(read) = read else { return };
    let written = read.encode();
    assert_eq!(Receipt::decode(&written).expect("what is written is read"), read);
    assert_eq!(read.mark(), read.clone().mark());
    let other = Receipt { rank: read.rank ^ 1, ..read.clone() };
    let _ = receipt::merge(&[read.clone(), read.clone()]).expect_err("one rank saves once");
    for receipts in [vec![read.clone()], vec![other, read]] {
        let ranks = receipts.len() as u32;
        let Ok(merged) = receipt::merge(&receipts) else { continue };
        let state = RawValue::from_string("{}".into()).unwrap();
        let (block_bytes, files) = (merged.block_bytes, merged.files);
        let manifest = Manifest::new(0, ranks, block_bytes, files, merged.tensors, state);
        // What a commit accepts, every reader does.
        if manifest.check().is_ok() {
            let path = Path::new("manifest.json");
            let again = Manifest::decode(manifest.encode().unwrap(), path);
            assert_eq!(again.expect("a commit is read").tensors, manifest.tensors);
        }
    }
}
