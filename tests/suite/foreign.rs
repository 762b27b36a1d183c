//! Directories of safetensors files without a manifest: those of others are opened by their
//! headers, damaged, partial and ringstow's own uncommitted ones are refused.
#![cfg(unix)]

use crate::common::*;
use ringstow::{
    Checkpoint, CheckpointKind, Error, LoadOptions, OpenOptions, Runtime, Slice, StridedTarget,
};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// A tensor in a file: name, offsets (none: whole), sizes, and its U16 elements.
type Part<'a> = (&'a str, Option<&'a [u64]>, &'a [u64], &'a [u16]);

fn file(parts: &[Part], notes: &[(&str, &str)]) -> Vec<u8> {
    let (mut header, mut sharding) = (serde_json::Map::new(), serde_json::Map::new());
    let mut data = Vec::new();
    for (name, offsets, sizes, elements) in parts {
        let begin = data.len();
        data.extend(elements.iter().flat_map(|e| e.to_le_bytes()));
        let entry = serde_json::json!({
            "dtype": "U16", "shape": sizes, "data_offsets": [begin, data.len()],
        });
        header.insert((*name).into(), entry);
        if let Some(offsets) = offsets {
            sharding.insert((*name).into(), serde_json::json!({ "saved_offsets": offsets }));
        }
    }
    let mut metadata = serde_json::Map::new();
    if !sharding.is_empty() {
        let text = serde_json::Value::from(sharding).to_string();
        metadata.insert("DCP_SHARDING_INFO".into(), text.into());
    }
    for (key, value) in notes {
        metadata.insert((*key).into(), (*value).into());
    }
    header.insert("__metadata__".into(), metadata.into());
    let header = serde_json::Value::from(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

fn runtime() -> Arc<Runtime> {
    Runtime::shared(&small_config()).unwrap()
}

/// Two ranks' halves of a matrix, one of them with a bias.
fn sharded(dir: &Path) {
    let first = file(&[("w", Some(&[0, 0]), &[2, 3], &[0, 1, 2, 3, 4, 5])], &[]);
    let second = file(
        &[("w", Some(&[2, 0]), &[1, 3], &[6, 7, 8]), ("b", None, &[2], &[40, 41])],
        &[("format", "pt")],
    );
    fs::write(dir.join("shard-00001-model-00001-of-00001.safetensors"), first).unwrap();
    fs::write(dir.join("shard-00002-model-00001-of-00001.safetensors"), second).unwrap();
}

#[track_caller]
fn refused(dir: &Path) -> Error {
    OpenOptions::new().foreign(true).open(dir).unwrap_err()
}

#[test]
fn sharded_foreign_files_load_unverified() {
    let root = scratch();
    sharded(root.path());
    let checkpoint = OpenOptions::new().foreign(true).open(root.path()).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Safetensors);
    let options = LoadOptions::default();
    let loaded =
        checkpoint.load_names(["b", "w"], options.on(&runtime(), &Arc::default())).unwrap();
    assert_eq!(loaded.tensor("w").unwrap().shape(), [3, 3]);
    assert_eq!(loaded.tensor("w").unwrap().as_slice::<u16>().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(loaded.tensor("b").unwrap().as_slice::<u16>().unwrap(), [40, 41]);
    assert!(!loaded.report.verified);

    let mut column = [0u8; 4];
    let to = StridedTarget::new(&mut column, 0, &[2, 2]);
    let slice = Slice { name: "w", chunk: 0, offsets: &[0, 1], lengths: &[2, 1], to };
    let report = checkpoint.read(&[slice], options.on(&runtime(), &Arc::default())).unwrap();
    assert_eq!(column, [1, 0, 4, 0]);
    assert!(!report.verified);
    // Without being asked to, nothing foreign is opened.
    assert!(matches!(Checkpoint::open(root.path()), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn unaligned_data_is_returned_aligned() {
    for padding in ["", "x"] {
        let root = scratch();
        let bytes = file(&[("w", None, &[3], &[1, 2, 3])], &[("note", padding)]);
        fs::write(root.path().join("m.safetensors"), bytes).unwrap();
        let checkpoint = OpenOptions::new().foreign(true).open(root.path()).unwrap();
        let (options, job) = (LoadOptions::default(), Arc::default());
        let loaded = checkpoint.load_names(["w"], options.on(&runtime(), &job)).unwrap();
        assert_eq!(loaded.tensor("w").unwrap().as_slice::<u16>().unwrap(), [1, 2, 3]);
    }
}

#[test]
fn ringstows_own_checkpoints_are_opened_as_ever() {
    let root = scratch();
    State::new(1, &[5000]).save(&runtime(), root.path()).unwrap();
    assert_eq!(
        OpenOptions::new().foreign(true).open(root.path()).unwrap().kind(),
        CheckpointKind::Ringstow
    );
    fs::remove_file(root.path().join("manifest.json")).unwrap();
    let error = refused(root.path());
    assert!(matches!(error, Error::NotCommitted { .. }), "{error:?}");
    assert_says(&error, &["rank00000-0.safetensors", "manifest.json"]);
    let (shard, other) = ("rank00000-0.safetensors", "model.safetensors");
    fs::rename(root.path().join(shard), root.path().join(other)).unwrap();
    assert_says(&refused(root.path()), &["model.safetensors", "ringstow"]);
    let part = "rank00000-0.safetensors.part";
    fs::rename(root.path().join(other), root.path().join(part)).unwrap();
    assert_says(&refused(root.path()), &["uncommitted"]);
}

#[test]
fn an_index_says_what_must_be_there_and_what_counts() {
    let root = scratch();
    let at = |name: &str| root.path().join(name);
    let index = |map: &str| {
        let text = format!("{{\"metadata\":{{}},\"weight_map\":{map}}}");
        fs::write(at("model.safetensors.index.json"), text).unwrap();
    };
    fs::write(at("model-1.safetensors"), file(&[("a", None, &[1], &[1])], &[])).unwrap();
    fs::write(at("model-2.safetensors"), file(&[("b", None, &[1], &[2])], &[])).unwrap();
    fs::write(at("consolidated.safetensors"), file(&[("a", None, &[1], &[9])], &[])).unwrap();
    index(r#"{"a":"model-1.safetensors","b":"model-2.safetensors"}"#);
    let checkpoint = OpenOptions::new().foreign(true).open(root.path()).unwrap();
    let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);

    index(r#"{"a":"model-1.safetensors","b":"model-3.safetensors"}"#);
    let error = refused(root.path());
    assert!(matches!(error, Error::MissingFiles { .. }), "{error:?}");
    assert_says(&error, &["model-3.safetensors"]);
    index(r#"{"a":"model-1.safetensors","c":"model-2.safetensors"}"#);
    assert_says(&refused(root.path()), &["1 tensor(s)", ": c; download"]);
    index(r#"{"a":"../model-1.safetensors"}"#);
    assert!(matches!(refused(root.path()), Error::Format { .. }));
    fs::write(at("model.safetensors.index.json"), "[]").unwrap();
    assert!(matches!(refused(root.path()), Error::Format { .. }));
}

#[test]
fn a_file_and_an_index_are_opened_by_themselves() {
    let root = scratch();
    let at = |name: &str| root.path().join(name);
    fs::write(at("x.safetensors"), file(&[("a", None, &[1], &[1])], &[])).unwrap();
    fs::write(at("y.safetensors"), file(&[("b", None, &[1], &[2])], &[])).unwrap();
    let index = at("other.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"a":"x.safetensors","b":"y.safetensors"}}"#).unwrap();
    let names = |path: &Path| {
        let opened = OpenOptions::new().foreign(true).open(path).unwrap();
        opened.tensors().iter().map(|t| t.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&at("y.safetensors")), ["b"]);
    assert_eq!(names(&index), ["a", "b"]);
    let shard = at("rank00000-0.safetensors");
    fs::rename(at("x.safetensors"), &shard).unwrap();
    let error = refused(&shard);
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert_says(&error, &["one file of a ringstow checkpoint", "load "]);
    // A file that holds a region alone is no whole tensor.
    fs::write(at("y.safetensors"), file(&[("b", Some(&[1]), &[1], &[2])], &[])).unwrap();
    assert!(matches!(refused(&at("y.safetensors")), Error::MissingFiles { .. }));
    fs::write(at("notes.txt"), "x").unwrap();
    assert!(matches!(refused(&at("notes.txt")), Error::Io { .. }));
}

#[test]
fn the_files_that_from_pretrained_takes_are_read() {
    let root = scratch();
    let put = |name: &str, element: u16| {
        let bytes = file(&[("w", None, &[1], &[element])], &[]);
        fs::write(root.path().join(name), bytes).unwrap();
    };
    let taken = || {
        let opened = OpenOptions::new().foreign(true).open(root.path()).unwrap();
        let loaded = opened.load_names(["w"], on(&runtime())).unwrap();
        loaded.tensor("w").unwrap().as_slice::<u16>().unwrap()[0]
    };
    put("model.fp16.safetensors", 1);
    assert_eq!(taken(), 1);
    put("model.safetensors", 2);
    put("consolidated.safetensors", 3);
    assert_eq!(taken(), 2);
    fs::remove_file(root.path().join("model.safetensors")).unwrap();
    put("model.bf16.safetensors", 4);
    let error = refused(root.path());
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert_says(&error, &["bf16, fp16", "model.fp16.safetensors"]);
    fs::write(root.path().join("pytorch_model.bin"), "x").unwrap();
    assert_says(&refused(root.path()), &["pytorch_model.bin", "ringstow.load in Python"]);
}

#[test]
fn an_index_of_an_earlier_save_is_told_or_its_places_do_not_count() {
    let root = scratch();
    let at = |name: &str| root.path().join(name);
    let put = |name: &str, tensors: &[(&str, u16)]| {
        let parts: Vec<[u16; 1]> = tensors.iter().map(|(_, element)| [*element]).collect();
        let parts: Vec<Part> = tensors
            .iter()
            .zip(&parts)
            .map(|((name, _), one)| (*name, None, &[1][..], &one[..]))
            .collect();
        fs::write(at(name), file(&parts, &[])).unwrap();
    };
    put("m-1.safetensors", &[("a", 1)]);
    put("m-2.safetensors", &[("b", 2), ("c", 3)]);
    let index = at("model.safetensors.index.json");
    let map =
        r#"{"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}"#;
    fs::write(&index, map).unwrap();
    let opened = OpenOptions::new().foreign(true).open(root.path()).unwrap();
    let options = LoadOptions::default();
    let loaded =
        opened.load_names(["a", "b", "c"], options.on(&runtime(), &Arc::default())).unwrap();
    for (name, element) in [("a", 1), ("b", 2), ("c", 3)] {
        assert_eq!(loaded.tensor(name).unwrap().as_slice::<u16>().unwrap(), [element], "{name}");
    }
    // Of two copies the last counts, as for programs that read one file after the other.
    put("m-1.safetensors", &[("a", 1), ("c", 9)]);
    let opened = OpenOptions::new().foreign(true).open(root.path()).unwrap();
    let loaded = opened.load_names(["c"], options.on(&runtime(), &Arc::default())).unwrap();
    assert_eq!(loaded.tensor("c").unwrap().as_slice::<u16>().unwrap(), [3]);
    put("model.fp16.safetensors", &[("a", 7)]);
    fs::remove_file(at("m-1.safetensors")).unwrap();
    let error = refused(root.path());
    assert!(matches!(error, Error::MissingFiles { .. }), "{error:?}");
    assert_says(&error, &["m-1.safetensors"]);
    assert!(!error.to_string().contains("move it away"), "a variant is no newer save: {error}");
    put("model-00001-of-00001.safetensors", &[("a", 7)]);
    assert_says(
        &refused(root.path()),
        &["model-00001-of-00001", "the index is of an earlier save"],
    );
}

#[test]
fn a_pointer_of_git_lfs_is_called_one() {
    let root = scratch();
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n";
    fs::write(root.path().join("model.safetensors"), text).unwrap();
    let error = refused(root.path());
    assert!(matches!(error, Error::MissingFiles { .. }), "{error:?}");
    assert_says(&error, &["model.safetensors", "git lfs pull"]);
}

#[test]
fn a_tensor_of_which_a_part_is_missing_is_named() {
    let root = scratch();
    let part = |offsets, elements| file(&[("w", Some(offsets), &[1, 3], elements)], &[]);
    fs::write(root.path().join("x-1.safetensors"), part(&[0, 0], &[1, 2, 3])).unwrap();
    fs::write(root.path().join("x-3.safetensors"), part(&[2, 0], &[7, 8, 9])).unwrap();
    let error = refused(root.path());
    assert!(matches!(error, Error::MissingFiles { .. }), "{error:?}");
    assert_says(&error, &["\"w\"", "12 of 18 bytes", "[1, 3] at [1, 0]"]);
    fs::write(root.path().join("x-2.safetensors"), part(&[1, 0], &[4, 5, 6])).unwrap();
    assert!(OpenOptions::new().foreign(true).open(root.path()).is_ok());
    fs::write(root.path().join("x-4.safetensors"), part(&[1, 0], &[4, 5, 6])).unwrap();
    let error = refused(root.path());
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    assert_says(&error, &["\"w\"", "overlap"]);
}

#[test]
fn other_files_are_refused_with_the_reason() {
    let good = file(&[("w", None, &[3], &[1, 2, 3])], &[]);
    let after = |bytes: &[u8]| {
        let root = scratch();
        fs::write(root.path().join("m.safetensors"), bytes).unwrap();
        let error = refused(root.path());
        assert_says(&error, &["m.safetensors"]);
        error
    };
    assert!(matches!(after(&good[..good.len() - 1]), Error::Corrupt { .. }));
    assert!(matches!(after(&[&good[..], b"x"].concat()), Error::Corrupt { .. }));
    assert!(matches!(after(b""), Error::Corrupt { .. }));
    assert!(matches!(after(&good[..20]), Error::Corrupt { .. }));
    assert!(matches!(after(&[0xff; 64]), Error::Format { .. }));
    assert!(matches!(
        after(&[&8u64.to_le_bytes()[..], b"not json"].concat()),
        Error::Format { .. }
    ));
    for (from, to) in [("[0,6]", "[0,7]"), ("[0,6]", "[1,6]"), ("[3]", "[4]"), ("U16", "Q16")] {
        let text = String::from_utf8_lossy(&good).replace(from, to);
        assert!(matches!(after(text.as_bytes()), Error::Format { .. }), "{from} {to}");
    }
    let noted = |info: &str| file(&[("w", None, &[3], &[1, 2, 3])], &[("DCP_SHARDING_INFO", info)]);
    assert!(matches!(after(&noted("{")), Error::Format { .. }));
    for offsets in ["[0,0]", "[18446744073709551615]"] {
        let info = format!("{{\"w\":{{\"saved_offsets\":{offsets}}}}}");
        assert_says(&after(&noted(&info)), &["\"w\""]);
    }
}

#[test]
fn empty_directories_are_refused() {
    let root = scratch();
    assert!(matches!(refused(root.path()), Error::NoCheckpoint { .. }));
    assert!(matches!(refused(&root.path().join("absent")), Error::Io { .. }));
    let long = root.path().join(format!("{}.safetensors", "x".repeat(200)));
    fs::write(&long, file(&[("w", None, &[1], &[1])], &[])).unwrap();
    assert!(matches!(refused(root.path()), Error::Format { .. }));
    fs::remove_file(long).unwrap();
    fs::write(root.path().join("._hidden.safetensors"), "no safetensors").unwrap();
    assert!(matches!(refused(root.path()), Error::NoCheckpoint { .. }));
}
