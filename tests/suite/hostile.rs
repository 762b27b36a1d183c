//! Damaged and impossible input: each a clear error, nothing lost, no litter.
#![cfg(unix)]

use crate::common::*;
use ringstow::internals::store;
use ringstow::{Checkpoint, Config, Dtype, Error, LoadOptions, Runtime, StateDict, Target, Value};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::Arc;

// ---- paths that hold no checkpoint ----

#[test]
fn an_empty_state_dict_is_a_checkpoint_like_any_other() {
    let root = scratch();
    let dir = root.path().join("empty");
    store().save(&StateDict::new(), &dir).unwrap();
    assert_eq!(load_all(&runtime(), &dir).unwrap().tensors().count(), 0);
    assert_eq!(Checkpoint::open(&dir).unwrap().state().unwrap(), Value::Dict(vec![]));
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());
    assert_no_litter(&dir);
}

#[test]
fn overflowing_shape_is_refused_by_name() {
    let mut state = StateDict::new();
    for shape in [&[1u64 << 40][..], &[u64::MAX, u64::MAX]] {
        let error = state.bytes("huge", Dtype::F32, shape, &[]).err().unwrap();
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert_says(&error, &["huge"]);
    }
}

#[test]
fn save_beside_foreign_files_is_refused_and_keeps_them() {
    let root = scratch();
    fs::write(root.path().join("model.safetensors"), "theirs").unwrap();
    let error = State::new(1, &SIZES).save(&runtime(), root.path()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert_says(&error, &["model.safetensors", "another directory"]);
    assert_eq!(names_in(root.path()), ["model.safetensors"]);
}

// ---- damaged shards ----

#[test]
fn shard_of_another_length_is_corrupt() {
    let (_root, dir) = saved();
    let bytes = fs::metadata(shard_of(&dir)).unwrap().len();
    for len in [0, 1, 4096, bytes - 1, bytes + 1, bytes + 4096] {
        fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap().set_len(len).unwrap();
        let error = load_error(&dir);
        assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
        assert_says(&error, &["rank00000-0.safetensors", &bytes.to_string(), &len.to_string()]);
        assert_says(&error, &["length"]);
        let report = ringstow::verify(&dir).unwrap();
        let damage = report.damage.iter().find(|one| one.what == "length in bytes").unwrap();
        assert_eq!((&damage.file, &*damage.got), (&shard_of(&dir), &*len.to_string()));
        let found = &ringstow::Store::found().unwrap().list(&dir).unwrap()[0];
        assert_eq!(found.status, ringstow::Status::Damaged);
    }
}

#[test]
fn damaged_block_fails_only_the_tensors_in_it() {
    let (_root, dir) = saved();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let begin = checkpoint.tensor("layer.2.weight").unwrap().chunks[0].begin;
    let file = fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap();
    file.write_all_at(b"rot", begin + 5000).unwrap();
    let runtime = runtime();
    let load = |name: &str, to: &mut [u8]| {
        let targets = [(name, Target::new(to))];
        checkpoint.load_into(&targets, on(&runtime))
    };
    let mut to = vec![0xAA; 12_288];
    assert!(matches!(load("layer.2.weight", &mut to), Err(Error::Corrupt { .. })));
    assert!(!to.windows(3).any(|bytes| bytes == b"rot"), "damaged bytes were handed out");
    let mut to = vec![0; 20_001];
    load("layer.3.weight", &mut to).unwrap();
    assert_eq!(to, State::new(1, &SIZES).tensors[3].1);
    let unchecked = LoadOptions { verify: false, ..LoadOptions::default() };
    let loaded =
        checkpoint.load_names(["layer.2.weight"], unchecked.on(&runtime, &Arc::default())).unwrap();
    assert_eq!(&loaded.tensor("layer.2.weight").unwrap().data()[5000..5003], b"rot");
}

#[test]
fn link_at_an_uncommitted_path_is_not_followed() {
    let (root, dir) = saved();
    let victim = root.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for name in ["rank00000-0.g1.safetensors.part", "manifest.json.part"] {
        symlink(&victim, dir.join(name)).unwrap();
    }
    // A link there is litter of ours by its name, and goes, itself and not what it points to.
    let after = State::new(2, &SIZES);
    after.save(&runtime(), &dir).unwrap();
    after.assert_at(&runtime(), &dir);
    assert_no_litter(&dir);
    assert_eq!(fs::read(victim).unwrap(), b"precious");
}

#[test]
fn load_reads_blocks_larger_than_its_buffers() {
    let root = scratch();
    let config = Config { block_bytes: 1 << 20, pool_bytes: 4 << 20, ..Config::default() };
    let state = State::new(1, &[3_000_000, 5]);
    state.save(&Runtime::new(config).unwrap(), root.path()).unwrap();
    let runtime = runtime();
    state.assert_at(&runtime, root.path());
    assert_undamaged(&runtime, root.path());
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let mut to = vec![0; 3_000_000];
    let targets = [("layer.0.weight", Target::new(&mut to))];
    checkpoint.load_into(&targets, on(&runtime)).unwrap();
    assert_eq!(to, state.tensors[0].1);
}

// ---- directories that lead around in circles, and files that are none ----

#[test]
fn links_that_lead_back_are_not_followed_for_ever() {
    let root = scratch();
    let whole = root.path().join("step-1");
    fs::create_dir_all(whole.join("rank00000")).unwrap();
    fs::write(whole.join("rank00000/rank00000-0.safetensors.part"), "half").unwrap();
    for number in 0..10 {
        symlink(".", whole.join(format!("link-{number}"))).unwrap();
    }
    assert_eq!(ringstow::latest(root.path()).unwrap(), None);
    assert!(matches!(load_error(&whole), Error::NotCommitted { .. }));
    ringstow::prune(root.path()).unwrap();
    assert_eq!(names_in(&whole).len(), 10, "the part is gone, the links are not ours");
}

#[test]
fn index_of_endless_length_is_refused_unread() {
    let root = scratch();
    let index = root.path().join("model.safetensors.index.json.part");
    fs::File::create(&index).unwrap().set_len(1 << 40).unwrap();
    let mut state = StateDict::new();
    state.bytes("t", Dtype::U8, &[3], b"abc").unwrap();
    let error = store::export(&runtime(), &state, root.path(), &Arc::default()).unwrap_err();
    assert_says(&error, &["index.json.part", "1099511627776 bytes"]);
}

#[test]
fn a_pipe_in_the_place_of_a_file_holds_nobody_up() {
    let (root, dir) = saved();
    let pipe = |path: &Path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    pipe(&dir.join(".metadata"));
    ringstow::remove(&dir, ringstow::Disposal::Remove).unwrap();
    assert_eq!(names_in(&dir), [".metadata"], "it is somebody's");
    let model = root.path().join("model");
    fs::create_dir(&model).unwrap();
    pipe(&model.join("model.safetensors.index.json.part"));
    let mut state = StateDict::new();
    state.bytes("t", Dtype::U8, &[3], b"abc").unwrap();
    let error = store::export(&runtime(), &state, &model, &Arc::default()).unwrap_err();
    assert_says(&error, &["model.safetensors.index.json.part", "not a regular file"]);
}
