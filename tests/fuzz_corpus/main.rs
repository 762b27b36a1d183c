//! The fuzz targets over their stored inputs, on stable Rust: what a fuzzer reached, and each input that once failed.
#![cfg(unix)]

#[path = "../common/mod.rs"]
mod common;
mod memory;

use common::{noise, number};
use fuzz_targets::{TARGETS, Target};
use std::fs;
use std::path::{Path, PathBuf};

/// The stored inputs of a target, by name.
fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target.name);
    let entries = fs::read_dir(&dir).unwrap_or_else(|why| panic!("{}: {why}", dir.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Runs a target on an input, and names the input if that panics.
fn run(target: &Target, path: &Path, input: &[u8]) {
    let ended = std::panic::catch_unwind(|| (target.run)(input));
    assert!(ended.is_ok(), "{} fails on {}", target.name, path.display());
}

#[test]
fn every_stored_input_holds() {
    for target in TARGETS {
        let inputs = corpus(target);
        assert!(!inputs.is_empty(), "{} has no inputs", target.name);
        inputs.iter().for_each(|(path, input)| run(target, path, input));
    }
}

/// What a fuzzer does first, without one: each stored input with a byte changed, a piece cut out or doubled.
#[test]
fn mutated_inputs_hold() {
    let seed = number("RINGSTOW_SEED", 1);
    let mut random = fastrand::Rng::with_seed(seed);
    for target in TARGETS {
        let inputs = corpus(target);
        let each = if target.name == "directory" { 200 } else { 2000 };
        for _ in 0..each {
            let (path, input) = &inputs[random.usize(..inputs.len())];
            let mut mutated = input.clone();
            for _ in 0..random.usize(1..4) {
                mutate(&mut mutated, &mut random);
            }
            let ended = std::panic::catch_unwind(|| (target.run)(&mutated));
            if ended.is_err() {
                let failed = std::env::temp_dir().join(format!("fuzz-{}", target.name));
                fs::write(&failed, &mutated).unwrap();
                panic!(
                    "{} fails on {}, made of {} (RINGSTOW_SEED={seed})",
                    target.name,
                    failed.display(),
                    path.display()
                );
            }
        }
    }
}

fn mutate(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    let at = random.usize(..=bytes.len());
    let end = (at + random.usize(..16)).min(bytes.len());
    match random.u8(..6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.u8(..8),
        1 if at < bytes.len() => bytes[at] = *random.choice(b"0129-\"{}[],:.$eE\n ").unwrap(),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        4 => {
            let number =
                random.choice(["0", "-1", "18446744073709551615", "9223372036854775808", "1e9"]);
            bytes.splice(at..end, number.unwrap().bytes());
        }
        _ => {
            let some = noise(random.u64(..), random.usize(..8));
            bytes.splice(at..at, some);
        }
    }
}

#[test]
fn stored_inputs_are_small() {
    let bytes: usize = TARGETS.iter().flat_map(corpus).map(|(_, input)| input.len()).sum();
    assert!(bytes <= 400 << 10, "{bytes} bytes: reduce them with `python tools/fuzz.py --reduce`");
}
