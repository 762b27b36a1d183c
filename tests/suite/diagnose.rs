//! What opening a path that is no checkpoint says: what is there, and what reads it.
#![cfg(unix)]

use crate::common::*;
use nix::libc;
use ringstow::{Error, OpenOptions, StateDict};
use std::fs;
use std::path::{Path, PathBuf};

fn error_of(path: &Path) -> Error {
    ringstow::load(path).unwrap_err()
}

fn save(path: PathBuf) -> PathBuf {
    let mut state = StateDict::new();
    state.value("step", 1);
    store().save(&state, &path).unwrap();
    path
}

/// Names and contents of files, and what the error says.
type Case<'a> = (&'a [(&'a str, &'a [u8])], &'a [&'a str]);

/// A directory of files of these names and contents.
fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let root = scratch();
    for (name, bytes) in files {
        fs::write(root.path().join(name), bytes).unwrap();
    }
    root
}

#[test]
fn opening_a_run_directory_names_the_newest_checkpoint() {
    let root = scratch();
    save(root.path().join("step-1"));
    save(root.path().join("a-2"));
    let error = error_of(root.path());
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error:?}");
    assert_says(&error, &["directory of checkpoints", "a-2", "`latest`", "`ringstow ls`"]);
    assert_says(
        &OpenOptions::new().foreign(true).open(root.path()).unwrap_err(),
        &["directory of checkpoints"],
    );
}

#[test]
fn a_save_where_a_file_is_says_so_and_leaves_the_file() {
    let root = directory(&[("model.pt", b"PK\x03\x04")]);
    let file = root.path().join("model.pt");
    let state = StateDict::new();
    let save = |path: &Path| ringstow::save(&state, path).unwrap_err();
    assert_says(&save(&file), &["a file has this name", "choose another name"]);
    let said = ["`model.pt` in this path is a file", "choose another directory"];
    assert_says(&save(&file.join("run/step-1")), &said);
    assert_eq!(fs::read(&file).unwrap(), b"PK\x03\x04");
    assert_eq!(names_in(root.path()), ["model.pt"]);
}

#[test]
fn a_list_of_a_file_says_what_the_file_is() {
    let root = directory(&[("model.pt", b"PK\x03\x04"), ("notes.txt", b"mine")]);
    let steps = |name: &str| ringstow::steps(root.path().join(name)).unwrap_err();
    assert_says(&steps("model.pt"), &["a file of torch.save"]);
    assert_says(&steps("notes.txt"), &["a checkpoint is a directory"]);
    let gone =
        ringstow::Store::found().unwrap().list(root.path().join("gone")).unwrap_err().to_string();
    assert!(!gone.contains("was saved there"), "{gone}");
}

/// What has a manifest's name, and is none: another program's, damaged, a directory.
fn no_checkpoints(dir: &Path) {
    for name in ["step-7", "step-8", "step-9"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    fs::write(dir.join("step-7/manifest.json"), r#"{"name": "my web app"}"#).unwrap();
    fs::write(dir.join("step-8/manifest.json"), [0; 100]).unwrap();
    fs::create_dir(dir.join("step-9/manifest.json")).unwrap();
}

#[test]
fn hints_name_committed_checkpoints_alone() {
    let root = scratch();
    no_checkpoints(root.path());
    let [run, gone] = ["", "gone"].map(|name| root.path().join(name));
    for path in [&run, &gone] {
        let said = error_of(path).to_string();
        assert!(!said.contains("step-"), "{said}");
    }
    let file = root.path().join("step-7/manifest.json");
    assert_says(&error_of(&file), &["a checkpoint is a directory"]);
    // One that was committed before those were written.
    let step = save(root.path().join("step-1"));
    let manifest = fs::File::open(step.join("manifest.json")).unwrap();
    manifest.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    for path in [&run, &gone] {
        assert_says(&error_of(path), &["step-1"]);
    }
}

#[test]
fn another_programs_manifest_makes_no_checkpoint() {
    let root = directory(&[("manifest.json", br#"{"name": "my web app"}"#)]);
    let app = root.path().join("app");
    fs::create_dir(&app).unwrap();
    fs::copy(root.path().join("manifest.json"), app.join("manifest.json")).unwrap();
    assert_eq!(ringstow::latest(root.path()).unwrap(), None);
    for dir in [root.path(), &app] {
        let error = error_of(dir);
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error:?}");
        assert_says(&error, &["manifest.json is another program's"]);
    }

    let step = save(root.path().join("step-1"));
    let retained = ringstow::retain(root.path(), 1, ringstow::Disposal::Remove).unwrap();
    assert!(retained.left.is_empty() && retained.kept == [step.clone()], "{retained:?}");
    let found = ringstow::Store::found().unwrap().list(root.path()).unwrap();
    assert!(found.iter().map(|found| &found.path).eq([&step]), "{found:?}");
    assert_says(&error_of(root.path()), &["another program's", "step-1"]);

    // Beside a shard, it has replaced ringstow's own.
    fs::copy(root.path().join("manifest.json"), step.join("manifest.json")).unwrap();
    fs::write(step.join("rank00000-0.safetensors"), "").unwrap();
    assert!(matches!(error_of(&step), Error::Format { .. } | Error::Corrupt { .. }));
    assert!(ringstow::latest(root.path()).is_err());
}

#[test]
fn a_missing_path_names_a_checkpoint_beside_it() {
    let root = scratch();
    let gone = root.path().join("step-2");
    assert_says(&error_of(&gone), &["no checkpoint was saved there, or it was removed"]);
    save(root.path().join("step-1"));
    let error = error_of(&gone);
    assert_eq!(errno(&error), Some(libc::ENOENT));
    assert_says(&error, &["no checkpoint was saved there, or it was removed", "step-1"]);
}

#[test]
fn foreign_directories_are_named_with_their_reader() {
    let cases: [Case; 6] = [
        (&[("__0_0.distcp", b"x"), (".metadata", b"x")], &["torch.distributed", "dcp.load"]),
        (&[(".metadata", b"\x80\x02")], &["torch.distributed", "`ringstow convert"]),
        (
            &[("model.safetensors", b"x"), ("config.json", b"{}")],
            &["model.safetensors", "ringstow.open"],
        ),
        (&[("pytorch_model.bin", b"x")], &["pytorch_model.bin", "ringstow.load"]),
        (&[("notes.txt", b"x")], &["manifest.json", "nothing was saved here"]),
        (&[], &["empty", "nothing was saved here"]),
    ];
    for (files, words) in cases {
        let root = directory(files);
        let error = error_of(root.path());
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error:?}");
        assert_says(&error, words);
    }
}

/// As torch leaves it when it is killed: no reader of that format could open it.
#[test]
fn dcp_directory_without_metadata_is_unfinished() {
    for more in [&[][..], &[(".metadata.tmp", &b"x"[..])]] {
        let root = directory(&[more, &[("__0_0.distcp", b"x")]].concat());
        let error = error_of(root.path());
        assert!(matches!(error, Error::NotCommitted { .. }), "{error:?}");
        assert_says(&error, &["__0_0.distcp", "no .metadata", "killed", "remove this directory"]);
        assert!(!error.to_string().contains("convert OLD"), "{error}");
    }
    let of_each_rank = directory(&[("__0_0.distcp", b"x"), ("__0.metadata", b"x")]);
    assert_says(&error_of(of_each_rank.path()), &["dcp.load"]);
}

#[test]
fn files_are_named_with_what_reads_them() {
    let root = directory(&[
        ("model.pt", b"PK\x03\x04...."),
        ("old.pth", b"\x80\x02...."),
        ("a.npz", b"PK\x03\x04...."),
        ("m.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        ("notes.txt", b"hello"),
    ]);
    let cases = [
        ("model.pt", "ringstow.load"),
        ("old.pth", "ringstow.load"),
        ("a.npz", "numpy.load"),
        ("m.safetensors", "safetensors file"),
        ("notes.txt", "a checkpoint is a directory"),
    ];
    for (name, word) in cases {
        let error = error_of(&root.path().join(name));
        assert_eq!(errno(&error), Some(libc::ENOTDIR));
        assert_says(&error, &[name, word]);
    }
    let checkpoint = save(root.path().join("c"));
    assert_says(&error_of(&checkpoint.join("manifest.json")), &["a file of the checkpoint"]);
}

#[test]
fn shards_without_a_manifest_differ_from_no_checkpoint() {
    let cases = [
        ("rank00000-0.safetensors", ["rank00000-0.safetensors is a shard", "is the commit"]),
        ("rank00000-0.safetensors.part", ["in progress or was killed", "ringstow prune"]),
    ];
    for (shard, words) in cases {
        let root = directory(&[(shard, b"x")]);
        let error = error_of(root.path());
        assert!(matches!(error, Error::NotCommitted { .. }), "{error:?}");
        assert_says(&error, &words);
    }
}

#[test]
fn system_error_text_omits_path_and_number() {
    let root = scratch();
    let gone = root.path().join("gone");
    let said = error_of(&gone).without_path().unwrap();
    assert_eq!(
        said,
        "opening: No such file or directory; no checkpoint was saved there, or it was removed"
    );
    assert_eq!(error_of(root.path()).without_path(), None);
}
