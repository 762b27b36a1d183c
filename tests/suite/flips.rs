//! A flipped bit at any place of any file of a checkpoint is found, or is in bytes that carry nothing.
//!
//! `RINGSTOW_FLIPS` sets the number of flips, `RINGSTOW_SEED` the places.
#![cfg(unix)]

use crate::common::*;
use ringstow::{Config, Dtype, Loaded, OpenOptions, Runtime, StateDict, Value};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tensors of every kind that a shard stores in another way, with values beside them.
fn save(runtime: &Runtime, path: &Path, config: &Config) {
    let (words, bytes) = (noise(1, 9000), noise(2, 30_001));
    let mut state = StateDict::new();
    state.bytes("w", Dtype::F32, &[45, 50], &words).unwrap();
    state.bytes("odd", Dtype::U8, &[30_001], &bytes).unwrap();
    state.bytes("c", Dtype::C128, &[4], &words[..64]).unwrap();
    state.bytes("__metadata__", Dtype::BF16, &[3], &words[..6]).unwrap();
    state.bytes("empty", Dtype::F32, &[0, 7], &[]).unwrap();
    state.value("step", 1000).value("name", "a text");
    assert_eq!(runtime.config(), config);
    ringstow::internals::store::save(runtime, &state, path, &Arc::default()).unwrap();
}

/// What a load returns, to compare: each tensor's name, type and bytes, and the values.
fn shown(loaded: &Loaded, values: &Value) -> String {
    let mut all: Vec<String> = loaded
        .tensors()
        .map(|(name, t)| {
            format!("{name} {:?} {:?} {:08x}", t.dtype(), t.shape(), crc32fast::hash(t.data()))
        })
        .collect();
    all.sort();
    format!("{all:?} {values:?}")
}

fn load(runtime: &Runtime, path: &Path) -> ringstow::Result<String> {
    let checkpoint = OpenOptions::of(runtime.config()).open(path)?;
    Ok(shown(&load_opened(runtime, &checkpoint)?, &checkpoint.state()?))
}

/// What a flip did.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The load failed.
    Load,
    /// The load returned what was saved, and `verify` found the damage: it is in a header, which a load does not read.
    Verify,
    /// Nothing that is read depends on the byte.
    Nothing,
}

/// Flips one bit, looks, and flips it back.
fn flip_at(runtime: &Runtime, dir: &Path, file: &Path, at: u64, bit: u8, whole: &str) -> Outcome {
    let open = fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    open.read_exact_at(&mut byte, at).unwrap();
    open.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
    let place = format!("bit {bit} of byte {at} of {}", file.display());
    let name = file.file_name().unwrap().to_str().unwrap();
    let loaded = load(runtime, dir);
    let verified = verify(runtime, dir);
    let outcome = match (loaded, verified) {
        (Err(error), verified) => {
            assert!(error.to_string().contains(name), "{place}: the error names no file: {error}");
            let found = verified.map_or(true, |report| !report.damage.is_empty());
            assert!(found, "{place}: a load finds it, verify does not");
            Outcome::Load
        }
        (Ok(loaded), verified) => {
            assert_eq!(loaded, whole, "{place}: a load returns something else");
            let report =
                verified.unwrap_or_else(|e| panic!("{place}: it loads, verify fails: {e}"));
            match &report.damage[..] {
                [] => Outcome::Nothing,
                [damage] => {
                    assert_eq!(damage.file, file, "{place}");
                    assert!((damage.offset..damage.offset + damage.bytes).contains(&at), "{place}");
                    Outcome::Verify
                }
                more => panic!("{place}: {more:?}"),
            }
        }
    };
    open.write_all_at(&byte, at).unwrap();
    outcome
}

/// A checkpoint of each kind: plain, of several shards, striped, of two ranks, of ranks that saved each by itself.
struct Kind {
    name: &'static str,
    runtime: Runtime,
    dir: PathBuf,
    /// All its files.
    files: Vec<PathBuf>,
}

fn kinds(root: &Path) -> Vec<Kind> {
    let plain = small_config();
    let stripe = root.join("other-disk");
    fs::create_dir(&stripe).unwrap();
    let striped = Config { stripe: vec![stripe.clone()], ..small_config() };
    let several = Config { files: 3, ..small_config() };
    let mut kinds = Vec::new();
    for (name, config) in [("plain", &plain), ("several", &several), ("striped", &striped)] {
        let (runtime, dir) = (Runtime::new(config.clone()).unwrap(), root.join(name));
        save(&runtime, &dir, config);
        let mut files: Vec<PathBuf> = files_in(&dir);
        files.extend(config.stripe.iter().flat_map(|stripe| files_in(&stripe.join(name))));
        kinds.push(Kind { name, runtime, dir, files });
    }
    let (runtime, dir) = (Runtime::new(plain).unwrap(), root.join("ranks"));
    State::new(1, &SIZES).save_by_ranks(2, &runtime, &dir);
    let files = files_in(&dir);
    kinds.push(Kind { name: "ranks", runtime, dir, files });
    kinds
}

fn files_in(dir: &Path) -> Vec<PathBuf> {
    names_in(dir).into_iter().map(|name| dir.join(name)).collect()
}

fn flip_many(flips: u64) -> (u64, [u64; 3]) {
    let seed = number("RINGSTOW_SEED", 1);
    let mut random = fastrand::Rng::with_seed(seed);
    let root = scratch();
    let kinds = kinds(root.path());
    let whole: Vec<String> = kinds.iter().map(|k| load(&k.runtime, &k.dir).unwrap()).collect();
    let mut counts = [0; 3];
    for _ in 0..flips {
        let number = random.usize(..kinds.len());
        let Kind { name, runtime, dir, files } = &kinds[number];
        let file = &files[random.usize(..files.len())];
        let bytes = fs::metadata(file).unwrap().len();
        let (at, bit) = (random.u64(..bytes), random.u8(..8));
        let outcome = flip_at(runtime, dir, file, at, bit, &whole[number]);
        // A stripe directory's marker says whose shards are there, which their checksums do too.
        let is_marker = file.ends_with("companion.json");
        if outcome == Outcome::Nothing {
            assert!(
                is_marker,
                "a flip of bit {bit} of byte {at} of {} ({name}) is not found (RINGSTOW_SEED={seed})",
                file.display()
            );
        }
        counts[outcome as usize] += 1;
    }
    // Every flip was taken back.
    for (kind, whole) in kinds.iter().zip(&whole) {
        assert_eq!(&load(&kind.runtime, &kind.dir).unwrap(), whole);
    }
    (flips, counts)
}

#[test]
fn flipped_bit_is_found_or_carries_nothing() {
    let (_, [load, verify, _]) = flip_many(number("RINGSTOW_FLIPS", 400).min(400));
    assert!(load > 0 && verify > 0, "{load} by loads, {verify} by verify alone");
}

/// `make torture-flips` runs it.
#[test]
#[ignore = "takes minutes"]
fn ten_thousand_flipped_bits_are_found_or_carry_nothing() {
    let (flips, [load, verify, nothing]) = flip_many(number("RINGSTOW_FLIPS", 10_000));
    println!(
        "{load} failed the load, {verify} were in headers and padding, which verify reads, {nothing} in stripe markers"
    );
    println!(
        "promise: a flipped bit in any file is found or carries nothing: {flips} flips, 0 broken"
    );
}
