//! Damaged, hostile and impossible input: each a clear error, nothing lost, no litter.
#![cfg(unix)]

mod common;

use common::{State, assert_no_litter, errno, load_all, names_in, scratch, small_config, step_at};
use nix::libc;
use proptest::prelude::*;
use ringstow::device::Source;
use ringstow::device::host::HostSink;
use ringstow::{
    Checkpoint, Config, Dtype, Error, LoadOptions, Runtime, StateDict, TensorInfo, Value,
};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

const SIZES: [usize; 4] = [0, 5000, 12_288, 20_001];

fn runtime() -> Runtime {
    Runtime::new(small_config()).unwrap()
}

/// A checkpoint of step 1 and the directory that it is in.
fn saved() -> (tempfile::TempDir, PathBuf) {
    let root = scratch();
    let dir = root.path().join("ckpt");
    State::new(1, &SIZES).save(&runtime(), &dir).unwrap();
    (root, dir)
}

fn shard_of(dir: &Path) -> PathBuf {
    dir.join("rank00000-0.safetensors")
}

/// Loading all of it fails, and so does opening, unless only the bytes are damaged.
#[track_caller]
fn load_error(dir: &Path) -> Error {
    load_all(&runtime(), dir).unwrap_err()
}

#[track_caller]
fn assert_says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

// ---- paths that hold no checkpoint ----

#[test]
fn a_path_that_is_a_file_is_refused_and_the_file_kept() {
    let root = scratch();
    let file = root.path().join("weights");
    fs::write(&file, "theirs").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = State::new(1, &SIZES).save(&runtime(), &path).unwrap_err();
        assert_eq!(errno(&error), Some(libc::ENOTDIR), "{error}");
        assert_says(&error, &["weights"]);
        assert_eq!(errno(&load_error(&path)), Some(libc::ENOTDIR));
    }
    assert_eq!(fs::read(&file).unwrap(), b"theirs");
    assert_eq!(names_in(root.path()), ["weights"]);
}

#[test]
fn a_path_where_nothing_is_says_so() {
    let root = scratch();
    assert_eq!(errno(&load_error(&root.path().join("gone"))), Some(libc::ENOENT));
}

#[test]
fn a_directory_without_manifest_is_incomplete() {
    let root = scratch();
    let error = load_error(root.path());
    assert!(matches!(error, Error::Incomplete { .. }), "{error:?}");
    assert_says(&error, &["manifest.json", "nothing was saved here"]);

    let (_root, dir) = saved();
    fs::rename(shard_of(&dir), dir.join("rank00000-0.safetensors.part")).unwrap();
    fs::remove_file(dir.join("manifest.json")).unwrap();
    let error = load_error(&dir);
    assert!(matches!(error, Error::Incomplete { .. }), "{error:?}");
    assert_says(&error, &["under way or was killed", "ringstow prune"]);
}

#[test]
fn an_empty_state_dict_is_a_checkpoint_like_any_other() {
    let root = scratch();
    let dir = root.path().join("empty");
    ringstow::save(&StateDict::new(), &dir, &small_config()).unwrap();
    assert_eq!(load_all(&runtime(), &dir).unwrap().tensors().count(), 0);
    assert_eq!(Checkpoint::open(&dir).unwrap().state().unwrap(), Value::Dict(vec![]));
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());
    assert_no_litter(&dir);
}

#[test]
fn two_tensors_of_one_name_are_refused_before_anything_is_made() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    let mut state = StateDict::new();
    state.bytes("w", Dtype::U8, &[1], &[1]).unwrap().bytes("w", Dtype::U8, &[1], &[2]).unwrap();
    let error = ringstow::save(&state, &dir, &small_config()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert_says(&error, &["\"w\""]);
    assert!(!dir.exists());
}

#[test]
fn a_tensor_of_a_shape_that_overflows_is_refused_by_name() {
    let mut state = StateDict::new();
    for shape in [&[1u64 << 40][..], &[u64::MAX, u64::MAX]] {
        let error = state.bytes("huge", Dtype::F32, shape, &[]).err().unwrap();
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert_says(&error, &["huge"]);
    }
}

#[test]
fn a_save_beside_files_of_somebody_else_is_refused_and_they_are_kept() {
    let root = scratch();
    fs::write(root.path().join("model.safetensors"), "theirs").unwrap();
    let error = State::new(1, &SIZES).save(&runtime(), root.path()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert_says(&error, &["model.safetensors", "another directory"]);
    assert_eq!(names_in(root.path()), ["model.safetensors"]);
}

// ---- damaged shards ----

#[test]
fn a_truncated_or_grown_shard_is_corrupt_with_both_lengths() {
    let (_root, dir) = saved();
    let bytes = fs::metadata(shard_of(&dir)).unwrap().len();
    for len in [0, 1, 4096, bytes - 1, bytes + 1, bytes + 4096] {
        fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap().set_len(len).unwrap();
        let error = load_error(&dir);
        assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
        assert_says(&error, &["rank00000-0.safetensors", &bytes.to_string(), &len.to_string()]);
        assert_says(&error, &["length"]);
        assert!(matches!(ringstow::verify(&dir), Err(Error::Corrupt { .. })));
        let found = &ringstow::list(&dir).unwrap()[0];
        assert_eq!(found.status, ringstow::store::Status::Damaged);
    }
}

#[test]
fn a_missing_shard_is_incomplete_and_named() {
    let (_root, dir) = saved();
    fs::remove_file(shard_of(&dir)).unwrap();
    let error = load_error(&dir);
    assert!(matches!(error, Error::Incomplete { .. }), "{error:?}");
    assert_says(&error, &["rank00000-0.safetensors", "missing"]);
    assert_eq!(ringstow::latest(dir.parent().unwrap()).unwrap(), None);
}

#[test]
fn a_flipped_bit_anywhere_in_a_shard_is_found_with_its_block() {
    let (_root, dir) = saved();
    let path = shard_of(&dir);
    let bytes = fs::metadata(&path).unwrap().len();
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // The header's length, its JSON, its padding, the first and last byte of data, and in between.
    let header = 4096;
    for (at, bit) in [0, 9, header - 1, header, header + 7000, bytes - 1].into_iter().zip(0..) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();

        let report = ringstow::store::verify(&runtime(), &dir, &Arc::default()).unwrap();
        assert_eq!(report.damage.len(), 1, "byte {at}");
        assert_eq!(report.damage[0].offset, at / 4096 * 4096);
        assert_eq!(report.damage[0].file, path);
        if at >= header {
            let error = load_error(&dir);
            let Error::Corrupt { offset, .. } = &error else { panic!("{error:?}") };
            assert_eq!(*offset, at / 4096 * 4096);
            assert_says(&error, &["crc32 of block", "rank00000-0.safetensors"]);
        }
        file.write_all_at(&byte, at).unwrap();
    }
    State::new(1, &SIZES).assert_at(&runtime(), &dir);
}

#[test]
fn a_damaged_block_spoils_only_what_lies_in_it_and_never_reaches_the_caller() {
    let (_root, dir) = saved();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let begin = checkpoint.tensor("layer.2.weight").unwrap().chunks[0].begin;
    let file = fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap();
    file.write_all_at(b"rot", begin + 5000).unwrap();
    let runtime = runtime();
    let load = |name: &str, to: &mut [u8]| {
        let targets = [(name, HostSink::new(to))];
        checkpoint.load_into(&targets, LoadOptions::default(), &runtime, &Arc::default())
    };
    let mut to = vec![0xAA; 12_288];
    assert!(matches!(load("layer.2.weight", &mut to), Err(Error::Corrupt { .. })));
    assert!(!to.windows(3).any(|bytes| bytes == b"rot"), "damaged bytes were handed out");
    let mut to = vec![0; 20_001];
    load("layer.3.weight", &mut to).unwrap();
    assert_eq!(to, State::new(1, &SIZES).tensors[3].1);
    let unchecked = LoadOptions { verify: false };
    let loaded =
        checkpoint.load_names(["layer.2.weight"], unchecked, &runtime, &Arc::default()).unwrap();
    assert_eq!(&loaded.tensor("layer.2.weight").unwrap().data()[5000..5003], b"rot");
}

#[test]
fn a_shard_that_is_a_link_a_pipe_or_a_directory_is_refused() {
    type Make = fn(&Path);
    let make: [(&str, Make); 3] = [
        ("link", |path| {
            let elsewhere = path.with_file_name("../elsewhere");
            fs::rename(path, &elsewhere).unwrap();
            symlink(elsewhere, path).unwrap();
        }),
        ("pipe", |path| {
            fs::remove_file(path).unwrap();
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
        ("directory", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
    ];
    for (what, put) in make {
        let (_root, dir) = saved();
        put(&shard_of(&dir));
        let error = load_error(&dir);
        assert!(matches!(error, Error::Format { .. }), "{what}: {error:?}");
        assert_says(&error, &["rank00000-0.safetensors", "no regular file"]);
    }
}

#[test]
fn a_link_in_the_place_of_an_uncommitted_shard_is_not_followed() {
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

// ---- damaged and hostile manifests ----

/// Writes a manifest anew, sealed as if ringstow had written it.
fn reseal(dir: &Path, body: &[u8]) {
    let seal = format!(",\"crc32\":\"{:08x}\"}}\n", crc32fast::hash(body));
    fs::write(dir.join("manifest.json"), [body, seal.as_bytes()].concat()).unwrap();
}

/// The manifest's text up to its seal: an object that lacks its closing brace.
fn manifest_body(dir: &Path) -> Vec<u8> {
    let text = fs::read(dir.join("manifest.json")).unwrap();
    let at = text.windows(10).rposition(|bytes| bytes == b",\"crc32\":\"").unwrap();
    text[..at].to_vec()
}

/// The error of loading a checkpoint whose manifest had `from` replaced by `to`, once.
#[track_caller]
fn after_replacing(from: &str, to: &str) -> Error {
    let (_root, dir) = saved();
    let body = String::from_utf8(manifest_body(&dir)).unwrap();
    assert!(body.contains(from), "{from:?} is not in {body}");
    reseal(&dir, body.replacen(from, to, 1).as_bytes());
    load_error(&dir)
}

#[track_caller]
fn assert_format_error(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    assert_says(error, words);
    assert_says(error, &["manifest.json"]);
}

#[test]
fn every_flipped_bit_of_a_manifest_is_found() {
    let (_root, dir) = saved();
    let path = dir.join("manifest.json");
    let text = fs::read(&path).unwrap();
    for at in 0..text.len() {
        let mut flipped = text.clone();
        flipped[at] ^= 1 << (at % 8);
        fs::write(&path, &flipped).unwrap();
        let error = Checkpoint::open(&dir).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "byte {at}: {error:?}");
    }
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    assert!(matches!(load_error(&dir), Error::Corrupt { .. }));
    fs::write(&path, "").unwrap();
    assert!(matches!(load_error(&dir), Error::Corrupt { .. }));
}

#[test]
fn a_manifest_of_a_newer_version_asks_for_an_upgrade_and_is_not_saved_over() {
    let (_root, dir) = saved();
    let body = String::from_utf8(manifest_body(&dir)).unwrap();
    reseal(&dir, body.replacen("\"version\":1", "\"version\":99,\"new\":[]", 1).as_bytes());
    let error = load_error(&dir);
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert_says(&error, &["version 99", "upgrade"]);
    let before = names_in(&dir);
    let error = State::new(2, &SIZES).save(&runtime(), &dir).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert_eq!(names_in(&dir), before);
}

#[test]
fn a_manifest_that_is_a_link_a_pipe_or_a_directory_is_refused() {
    let (root, dir) = saved();
    let (path, moved) = (dir.join("manifest.json"), root.path().join("elsewhere"));
    fs::rename(&path, &moved).unwrap();
    symlink(&moved, &path).unwrap();
    assert_format_error(&load_error(&dir), &["symbolic link"]);
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_says(&load_error(&dir), &["manifest.json", "not a regular file"]);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_says(&load_error(&dir), &["manifest.json", "not a regular file"]);
}

#[test]
fn file_names_that_leave_the_directory_are_refused() {
    let name = "rank00000-0.safetensors";
    for hostile in [
        "../../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\\\x.safetensors",
        "x\\u0000.safetensors",
        "manifest.json",
        "..",
        "",
    ] {
        let error = after_replacing(name, hostile);
        assert_format_error(&error, &["refused", "own directory"]);
    }
}

#[test]
fn ranges_outside_of_files_and_over_each_other_are_refused() {
    let (_root, dir) = saved();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let begin = |i: usize| format!("\"begin\":{}", checkpoint.tensors()[i].chunks[0].begin);
    assert_format_error(&after_replacing(&begin(3), &begin(2)), &["overlap", "layer.3.weight"]);
    for far in [u64::MAX, u64::MAX - 20_000, 1 << 40] {
        let error = after_replacing(&begin(3), &format!("\"begin\":{far}"));
        assert_format_error(&error, &["do not fit", "layer.3.weight"]);
    }
    assert_format_error(&after_replacing("\"file\":0", "\"file\":1"), &["no file number 1"]);
    assert_format_error(&after_replacing(&begin(3), "\"begin\":-1"), &["invalid value"]);
}

#[test]
fn shapes_that_no_memory_holds_are_refused_before_any_is_taken() {
    let shape = "\"shape\":[20001]";
    let error = after_replacing(shape, "\"shape\":[1099511627776]");
    assert_format_error(&error, &["do not fit", "1099511627776 bytes"]);
    let error = after_replacing(shape, "\"shape\":[4294967296,4294967296,4294967296]");
    assert_format_error(&error, &["overflows"]);
    let error = after_replacing(shape, "\"shape\":[18446744073709551616]");
    assert_format_error(&error, &[]);
    // A file that claims a terabyte as well: its length on disk tells.
    let (_root, dir) = saved();
    let bytes = fs::metadata(shard_of(&dir)).unwrap().len();
    let body = String::from_utf8(manifest_body(&dir)).unwrap();
    let lie = body.replace(&format!("\"bytes\":{bytes}"), "\"bytes\":1099511627776");
    reseal(&dir, lie.as_bytes());
    assert_format_error(&load_error(&dir), &["checksums"]);
}

#[test]
fn keys_that_stand_twice_are_refused_at_every_level() {
    for (from, to, what) in [
        ("\"generation\":0", "\"generation\":0,\"generation\":0", "duplicate field"),
        ("\"file\":0", "\"file\":0,\"file\":0", "duplicate field"),
        ("\"name\":\"layer.1.weight\"", "\"name\":\"layer.0.weight\"", "two tensors"),
    ] {
        assert_format_error(&after_replacing(from, to), &[what]);
    }
    // Values are read only when they are asked for, and are as strict.
    let (_root, dir) = saved();
    let body = String::from_utf8(manifest_body(&dir)).unwrap();
    reseal(&dir, body.replacen("\"step\":1", "\"step\":1,\"step\":2", 1).as_bytes());
    let error = Checkpoint::open(&dir).unwrap().state().unwrap_err();
    assert_format_error(&error, &["twice", "step"]);
}

#[test]
fn a_manifest_of_another_format_or_of_no_format_is_refused() {
    assert_format_error(
        &after_replacing("\"format\":\"ringstow\"", "\"format\":\"other\""),
        &["\"other\""],
    );
    let (_root, dir) = saved();
    for body in ["", "[", "null", "{\"a\":1", "{\"format\":\"ringstow\",\"version\":1"] {
        reseal(&dir, body.as_bytes());
        assert_format_error(&load_error(&dir), &["no manifest of ringstow"]);
    }
    let deep = format!("{{\"format\":{}", "[".repeat(100_000));
    reseal(&dir, deep.as_bytes());
    assert_format_error(&load_error(&dir), &[]);
}

#[test]
fn a_save_replaces_a_damaged_checkpoint() {
    let (_root, dir) = saved();
    fs::write(dir.join("manifest.json"), "rubbish").unwrap();
    let after = State::new(2, &SIZES);
    after.save(&runtime(), &dir).unwrap();
    after.assert_at(&runtime(), &dir);
    assert_no_litter(&dir);
}

/// Whatever a sealed manifest says: no panic, and no tensor but of bytes that lie in a file.
fn assert_harmless(dir: &Path, runtime: &Runtime) {
    let Ok(checkpoint) = Checkpoint::open(dir) else { return };
    let _ = checkpoint.state();
    let file_bytes: u64 = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
    let on_disk = fs::metadata(shard_of(dir)).unwrap().len();
    for verify in [true, false] {
        let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
        let options = LoadOptions { verify };
        let Ok(loaded) = checkpoint.load_names(names, options, runtime, &Arc::default()) else {
            continue;
        };
        assert!(loaded.report.read_bytes <= file_bytes && file_bytes == on_disk);
        let file = fs::File::open(shard_of(dir)).unwrap();
        for entry in checkpoint.tensors() {
            let data = loaded.tensor(&entry.name).unwrap().data();
            assert_eq!(data.len() as u64, entry.nbytes());
            let mut expected = vec![0; data.len()];
            file.read_exact_at(&mut expected, entry.chunks[0].begin).unwrap();
            assert!(data == expected, "{} is not what the file holds there", entry.name);
        }
    }
    for entry in checkpoint.tensors().iter().filter(|entry| entry.nbytes() < 1 << 20) {
        let mut to = vec![0; entry.nbytes() as usize];
        let targets = [(entry.name.as_str(), HostSink::new(&mut to))];
        let _ = checkpoint.load_into(&targets, LoadOptions::default(), runtime, &Arc::default());
    }
    let _ = ringstow::store::verify(runtime, dir, &Arc::default());
}

/// A change to a manifest's text.
#[derive(Debug, Clone)]
enum Change {
    /// The nth number becomes this one.
    Number(prop::sample::Index, String),
    /// The nth string becomes this one.
    Text(prop::sample::Index, String),
    /// A run of bytes goes.
    Cut(prop::sample::Index, u8),
    /// A run of bytes stands twice.
    Double(prop::sample::Index, u8),
    /// A byte becomes this one.
    Byte(prop::sample::Index, u8),
}

fn any_change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let numbers = prop::sample::select(vec![
        "0",
        "1",
        "2",
        "-1",
        "4095",
        "4096",
        "8192",
        "12288",
        "20001",
        "65536",
        "1073741824",
        "1099511627776",
        "9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
        "1e300",
        "0.5",
        "null",
        "[]",
    ]);
    let texts = prop::sample::select(vec![
        "",
        "../../x.safetensors",
        "/x.safetensors",
        "rank00000-0.safetensors",
        "F64",
        "BOOL",
        "C128",
        "layer.1.weight",
        "$tensor",
        "ringstow",
        "deadbeef",
        "\\ud800",
    ]);
    prop_oneof![
        4 => (at(), numbers).prop_map(|(i, to)| Change::Number(i, to.into())),
        2 => (at(), texts).prop_map(|(i, to)| Change::Text(i, to.into())),
        1 => (at(), any::<u8>()).prop_map(|(i, n)| Change::Cut(i, n)),
        1 => (at(), any::<u8>()).prop_map(|(i, n)| Change::Double(i, n)),
        1 => (at(), any::<u8>()).prop_map(|(i, b)| Change::Byte(i, b)),
    ]
}

/// Runs of bytes of one kind, as (start, end).
fn runs(text: &[u8], inside: impl Fn(u8) -> bool) -> Vec<(usize, usize)> {
    let mut runs = Vec::new();
    let mut start = None;
    for (at, &byte) in text.iter().chain(b"\0").enumerate() {
        match (inside(byte) && at < text.len(), start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                runs.push((from, at));
                start = None;
            }
            _ => {}
        }
    }
    runs
}

fn apply(change: &Change, text: &mut Vec<u8>) {
    if text.is_empty() {
        return;
    }
    match change {
        Change::Number(index, to) => {
            let numbers = runs(text, |byte| byte.is_ascii_digit());
            if !numbers.is_empty() {
                let (start, end) = numbers[index.index(numbers.len())];
                text.splice(start..end, to.bytes());
            }
        }
        Change::Text(index, to) => {
            let strings = runs(text, |byte| byte != b'"');
            let (start, end) = strings[index.index(strings.len())];
            text.splice(start..end, to.bytes());
        }
        Change::Cut(index, len) => {
            let start = index.index(text.len());
            text.drain(start..(start + usize::from(*len)).min(text.len()));
        }
        Change::Double(index, len) => {
            let start = index.index(text.len());
            let again = text[start..(start + usize::from(*len)).min(text.len())].to_vec();
            text.splice(start..start, again);
        }
        Change::Byte(index, to) => {
            let at = index.index(text.len());
            text[at] = *to;
        }
    }
}

#[test]
fn a_mutated_and_resealed_manifest_never_panics_nor_reads_out_of_the_files() {
    let (_root, dir) = saved();
    let body = manifest_body(&dir);
    let runtime = runtime();
    let opened = std::cell::Cell::new(0);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) };
    proptest!(config, |(changes in prop::collection::vec(any_change(), 1..4))| {
        let mut text = body.clone();
        changes.iter().for_each(|change| apply(change, &mut text));
        reseal(&dir, &text);
        opened.set(opened.get() + usize::from(Checkpoint::open(&dir).is_ok()));
        assert_harmless(&dir, &runtime);
    });
    assert!(opened.get() > 30, "only {} mutations got past the parser", opened.get());
}

#[test]
fn a_load_takes_blocks_larger_than_its_own_staging_buffers() {
    let root = scratch();
    let config = Config { block_bytes: 1 << 20, pool_bytes: 4 << 20, ..Config::default() };
    let state = State::new(1, &[3_000_000, 5]);
    state.save(&Runtime::new(config).unwrap(), root.path()).unwrap();
    let runtime = runtime();
    state.assert_at(&runtime, root.path());
    let report = ringstow::store::verify(&runtime, root.path(), &Arc::default()).unwrap();
    assert!(report.damage.is_empty());
    let checkpoint = Checkpoint::open(root.path()).unwrap();
    let mut to = vec![0; 3_000_000];
    let targets = [("layer.0.weight", HostSink::new(&mut to))];
    checkpoint.load_into(&targets, LoadOptions::default(), &runtime, &Arc::default()).unwrap();
    assert_eq!(to, state.tensors[0].1);
}

// ---- two savers on one path ----

/// A tensor whose first byte waits for a word: a save that stands still while it lasts.
struct Waits {
    started: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Source for Waits {
    fn nbytes(&self) -> u64 {
        10
    }
    fn read(&self, _: usize, to: &mut [u8]) {
        let _ = self.started.send(());
        let _ = self.go_on.lock().unwrap().recv();
        to.fill(7);
    }
}

/// A save under way, the sign that it has begun, and the word that lets it end when dropped.
fn standing_save(path: &Path) -> (ringstow::SaveHandle, Receiver<()>, Sender<()>) {
    let ((started, has_started), (word, go_on)) = (channel(), channel());
    let mut state = StateDict::new();
    let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![10] };
    state.source(info, Box::new(Waits { started, go_on: Mutex::new(go_on) }));
    state.value("step", 7);
    (ringstow::save_async(state, path, &small_config()).unwrap(), has_started, word)
}

#[test]
fn a_second_saver_in_this_process_is_told_and_the_first_goes_on() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    let (first, started, word) = standing_save(&dir);
    started.recv().unwrap();
    let error = State::new(2, &SIZES).save(&runtime(), &dir).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error:?}");
    assert_says(&error, &["ckpt", "under way"]);
    ringstow::prune(root.path()).unwrap();
    drop(word);
    first.result().unwrap();
    assert_eq!(step_at(&dir), 7);
    assert_no_litter(&dir);
}

/// Where the child of [`a_second_saver_in_another_process_is_told_until_the_first_is_dead`] saves.
const CHILD_DIR: &str = "RINGSTOW_TEST_SAVER_DIR";

#[test]
fn child_whose_save_stands_still() {
    let Some(dir) = std::env::var_os(CHILD_DIR).map(PathBuf::from) else { return };
    let (_save, started, _word) = standing_save(&dir);
    started.recv().unwrap();
    println!("\nstarted");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_second_saver_in_another_process_is_told_until_the_first_is_dead() {
    use std::io::{BufRead, BufReader};
    let (_root, dir) = saved();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_whose_save_stands_still", "--nocapture"])
        .env(CHILD_DIR, &dir)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let started = lines.by_ref().map_while(Result::ok).any(|line| line == "started");
    let error = State::new(2, &SIZES).save(&runtime(), &dir);
    let found = step_at(&dir);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(started);
    assert!(matches!(error, Err(Error::Busy { .. })), "{error:?}");
    assert_eq!(found, 1, "the earlier checkpoint stands while a save is under way");
    let after = State::new(3, &SIZES);
    after.save(&runtime(), &dir).expect("a dead saver holds no lock");
    after.assert_at(&runtime(), &dir);
    assert_no_litter(&dir);
}

// ---- a directory that may not be written to ----

/// On this thread, files are reached with an ordinary user's rights. False if that cannot be had.
#[cfg(target_os = "linux")]
fn become_nobody() -> bool {
    use nix::unistd::{Uid, setfsuid};
    const NOBODY: u32 = 65534;
    setfsuid(Uid::from_raw(NOBODY));
    // Answers what was set before, and changes nothing if it may not.
    setfsuid(Uid::from_raw(NOBODY)).as_raw() == NOBODY
}

#[test]
#[cfg(target_os = "linux")]
fn a_directory_that_may_not_be_written_to_is_named_and_its_checkpoint_loads() {
    use std::os::unix::fs::PermissionsExt;
    let (root, dir) = saved();
    let set_mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    set_mode(root.path(), 0o755);
    let (fresh, before) = (root.path().join("fresh"), names_in(&dir));
    let nobody = !nix::unistd::Uid::effective().is_root() || {
        std::thread::spawn(become_nobody).join().unwrap()
    };
    if !nobody {
        println!("skipped: root whose rights cannot be dropped");
        return;
    }
    set_mode(&dir, 0o555);
    set_mode(root.path(), 0o555);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if nix::unistd::Uid::effective().is_root() {
                become_nobody();
            }
            for path in [&dir, &fresh] {
                let error = State::new(2, &SIZES).save(&runtime(), path).unwrap_err();
                assert_eq!(errno(&error), Some(libc::EACCES), "{error}");
                assert_says(&error, &[path.to_str().unwrap(), "owner and mode"]);
            }
            State::new(1, &SIZES).assert_at(&runtime(), &dir);
        });
    });
    set_mode(root.path(), 0o755);
    set_mode(&dir, 0o755);
    assert_eq!(names_in(&dir), before);
    assert!(!fresh.exists());
}
