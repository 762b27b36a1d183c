//! What an export writes, and what a killed or failed one leaves.

use super::*;
use crate::format::Dtype;
use crate::sys::dir::{file_names, remove};
use crate::sys::seam::{Call, fail_call};
use crate::{Config, Error};
use serde_json::json;
use std::fs;

fn runtime(shard_bytes: u64) -> Arc<Runtime> {
    let config = Config { block_bytes: 8192, pool_bytes: 65536, shard_bytes, ..Config::default() };
    Runtime::new(config).unwrap().into()
}

fn weights(state: &mut StateDict<'static>) {
    static BYTES: [u8; 40_000] = [7; 40_000];
    for name in ["a", "b", "c"] {
        state.bytes(name, Dtype::F32, &[100, 100], &BYTES).unwrap();
    }
}

fn present(dir: &Path) -> Vec<String> {
    file_names(dir).unwrap()
}

fn export_to(dir: &Path, shard_bytes: u64) -> Result<SaveReport> {
    let mut state = StateDict::new();
    weights(&mut state);
    export(&runtime(shard_bytes), &state, dir, &Arc::default())
}

#[test]
fn small_model_is_one_file_that_any_reader_reads() {
    let dir = tempfile::tempdir().unwrap();
    let report = export_to(&dir.path().join("new"), 0).unwrap();
    assert_eq!((report.files, report.tensors), (1, 3));
    assert_eq!(present(&report.path), ["model.safetensors"]);
    let bytes = fs::read(report.path.join("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("b").unwrap().data(), [7; 40_000]);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = metadata.metadata().as_ref().unwrap();
    assert_eq!(metadata.len(), 1);
    assert_eq!(metadata["format"], "pt");
}

#[test]
fn large_model_is_several_files_and_an_index() {
    let dir = tempfile::tempdir().unwrap();
    export_to(dir.path(), 90_000).unwrap();
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(present(dir.path()), [files[0], files[1], names::MODEL_INDEX]);
    let index = fs::read(dir.path().join(names::MODEL_INDEX)).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 120_000);
    assert_eq!(index["weight_map"], json!({ "a": files[0], "b": files[0], "c": files[1] }));
    for (name, file) in index["weight_map"].as_object().unwrap() {
        let bytes = fs::read(dir.path().join(file.as_str().unwrap())).unwrap();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor(name).unwrap().shape(), [100, 100]);
    }
}

#[test]
fn nothing_is_written_beside_other_tensors() {
    for name in ["model.safetensors", "other.safetensors", names::MODEL_INDEX, names::MANIFEST] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), "theirs").unwrap();
        let error = export_to(dir.path(), 0).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert_eq!(present(dir.path()), [name]);
        assert_eq!(fs::read(dir.path().join(name)).unwrap(), b"theirs");
    }
}

#[test]
fn export_removes_what_a_killed_one_left() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model-00003-of-00009.safetensors.part"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    export_to(dir.path(), 0).unwrap();
    assert_eq!(present(dir.path()), ["config.json", "model.safetensors"]);
}

/// The states that a kill during `publish` can leave: the first `renamed` files have their names.
fn killed_export(dir: &Path, renamed: usize) {
    export_to(dir, 90_000).unwrap();
    let files = present(dir);
    for name in files.iter().skip(renamed) {
        fs::rename(dir.join(name), dir.join(names::uncommitted(name))).unwrap();
    }
}

#[test]
fn killed_export_is_refused_by_loads_and_cleared_by_the_next_export() {
    for renamed in 0..=2 {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        let to = dir.path().join("model");
        killed_export(&to, renamed);
        let error = crate::OpenOptions::new().foreign(true).open(&to).unwrap_err();
        assert!(
            matches!(error, Error::NotCommitted { .. } | Error::MissingFiles { .. }),
            "{renamed} renamed: {error}"
        );
        assert!(error.to_string().contains(".part"), "{error}");
        export_to(&to, 0).unwrap();
        assert_eq!(present(&to), ["model.safetensors"]);
        crate::OpenOptions::new().foreign(true).open(&to).unwrap();
    }
}

/// A failed export may be killed while it removes what it wrote.
#[test]
fn export_rolled_back_in_part_is_cleared_by_the_next_export() {
    use crate::sys::seam::{Call, Outcome, on_thread};
    // The index cannot get its name, or its name cannot be made durable.
    for fails in [Call::Rename, Call::Sync] {
        for removals in 0..6 {
            let dir = tempfile::tempdir().unwrap();
            let (part, index) = (names::uncommitted(names::MODEL_INDEX), names::MODEL_INDEX);
            let [part, index] = [&*part, index].map(|name| dir.path().join(name));
            let mut left = removals;
            let killed = on_thread(move |_, call, on| match call {
                Call::Rename if fails == call && on == part => Outcome::Fail(5),
                Call::Sync if fails == call && index.exists() => Outcome::Fail(5),
                Call::Remove if left == 0 => Outcome::Fail(5),
                Call::Remove => {
                    left -= 1;
                    Outcome::Pass
                }
                _ => Outcome::Pass,
            });
            export_to(dir.path(), 90_000).unwrap_err();
            drop(killed);
            assert!(crate::OpenOptions::new().foreign(true).open(dir.path()).is_err());
            export_to(dir.path(), 0).unwrap();
            assert_eq!(present(dir.path()), ["model.safetensors"], "{fails:?}, {removals}");
        }
    }
}

#[test]
fn export_on_a_shared_file_system_claims_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let _played = crate::sys::file_system::play(dir.path(), "nfs4", "nolock");
    let to = dir.path().join("model");
    export_to(&to, 0).unwrap();
    // A host with an old listing does not see the model.
    remove(&to.join("model.safetensors")).unwrap();
    let before = present(&to);
    let error = export_to(&to, 90_000).unwrap_err();
    let claim = to.join(names::MODEL_CLAIM);
    assert!(error.to_string().contains(&*claim.to_string_lossy()), "{error}");
    assert!(error.to_string().contains("and no export is running"), "{error}");
    assert_eq!(present(&to), before);
    // A failed export leaves no claim.
    fs::remove_dir_all(&to).unwrap();
    let part = to.join("model.safetensors.part");
    let failing = fail_call(Call::Rename, &part, nix::libc::EIO);
    assert!(export_to(&to, 0).is_err());
    drop(failing);
    export_to(&to, 0).unwrap();
}

#[test]
fn claim_of_a_killed_export_is_named_as_such_where_locks_show_that() {
    let dir = tempfile::tempdir().unwrap();
    let _played = crate::sys::file_system::play(dir.path(), "nfs4", "local_lock=none");
    fs::write(dir.path().join(names::MODEL_CLAIM), "").unwrap();
    let error = export_to(dir.path(), 0).unwrap_err().to_string();
    assert!(error.contains("none is exporting there now"), "{error}");
    assert!(!error.contains("no export is running"), "{error}");
}

#[test]
fn export_keeps_numbered_files_without_a_part_index() {
    let dir = tempfile::tempdir().unwrap();
    killed_export(dir.path(), 1);
    remove(&dir.path().join(names::uncommitted(names::MODEL_INDEX))).unwrap();
    let error = export_to(dir.path(), 0).unwrap_err();
    assert!(error.to_string().contains("model-00001-of-00002.safetensors"), "{error}");
}

#[test]
fn export_refuses_dtypes_that_safetensors_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("new");
    for (name, dtype) in [("spectrum", Dtype::C128), ("__metadata__", Dtype::F64)] {
        let mut state = StateDict::new();
        state.bytes(name, dtype, &[0], &[]).unwrap();
        let error = export(&runtime(0), &state, &to, &Arc::default()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
        assert!(error.to_string().contains(name), "{error}");
        assert!(!to.exists());
    }
}

/// A disk that dies at the last sync lets nobody take back the model that is there by then.
#[test]
fn an_export_whose_last_sync_fails_leaves_nothing_or_says_that_the_model_is_there() {
    use crate::sys::seam::{Call, Outcome, on_thread};
    for (shard_bytes, last) in [(0, "model.safetensors"), (90_000, names::MODEL_INDEX)] {
        for is_dead in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let to = root.path().join("new");
            let published = to.join(last);
            let _failing = on_thread(move |_, call, _| match call {
                Call::Sync if published.exists() => Outcome::Fail(5),
                Call::Rename if is_dead && published.exists() => Outcome::Fail(5),
                _ => Outcome::Pass,
            });
            let error = export_to(&to, shard_bytes).unwrap_err();
            assert_eq!(error.io_error().and_then(std::io::Error::raw_os_error), Some(5));
            assert_eq!(matches!(error, Error::NotDurable { .. }), is_dead, "{error}");
            assert_eq!(to.exists(), is_dead, "{error}");
            if is_dead {
                assert!(error.to_string().contains("may not survive a crash"), "{error}");
                crate::OpenOptions::new().foreign(true).open(&to).unwrap();
                assert!(!present(&to).iter().any(|name| name.ends_with(".part")));
            }
        }
    }
}

#[test]
fn a_cancelled_export_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = StateDict::new();
    weights(&mut state);
    let job = Arc::<Job>::default();
    job.cancel();
    let error = export(&runtime(0), &state, &dir.path().join("new"), &job).unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }));
    assert!(!dir.path().join("new").exists());
}
