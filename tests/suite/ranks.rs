//! A checkpoint that several ranks write and one of them commits.

use crate::common::held::{self, made};
use crate::common::{names_in, no_values, noise, small_config, store};
use ringstow::{
    Checkpoint, Config, Dtype, Error, Receipt, Region, SaveReport, StateDict, Store, TensorInfo,
};
use std::fs;
use std::path::Path;

/// Bytes of the tensor that the ranks share, and of the one that each has for itself.
const SHARED: usize = 40_000;

/// A rank's part: its rows of one tensor, and a tensor of its own.
fn write(dir: &Path, rank: u32, world: u32, seed: u64) -> ringstow::Result<(Receipt, SaveReport)> {
    let (shared, own) = (noise(seed, SHARED), noise(seed + 1 + u64::from(rank), 5000));
    let rows = SHARED / world as usize;
    let from = rows * rank as usize;
    let mut state = StateDict::new();
    let info = TensorInfo { name: "shared".into(), dtype: Dtype::U8, shape: vec![rows as u64] };
    let region = Region { shape: vec![SHARED as u64], offsets: vec![from as u64] };
    state.region(info, region, Box::new(shared[from..from + rows].to_vec()));
    state.bytes(format!("own.{rank}"), Dtype::U8, &[5000], &own)?;
    store().write_rank(&state, rank, dir)
}

fn save(dir: &Path, world: u32, seed: u64) {
    let session = Store::found().unwrap().begin(dir, world).unwrap();
    let receipts = (0..world).rev().map(|rank| write(dir, rank, world, seed).unwrap().0).collect();
    session.commit(receipts, no_values()).unwrap();
}

/// The bytes of a tensor, put together from its chunks' places in the files.
fn bytes_of(dir: &Path, name: &str) -> Vec<u8> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let tensor = checkpoint.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.nbytes() as usize];
    for chunk in &tensor.chunks {
        let file =
            fs::read(dir.join(&checkpoint.manifest().files[chunk.file as usize].name)).unwrap();
        let at = chunk.offsets().map_or(0, |offsets| offsets[0]) as usize;
        let len = chunk.sizes().unwrap_or(&tensor.shape)[0] as usize;
        bytes[at..at + len].copy_from_slice(&file[chunk.begin as usize..][..len]);
    }
    bytes
}

#[test]
fn all_ranks_parts_are_one_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step");
    save(&dir, 4, 1);
    assert_eq!(bytes_of(&dir, "shared"), noise(1, SHARED));
    assert_eq!(bytes_of(&dir, "own.3"), noise(5, 5000));
    assert_eq!(Checkpoint::open(&dir).unwrap().manifest().world_size, 4);
    assert_eq!(
        names_in(&dir),
        [
            "manifest.json",
            "rank00000-0.safetensors",
            "rank00001-0.safetensors",
            "rank00002-0.safetensors",
            "rank00003-0.safetensors",
        ]
    );
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());
}

#[test]
fn another_world_replaces_it_whole() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 4, 1);
    save(root.path(), 2, 9);
    assert_eq!(bytes_of(root.path(), "shared"), noise(9, SHARED));
    assert_eq!(
        names_in(root.path()),
        ["manifest.json", "rank00000-0.g1.safetensors", "rank00001-0.g1.safetensors"]
    );
}

/// Nobody makes a list of four billion ranks because a file says so.
#[test]
fn a_note_of_ranks_that_no_save_has_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("manifest.json.part");
    std::fs::write(&note, r#"{"world_size":4294967295}"#).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::NotCommitted { .. }), "{error}");
    assert!(!error.to_string().contains("ranks"), "{error}");
}

#[test]
fn dead_rank_is_named_and_the_old_checkpoint_stays() {
    let root = tempfile::tempdir().unwrap();
    let fresh = root.path().join("fresh");
    let session = Store::found().unwrap().begin(&fresh, 4).unwrap();
    for rank in [0, 2] {
        write(&fresh, rank, 4, 1).unwrap();
    }
    let error = Checkpoint::open(&fresh).unwrap_err();
    assert!(matches!(error, Error::NotCommitted { .. }));
    assert!(error.to_string().contains("of 4 ranks, ranks 1, 3 had not finished"), "{error}");
    drop(session);
    assert!(!fresh.exists(), "a save that is given up leaves no trace");

    let dir = root.path().join("step");
    save(&dir, 2, 1);
    let session = Store::found().unwrap().begin(&dir, 2).unwrap();
    let receipt = write(&dir, 0, 2, 9).unwrap().0;
    assert_eq!(bytes_of(&dir, "shared"), noise(1, SHARED));
    let error = session.commit(vec![receipt], no_values()).unwrap_err();
    assert!(error.to_string().contains("2 ranks were to save"), "{error}");
    assert_eq!(bytes_of(&dir, "shared"), noise(1, SHARED));
    assert_eq!(names_in(&dir).len(), 3, "nothing of the failed save is left");
}

#[test]
fn shards_the_coordinator_cannot_see_are_not_committed() {
    let (here, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let session = Store::found().unwrap().begin(here.path(), 2).unwrap();
    let receipts =
        vec![write(here.path(), 0, 2, 1).unwrap().0, write(here.path(), 1, 2, 1).unwrap().0];
    // A rank that sees another directory under this path.
    let error = write(elsewhere.path(), 1, 2, 1).unwrap_err().to_string();
    assert!(error.contains("shared file system"), "{error}");
    let of_rank_1 = |name: &String| name.starts_with("rank00001-0.safetensors.");
    let lost = names_in(here.path()).into_iter().find(of_rank_1).unwrap();
    fs::remove_file(here.path().join(lost)).unwrap();
    let error = session.commit(receipts, no_values()).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("shared file system"), "{error}");
    assert!(Checkpoint::open(here.path()).is_err());
}

#[test]
fn a_checkpoint_with_a_hole_is_no_commit() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let receipt = write(root.path(), 0, 2, 1).unwrap().0;
    let error = session.commit(vec![receipt], no_values()).unwrap_err().to_string();
    assert!(error.contains("\"shared\"") && error.contains("20000 of 40000"), "{error}");

    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let receipt = write(root.path(), 0, 1, 1).unwrap().0;
    let names = ["own.0", "lost"].map(String::from);
    let error = session.commit_names(vec![receipt], no_values(), &names).unwrap_err();
    assert!(matches!(&error, Error::Keys { missing, .. } if missing == &["lost"]), "{error}");
}

/// Names and lengths are the same: only what is in the files differs.
#[test]
fn a_receipt_of_a_save_that_was_given_up_is_no_commit() {
    let root = tempfile::tempdir().unwrap();
    let given_up = Store::found().unwrap().begin(root.path(), 2).unwrap();
    let late = write(root.path(), 1, 2, 1).unwrap().0;
    drop(given_up);

    for rank_one_has_written in [false, true] {
        let session = Store::found().unwrap().begin(root.path(), 2).unwrap();
        let receipt = write(root.path(), 0, 2, 9).unwrap().0;
        write(root.path(), 1, 2, 9).unwrap();
        if !rank_one_has_written {
            fs::remove_file(root.path().join("rank00001.done.part")).unwrap();
        }
        let error =
            session.commit(vec![receipt, late.clone()], no_values()).unwrap_err().to_string();
        assert!(error.contains("receipt of rank 1") && error.contains("earlier save"), "{error}");
        assert!(Checkpoint::open(root.path()).is_err());
    }
}

#[test]
fn a_rank_that_writes_again_takes_back_its_word() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let receipt = write(root.path(), 0, 1, 1).unwrap().0;
    let mut bad = StateDict::new();
    bad.bytes("x", Dtype::U8, &[3], b"abc").unwrap();
    // The second write fails before it has changed a byte.
    let config = Config { stripe: vec![root.path().join("no-such-disk")], ..small_config() };
    assert!(
        ringstow::Store::new(config.clone()).unwrap().write_rank(&bad, 0, root.path()).is_err()
    );
    let error = session.commit(vec![receipt], no_values()).unwrap_err().to_string();
    assert!(error.contains("begun to write again"), "{error}");
}

#[test]
fn a_rank_without_tensors_writes_no_file() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 2).unwrap();
    let idle = store().write_rank(&StateDict::new(), 1, root.path()).unwrap();
    assert_eq!((idle.0.files.len(), idle.1.file_bytes), (0, 0));
    let committed =
        session.commit(vec![idle.0, write(root.path(), 0, 1, 1).unwrap().0], no_values()).unwrap();
    assert_eq!((committed.files, committed.tensors), (1, 2));
    assert_eq!(names_in(root.path()), ["manifest.json", "rank00000-0.safetensors"]);
}

#[test]
fn a_rank_that_fails_removes_its_own_part_only() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 2).unwrap();
    write(root.path(), 0, 2, 1).unwrap();
    let bad = held::only(made(3, |_, _| Err(Error::invalid("it cannot be read"))));
    assert!(store().write_rank(&bad, 1, root.path()).is_err());
    let shards = names_in(root.path()).into_iter().filter(|name| name.contains(".safetensors."));
    let shards: Vec<String> = shards.collect();
    assert!(shards.len() == 1 && shards[0].starts_with("rank00000-0."), "{shards:?}");
    let error = Checkpoint::open(root.path()).unwrap_err().to_string();
    assert!(error.contains("of 2 ranks, rank 1 had not"), "{error}");
    drop(session);
}

#[test]
fn a_missing_shard_is_refused_and_its_rank_named() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 4, 1);
    fs::remove_file(root.path().join("rank00002-0.safetensors")).unwrap();
    let error = Checkpoint::open(root.path()).unwrap_err().to_string();
    assert!(error.contains("of rank 2, 4 ranks in all"), "{error}");
}

#[test]
fn two_sessions_in_one_directory_see_each_other() {
    let root = tempfile::tempdir().unwrap();
    let _session = Store::found().unwrap().begin(root.path(), 2).unwrap();
    assert!(matches!(Store::found().unwrap().begin(root.path(), 2), Err(Error::Busy { .. })));
}
