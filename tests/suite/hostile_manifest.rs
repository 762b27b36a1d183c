//! Damaged and hostile manifests: refused with the reason, and never read out of the files.
#![cfg(unix)]

use crate::common::*;
use proptest::prelude::*;
use ringstow::{Checkpoint, Error, LoadOptions, Runtime, Target};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::Arc;

/// Writes a manifest anew, sealed as if ringstow had written it.
fn reseal(dir: &Path, body: &[u8]) {
    fs::write(dir.join("manifest.json"), sealed(body)).unwrap();
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
fn manifest_of_endless_length_is_refused_unread() {
    let (_root, dir) = saved();
    fs::File::create(dir.join("manifest.json")).unwrap().set_len(1 << 40).unwrap();
    assert_format_error(&load_error(&dir), &["1099511627776 bytes", "4294967296"]);
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
    for len in [text.len() - 1, text.len() / 2, 1, 0] {
        fs::write(&path, &text[..len]).unwrap();
        assert!(matches!(load_error(&dir), Error::Corrupt { .. }), "{len} bytes");
    }
}

#[test]
fn newer_manifest_asks_for_an_upgrade_and_stays() {
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
fn manifest_that_is_not_a_regular_file_is_refused() {
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
fn manifest_that_is_a_link_is_not_replaced_by_a_save() {
    let (root, dir) = saved();
    let (path, moved) = (dir.join("manifest.json"), root.path().join("elsewhere"));
    fs::rename(&path, &moved).unwrap();
    let manifest = fs::read(&moved).unwrap();
    for to in [&*moved, Path::new("nowhere")] {
        symlink(to, &path).unwrap();
        let before = names_in(&dir);
        let errors = [
            State::new(2, &SIZES).save(&runtime(), &dir).unwrap_err(),
            ringstow::Store::found().unwrap().begin(&dir, 1).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
            assert_says(&error, &["manifest.json is a symbolic link", "save to another directory"]);
        }
        assert_eq!((fs::read_link(&path).unwrap(), names_in(&dir)), (to.into(), before));
        fs::remove_file(&path).unwrap();
    }
    // The advice helps.
    assert_eq!(fs::read(&moved).unwrap(), manifest);
    fs::copy(&moved, &path).unwrap();
    State::new(2, &SIZES).save(&runtime(), &dir).unwrap();
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
fn ranges_outside_files_or_overlapping_are_refused() {
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
fn huge_shapes_are_refused_before_allocating() {
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
fn manifest_of_another_format_is_refused() {
    assert_format_error(
        &after_replacing("\"format\":\"ringstow\"", "\"format\":\"other\""),
        &["\"other\""],
    );
    let (_root, dir) = saved();
    for body in ["", "[", "null", "{\"a\":1", "{\"format\":\"ringstow\",\"version\":1"] {
        reseal(&dir, body.as_bytes());
        assert_format_error(&load_error(&dir), &["not a manifest of ringstow"]);
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

/// A manifest's text as that of the share of one of two ranks, its last tensor as the beginning of a
/// larger one of so many bytes.
fn as_a_part(body: &[u8], bytes: &str) -> String {
    let body = String::from_utf8(body.to_vec()).unwrap();
    let part_of = "\"part_of\":{\"rank\":0,\"ranks\":2,\"save\":\"a\"},\"state\":";
    let whole = "\"shape\":[20001],\"chunks\":[{";
    let some = format!("\"shape\":[{bytes}],\"chunks\":[{{\"offsets\":[0],\"sizes\":[20001],");
    assert!(body.contains(whole), "{body}");
    body.replacen("\"state\":", part_of, 1).replacen(whole, &some, 1)
}

#[test]
fn share_of_a_huge_tensor_takes_no_memory() {
    let (_root, dir) = saved();
    let body = manifest_body(&dir);
    reseal(&dir, as_a_part(&body, "1152921504606846976").as_bytes());
    let error = load_error(&dir);
    assert!(matches!(error, Error::MissingShare { .. }), "{error:?}");
    assert_says(&error, &["rank 0's share", "of 1152921504606846976 bytes", "layer.3.weight"]);
    reseal(&dir, as_a_part(&body, "18446744073709551616").as_bytes());
    assert_format_error(&load_error(&dir), &[]);
    let of_one = as_a_part(&body, "1099511627776").replace("\"ranks\":2", "\"ranks\":1");
    reseal(&dir, of_one.as_bytes());
    assert_format_error(&load_error(&dir), &["layer.3.weight", "of 1099511627776 bytes"]);
}

/// Whatever a sealed manifest says: no panic, and no tensor but of bytes that lie in a file.
fn assert_harmless(dir: &Path, runtime: &Runtime) {
    let Ok(checkpoint) = Checkpoint::open(dir) else { return };
    let _ = checkpoint.state();
    let file_bytes: u64 = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
    let on_disk = fs::metadata(shard_of(dir)).unwrap().len();
    for verify in [true, false] {
        let names: Vec<&str> = checkpoint.tensors().iter().map(|t| t.name.as_str()).collect();
        let options = LoadOptions { verify, ..LoadOptions::default() };
        let Ok(loaded) = checkpoint.load_names(names, options.on(runtime, &Arc::default())) else {
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
        let targets = [(entry.name.as_str(), Target::new(&mut to))];
        let _ = checkpoint.load_into(&targets, LoadOptions::default().on(runtime, &Arc::default()));
    }
    let _ = ringstow::internals::store::verify(runtime, dir, &Arc::default());
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
fn mutated_manifest_never_panics_or_reads_outside() {
    let (_root, dir) = saved();
    let body = manifest_body(&dir);
    let part = as_a_part(&body, "65536").into_bytes();
    let runtime = runtime();
    let opened = std::cell::Cell::new(0);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) };
    proptest!(config, |(changes in prop::collection::vec(any_change(), 1..4), of in any::<bool>())| {
        let mut text = if of { part.clone() } else { body.clone() };
        changes.iter().for_each(|change| apply(change, &mut text));
        reseal(&dir, &text);
        opened.set(opened.get() + usize::from(Checkpoint::open(&dir).is_ok()));
        assert_harmless(&dir, &runtime);
    });
    assert!(opened.get() > 30, "only {} mutations got past the parser", opened.get());
}
