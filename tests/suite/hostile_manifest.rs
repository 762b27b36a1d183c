//! Damaged and hostile manifests: refused with the reason, and never read out of the files.
#![cfg(unix)]

use crate::common::*;
use fastrand::Rng;
use ringstow::{Checkpoint, Error, LoadOptions, Runtime, Target};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
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
        let _ = checkpoint.load_into(&targets, on(runtime));
    }
    let _ = verify(runtime, dir);
}

const NUMBERS: [&str; 19] = [
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
];

const TEXTS: [&str; 12] = [
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
];

/// A run of such bytes; empty if there is none.
fn run_of(inside: impl Fn(&u8) -> bool, text: &[u8], random: &mut Rng) -> Range<usize> {
    let mut end = 0;
    let runs = text.chunk_by(|a, b| inside(a) == inside(b)).filter_map(|run| {
        end += run.len();
        inside(&run[0]).then_some(end - run.len()..end)
    });
    random.choice(runs.collect::<Vec<_>>()).unwrap_or_default()
}

/// A number or a string becomes another; a run of bytes goes or stands twice; a byte becomes any other.
fn change(text: &mut Vec<u8>, random: &mut Rng) {
    let at = random.usize(..=text.len());
    let end = (at + usize::from(random.u8(..))).min(text.len());
    let (range, new) = match random.u8(..9) {
        0..4 => {
            let to = random.choice(NUMBERS).unwrap();
            (run_of(u8::is_ascii_digit, text, random), to.into())
        }
        4..6 => (run_of(|&byte| byte != b'"', text, random), random.choice(TEXTS).unwrap().into()),
        6 => (at..end, Vec::new()),
        7 => (at..at, text[at..end].to_vec()),
        _ => (at..end.min(at + 1), vec![random.u8(..)]),
    };
    text.splice(range, new);
}

#[test]
fn mutated_manifest_never_panics_or_reads_outside() {
    let (_root, dir) = saved();
    let body = manifest_body(&dir);
    let part = as_a_part(&body, "65536").into_bytes();
    let (runtime, mut opened) = (runtime(), 0);
    let first = number("RINGSTOW_SEED", 0);
    for seed in first..first + 3000 {
        let mut random = Rng::with_seed(seed);
        let mut text = if random.bool() { part.clone() } else { body.clone() };
        (0..random.usize(1..4)).for_each(|_| change(&mut text, &mut random));
        reseal(&dir, &text);
        opened += usize::from(Checkpoint::open(&dir).is_ok());
        let ended = catch_unwind(AssertUnwindSafe(|| assert_harmless(&dir, &runtime)));
        assert!(ended.is_ok(), "RINGSTOW_SEED={seed}: {}", String::from_utf8_lossy(&text));
    }
    assert!(opened > 30, "only {opened} mutations got past the parser");
}
