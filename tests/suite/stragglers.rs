//! Two processes write as one rank: an old incarnation that nobody stopped, or a retry. Whatever the
//! older write still does, the checkpoint is the newer one's, byte by byte.

use crate::common::held::HeldUp;
use crate::common::{assert_says, names_in, no_values, noise, store};
use ringstow::{Checkpoint, Dtype, Receipt, SaveReport, StateDict, Store};
use serde_json::value::RawValue;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Bytes of a rank's tensor.
const BYTES: usize = <HeldUp>::BYTES;

/// A write of rank 0 that stands still.
fn straggler(dir: &Path, fails: bool) -> HeldUp<(Receipt, SaveReport)> {
    let store = store();
    HeldUp::start(1, fails, |state| store.write_rank_async(state, 0, dir).unwrap())
}

fn write(dir: &Path, rank: u32, seed: u64) -> Receipt {
    let (name, bytes) = (if rank == 0 { "t" } else { "u" }, noise(seed, BYTES));
    let mut state = StateDict::new();
    state.bytes(name, Dtype::U8, &[BYTES as u64], &bytes).unwrap();
    store().write_rank(&state, rank, dir).unwrap().0
}

fn tree() -> Box<RawValue> {
    no_values()
}

#[track_caller]
fn assert_holds(dir: &Path, seed: u64) {
    let report = ringstow::verify(dir).unwrap();
    assert!(report.damage.is_empty(), "{:?}", report.damage);
    let loaded = ringstow::load(dir).unwrap();
    assert!(loaded.tensor("t").unwrap().data() == noise(seed, BYTES), "another write's bytes");
}

#[test]
fn straggler_cannot_write_into_a_newer_writes_files() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let old = straggler(root.path(), false);
    let receipt = write(root.path(), 0, 5);
    session.commit(vec![receipt], tree()).unwrap();
    let error = old.end().unwrap_err();
    assert_says(&error, &["rank 0", "another write of this rank took over"]);
    assert_holds(root.path(), 5);
    assert_eq!(names_in(root.path()), ["manifest.json", "rank00000-0.safetensors"]);
}

#[test]
fn failing_straggler_removes_nothing_of_a_newer_write() {
    let root = tempfile::tempdir().unwrap();
    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let old = straggler(root.path(), true);
    let receipt = write(root.path(), 0, 5);
    assert!(old.end().is_err());
    session.commit(vec![receipt], tree()).unwrap();
    assert_holds(root.path(), 5);
}

#[test]
fn straggler_does_not_count_in_a_later_session() {
    let root = tempfile::tempdir().unwrap();
    let given_up = Store::found().unwrap().begin(root.path(), 2).unwrap();
    let old = straggler(root.path(), false);
    drop(given_up);
    let session = Store::found().unwrap().begin(root.path(), 2).unwrap();
    let receipt = write(root.path(), 1, 6);
    assert!(old.end().is_err());
    assert!(!root.path().join("rank00000.done.part").exists());
    let again = write(root.path(), 0, 5);
    session.commit(vec![receipt, again], tree()).unwrap();
    assert_holds(root.path(), 5);
}

/// Each write has its own files, and so has each session: even with every file that it wrote in place, an
/// older receipt is no part of a newer checkpoint.
#[test]
fn a_receipt_of_an_earlier_session_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let given_up = Store::found().unwrap().begin(root.path(), 1).unwrap();
    let old = write(root.path(), 0, 5);
    let kept: Vec<_> = names_in(root.path())
        .into_iter()
        .filter(|name| name.starts_with("rank"))
        .map(|name| (root.path().join(&name), fs::read(root.path().join(&name)).unwrap()))
        .collect();
    drop(given_up);
    let session = Store::found().unwrap().begin(root.path(), 1).unwrap();
    kept.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    let error = session.commit(vec![old], tree()).unwrap_err();
    assert_says(&error, &["receipt of rank 0", "earlier save"]);
    assert!(Checkpoint::open(root.path()).is_err());
}

#[test]
fn a_rank_writes_only_after_its_coordinator_has_begun() {
    let root = tempfile::tempdir().unwrap();
    let mut state = StateDict::new();
    state.bytes("t", Dtype::U8, &[3], b"abc").unwrap();
    for dir in [root.path().to_path_buf(), root.path().join("not/there")] {
        let error = store().write_rank(&state, 0, &dir).unwrap_err();
        assert_says(&error, &["Session", "before any rank writes"]);
    }
    assert!(names_in(root.path()).is_empty(), "it leaves nothing");
}

/// What somebody with access to the directory links there is never written through.
#[test]
fn planted_links_are_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step");
    let victim = root.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let plant = |name: &str| {
        let _ = fs::remove_file(dir.join(name));
        symlink(&victim, dir.join(name)).unwrap();
    };
    fs::create_dir(&dir).unwrap();
    plant("manifest.json.part");
    let session = Store::found().unwrap().begin(&dir, 1).unwrap();
    plant("rank00000.done.part");
    plant("rank00000-0.safetensors.part");
    let receipt = write(&dir, 0, 5);
    plant("manifest.json.part");
    fs::remove_file(dir.join("rank00000-0.safetensors.part")).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    session.commit(vec![receipt], tree()).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert_holds(&dir, 5);

    // Nor is a file written into that has another name elsewhere.
    let linked = root.path().join("linked");
    fs::create_dir(&linked).unwrap();
    let copy = linked.join("manifest.json.part");
    fs::hard_link(&victim, &copy).unwrap();
    let session = Store::found().unwrap().begin(&linked, 1).unwrap();
    let receipt = write(&linked, 0, 5);
    session.commit(vec![receipt], tree()).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}
