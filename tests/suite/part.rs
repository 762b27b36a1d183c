//! What a program without a runtime in hand gets of a checkpoint: values, whole tensors, parts of one.
#![cfg(unix)]
#![allow(clippy::single_range_in_vec_init)] // a range of the first dimension is what is meant

use crate::common::*;
use ringstow::{
    Checkpoint, CheckpointKind, Dtype, Error, Region, StateDict, Store, TensorInfo, Value,
};
use std::path::Path;

fn numbers(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

/// A matrix of 6 by 4, a list of groups, a step.
fn saved(dir: &Path) {
    let matrix = numbers(0, 24);
    let mut state = StateDict::new();
    state.slice("m", &[6, 4], &matrix).unwrap();
    let group = Value::Dict(vec![("lr".into(), 0.1.into()), ("a.b".into(), 3.into())]);
    state.value("step", 1000).value("groups", vec![group]);
    store().save(&state, dir).unwrap();
}

#[test]
fn values_are_found_by_the_path_to_them() {
    let root = scratch();
    saved(root.path());
    let loaded = ringstow::load(root.path()).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    assert_eq!(loaded.value("step").unwrap().as_int(), Some(1000));
    assert_eq!(checkpoint.value("step").unwrap().as_int(), Some(1000));
    assert_eq!(loaded.value("groups.0.lr").unwrap().as_float(), Some(0.1));
    assert_eq!(loaded.value("groups.0.a.b").unwrap().as_int(), Some(3));
    assert_eq!(loaded.value("m").unwrap(), &Value::Tensor("m".into()));
    assert_eq!(loaded.state().unwrap().get("step"), Some(&Value::Int(1000)));
    for missing in ["stepp", "groups.1", "groups.0.l", "step.0", ""] {
        match loaded.value(missing).unwrap_err() {
            Error::Keys { missing: names, .. } => assert_eq!(names, [missing]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn slices_are_saved_as_what_they_are() {
    let root = scratch();
    let (halves, bytes) = ([half::bf16::ONE; 3], [1u8, 2]);
    let mut state = StateDict::new();
    state.slice("h", &[3], &halves).unwrap().slice("b", &[1, 2], &bytes).unwrap();
    assert!(matches!(state.slice("x", &[4], &halves), Err(Error::Invalid { .. })));
    store().save(&state, root.path()).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let loaded = checkpoint.load(["h"]).unwrap();
    assert_eq!(loaded.tensor("h").unwrap().as_slice::<half::bf16>().unwrap(), halves);
    assert!(loaded.tensor("b").is_none());
}

#[test]
fn a_part_of_a_tensor_is_read_by_its_ranges() {
    let root = scratch();
    saved(root.path());
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let part = checkpoint.load_part("m", &[2..4, 1..3]).unwrap();
    assert_eq!((part.dtype(), part.shape()), (Dtype::U32, &[2, 2][..]));
    assert_eq!(part.as_slice::<u32>().unwrap(), [9, 10, 13, 14]);
    assert!(part.as_slice::<f32>().is_err());
    let rows = checkpoint.load_part("m", &[4..6]).unwrap();
    assert_eq!(rows.as_slice::<u32>().unwrap(), numbers(16, 8));
    assert_eq!(checkpoint.load_part("m", &[]).unwrap().shape(), [6, 4]);
    let empty = checkpoint.load_part("m", &[3..3]).unwrap();
    assert_eq!((empty.shape(), empty.data().len()), (&[0, 4][..], 0));
    #[allow(clippy::reversed_empty_ranges)]
    for ranges in [vec![0..7], vec![0..6, 0..4, 0..1], vec![3..2]] {
        let error = checkpoint.load_part("m", &ranges).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert_says(&error, &["\"m\"", "[6, 4]"]);
    }
    assert!(matches!(checkpoint.load_part("n", &[]), Err(Error::Keys { .. })));
}

#[test]
fn a_part_of_what_several_ranks_wrote_is_put_together() {
    let root = scratch();
    let session = Store::found().unwrap().begin(root.path(), 2).unwrap();
    let receipts = (0..2u32).map(|rank| {
        let bytes: Vec<u8> = numbers(rank * 12, 12).iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut state = StateDict::new();
        let info = TensorInfo { name: "m".into(), dtype: Dtype::U32, shape: vec![3, 4] };
        let region = Region { shape: vec![6, 4], offsets: vec![u64::from(rank) * 3, 0] };
        state.region(info, region, Box::new(bytes));
        store().write_rank(&state, rank, root.path()).unwrap().0
    });
    let receipts = receipts.collect();
    session.commit(receipts, serde_json::value::to_raw_value(&()).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let part = checkpoint.load_part("m", &[2..5, 3..4]).unwrap();
    assert_eq!(part.as_slice::<u32>().unwrap(), [11, 15, 19]);
    assert_eq!(checkpoint.info().world_size, 2);
}

#[test]
fn replaced_checkpoint_is_not_read_by_the_old_handle() {
    let root = scratch();
    saved(root.path());
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    ringstow::save(&StateDict::new(), root.path()).unwrap();
    let error = checkpoint.load_part("m", &[0..1]).unwrap_err();
    assert!(matches!(error, Error::Replaced { .. }), "{error:?}");
    assert_says(&error, &["open it again"]);
}

#[test]
fn what_the_manifest_says_of_the_save_is_told() {
    let root = scratch();
    saved(root.path());
    let info = Checkpoint::open(root.path()).unwrap().info();
    assert_eq!((info.kind, info.tensors, info.tensor_bytes), (CheckpointKind::Ringstow, 1, 96));
    assert_eq!(info.file_bytes, info.files.iter().map(|file| file.bytes).sum::<u64>());
    assert_eq!((info.generation, info.writer.as_str()), (0, env!("CARGO_PKG_VERSION")));
    assert!(info.created_unix_ms > 0 && info.part_of.is_none());
}
