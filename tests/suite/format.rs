//! The bytes on disk stay what they were, and what was saved before still loads.
//!
//! `tests/format/v1-0.1.0` has a small checkpoint of every kind, as that version wrote it. The tests save each
//! anew and compare it byte by byte, except for time, writer and directory (see [`settled`]). To change the
//! stored files on purpose, run `cargo test --test suite format:: -- --ignored`, and say in the commit why older
//! readers still understand them. `python/tests/test_format.py` does the same for what only Python writes.
#![cfg(unix)]

use crate::common::{below, on, scratch, sealed, small_config, store};
use ringstow::{
    Checkpoint, Config, Dtype, Item, OpenOptions, RankShare, Region, Runtime, Session, StateDict,
    Store, TensorInfo, Value,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const STORED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/format/v1-0.1.0");

/// A state and the way it is saved: below `root`, which is empty.
struct Case {
    name: &'static str,
    tensors: Vec<Tensor>,
    values: Vec<(&'static str, Value)>,
    save: fn(&Case, root: &Path),
    /// The checkpoint below the root; `None` for what has no manifest.
    path: Option<&'static str>,
}

#[derive(Debug, PartialEq)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

impl Case {
    fn new(name: &'static str, save: fn(&Case, &Path)) -> Self {
        let sizes = [0, 300, 4096, 1001, 9000];
        let tensor = |(i, len)| tensor(&format!("layer.{i}"), Dtype::U8, &[len]);
        let tensors = sizes.into_iter().enumerate().map(tensor).collect();
        Self { name, tensors, values: vec![("step", 7.into())], save, path: Some("c") }
    }

    fn state(&self) -> StateDict<'_> {
        let mut state = StateDict::new();
        for tensor in &self.tensors {
            state.bytes(&tensor.name, tensor.dtype, &tensor.shape, &tensor.bytes).unwrap();
        }
        for (name, value) in &self.values {
            state.value(*name, value.clone());
        }
        state
    }

    fn save_as(&self, root: &Path, config: &Config) {
        ringstow::Store::new(config.clone()).unwrap().save(&self.state(), root.join("c")).unwrap();
    }

    /// The tree that the coordinator of several ranks commits.
    fn tree(&self) -> Box<serde_json::value::RawValue> {
        let tensors = self.tensors.iter().map(|t| {
            let name = t.name.as_str();
            (Value::from(name), Value::Tensor(name.into()))
        });
        let values = self.values.iter().map(|(name, value)| (Value::from(*name), value.clone()));
        Value::Dict(tensors.chain(values).collect()).to_json().unwrap()
    }
}

/// The bytes of the stored tensors: xorshift64, spelled out here, since no other generator may ever take its place.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}

/// A tensor of noise; of zeros and ones if it is one of truths.
fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    let len = shape.iter().product::<u64>() * dtype.bits() / 8;
    let mut bytes = noise(name.bytes().map(u64::from).sum(), len as usize);
    if dtype == Dtype::BOOL {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new("one-file", |case, root| case.save_as(root, &small_config())),
        Case::new("several-files", |case, root| {
            case.save_as(root, &Config { files: 3, ..small_config() });
        }),
        Case::new("shard-bytes", |case, root| {
            case.save_as(root, &Config { shard_bytes: 8192, ..small_config() });
        }),
        Case::new("default-blocks", |case, root| case.save_as(root, &Config::default())),
        Case::new("saved-again", |case, root| {
            store().save(&StateDict::new(), root.join("c")).unwrap();
            case.save_as(root, &small_config());
        }),
        Case::new("step", |case, root| {
            let mut state = case.state();
            state.step(12);
            store().save(&state, root.join("c")).unwrap();
        }),
        Case::new("metrics", |case, root| {
            let mut state = case.state();
            let metrics = [("loss", 0.1), ("steps", 3.0), ("\u{fc} \"", -0.0), ("$float", 1e300)];
            let not_finite =
                [("nan", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)];
            state.step(12).metrics(metrics.into_iter().chain(not_finite)).unwrap();
            store().save(&state, root.join("c")).unwrap();
        }),
        Case::new("hashes", |case, root| {
            let mut state = case.state();
            state.base(ringstow::Base::none());
            store().save(&state, root.join("c")).unwrap();
        }),
        dtypes(),
        values(),
        Case::new("object", save_object),
        Case::new("ranks", save_ranks),
        Case {
            path: Some("c/rank00000"),
            ..Case::new("rank-shares", |case, root| {
                (0..2).for_each(|rank| save_rank_share(case, root, rank));
            })
        },
        Case {
            path: Some("run/step-1"),
            ..Case::new("striped", |case, root| {
                let config = Config { files: 2, ..striped(root) };
                fs::create_dir(root.join("disk0")).unwrap();
                ringstow::Store::new(config.clone())
                    .unwrap()
                    .save(&case.state(), root.join("run/step-1"))
                    .unwrap();
            })
        },
        Case { path: None, ..Case::new("export", |case, root| export(case, root, 0)) },
        Case { path: None, ..Case::new("export-shards", |case, root| export(case, root, 8192)) },
    ]
}

/// Every dtype, without dimensions, empty, and under names that files have another use for.
fn dtypes() -> Case {
    let all = Dtype::ALL.iter().map(|&dtype| tensor(dtype.name(), dtype, &[2, 4]));
    let scalar = tensor("scalar", Dtype::F64, &[]);
    let empty = tensor("empty", Dtype::BF16, &[3, 0, 2]);
    let odd = ["__metadata__", "__ringstow__.x", "ü", "", "a/b.c"];
    let named = odd.map(|name| tensor(name, Dtype::F32, &[3]));
    Case {
        tensors: all.chain([scalar, empty]).chain(named).collect(),
        ..Case::new("dtypes", |case, root| case.save_as(root, &small_config()))
    }
}

fn values() -> Case {
    let nested = Value::List(vec![Value::Tuple(vec![1.into(), Value::Null]), Value::List(vec![])]);
    let other_keys = Value::Dict(vec![(1.into(), "a".into()), (Value::Null, 2.into())]);
    let tagged = Value::Dict(vec![("$key".into(), 1.into())]);
    let values = vec![
        ("null", Value::Null),
        ("true", true.into()),
        ("int", (-7).into()),
        ("2^53", (1i64 << 53).into()),
        ("2^53+1", ((1i64 << 53) + 1).into()),
        ("2^64-1", u64::MAX.into()),
        ("float", 0.1.into()),
        ("round", 3.0.into()),
        ("large", 1e300.into()),
        ("-0.0", (-0.0).into()),
        ("inf", f64::INFINITY.into()),
        ("-inf", f64::NEG_INFINITY.into()),
        ("nan", f64::NAN.into()),
        ("text", "ä \"\\\n\u{1}\u{1f600}".into()),
        ("bytes", vec![0u8, 255, 7].into()),
        ("nested", nested),
        ("dict", Value::Dict(vec![("a".into(), Value::Dict(vec![]))])),
        ("dict of other keys", other_keys),
        ("dict of a tag", tagged),
        ("tied", Value::List(vec![Value::Tensor("w".into()), Value::Tensor("w".into())])),
    ];
    Case {
        tensors: vec![tensor("w", Dtype::F32, &[2, 3])],
        values,
        ..Case::new("values", |case, root| case.save_as(root, &small_config()))
    }
}

fn save_object(case: &Case, root: &Path) {
    let mut state = case.state();
    let info = TensorInfo { name: "opaque".into(), dtype: Dtype::U8, shape: vec![11] };
    let item = Item { info, region: None, object: true };
    state.item(item, Box::new(b"some object".to_vec()));
    store().save(&state, root.join("c")).unwrap();
}

/// Two ranks: each has every other tensor and its rows of the last one.
fn save_ranks(case: &Case, root: &Path) {
    let dir = root.join("c");
    let session = Session::begin(&dir, 2, &small_config()).unwrap().step(3);
    let (shared, own) = case.tensors.split_last().unwrap();
    let half = shared.bytes.len() / 2;
    let write = |rank: usize| {
        let mut state = StateDict::new();
        for tensor in own.iter().skip(rank).step_by(2) {
            state.bytes(&tensor.name, tensor.dtype, &tensor.shape, &tensor.bytes).unwrap();
        }
        rows(&mut state, shared, half * rank, half);
        store().write_rank(&state, rank as u32, &dir).unwrap().0
    };
    session.commit(vec![write(0), write(1)], case.tree()).unwrap();
}

/// Rows of a tensor of one dimension.
fn rows(state: &mut StateDict<'_>, tensor: &Tensor, from: usize, len: usize) {
    let Tensor { name, dtype, shape, bytes } = tensor;
    let info = TensorInfo { name: name.clone(), dtype: *dtype, shape: vec![len as u64] };
    let region = Region { shape: shape.clone(), offsets: vec![from as u64] };
    state.region(info, region, Box::new(bytes[from..from + len].to_vec()));
}

/// A rank that saves by itself: all tensors, but of a further one only some rows.
fn save_rank_share(case: &Case, root: &Path, rank: u32) {
    let dir = root.join(format!("c/rank{rank:05}"));
    let part_of = RankShare { rank, ranks: 2, save: "0123456789abcdef-1".into() };
    let session = Session::begin(&dir, 1, &small_config()).unwrap().rank_share(part_of);
    let mut state = case.state();
    rows(&mut state, &tensor("shared", Dtype::U8, &[4000]), 2000 * rank as usize, 1500);
    let (receipt, _) = store().write_rank(&state, 0, &dir).unwrap();
    session.commit(vec![receipt], case.tree()).unwrap();
}

fn striped(root: &Path) -> Config {
    Config { stripe: vec![root.join("disk0")], ..small_config() }
}

fn export(case: &Case, root: &Path, shard_bytes: u64) {
    let mut state = StateDict::new();
    for Tensor { name, dtype, shape, bytes } in &case.tensors {
        let info = TensorInfo { name: name.clone(), dtype: *dtype, shape: shape.clone() };
        state.source(info, Box::new(bytes.clone()));
    }
    let store = Store::new(Config { shard_bytes, ..small_config() }).unwrap();
    store.export_async(state, root.join("c")).unwrap().result().unwrap();
}

/// Every file below a directory, by its path there.
fn files_in(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = below(root).into_iter().filter(|path| path.is_file());
    let named =
        |path: PathBuf| (path.strip_prefix(root).unwrap().to_path_buf(), settled(&path, root));
    files.map(named).collect()
}

/// A file with what changes from save to save set to what it is in the stored ones: the directory that
/// the test saved in, when it did, and by which version. A manifest is sealed again.
fn settled(path: &Path, root: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    if path.extension().is_none_or(|extension| extension != "json") {
        return bytes;
    }
    let text = String::from_utf8(bytes).unwrap().replace(root.to_str().unwrap(), "/root");
    let Some((text, trailer)) = text.rsplit_once(",\"crc32\":") else { return text.into() };
    assert_eq!(trailer.len(), "\"01234567\"}\n".len());
    let text = with_field(text, "\"created_unix_ms\":", "0");
    let text = with_field(&text, "\"writer\":", "\"0.1.0\"");
    let text = match text.split_once("\"sequence\":") {
        Some((before, after)) => {
            format!(
                "{before}\"sequence\":1{}",
                after.trim_start_matches(|c: char| c.is_ascii_digit())
            )
        }
        None => text,
    };
    sealed(text.as_bytes())
}

/// JSON with another value for a field that comes once.
fn with_field(text: &str, field: &str, value: &str) -> String {
    let (before, after) = text.split_once(field).expect(field);
    let (_, after) = after.split_once(',').unwrap();
    format!("{before}{field}{value},{after}")
}

fn save_anew(case: &Case) -> BTreeMap<PathBuf, Vec<u8>> {
    let root = scratch();
    let root = root.path().canonicalize().unwrap();
    (case.save)(case, &root);
    files_in(&root)
}

#[test]
fn each_kind_of_save_writes_the_stored_bytes() {
    for case in cases() {
        let (saved, stored) = (save_anew(&case), files_in(&Path::new(STORED).join(case.name)));
        let names = |files: &BTreeMap<PathBuf, _>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&saved), names(&stored), "{}", case.name);
        for (name, bytes) in saved {
            let (case, old) = (case.name, &stored[&name]);
            let at = bytes.iter().zip(old).position(|(new, old)| new != old);
            assert!(bytes == *old, "{case}/{} differs at {at:?}", name.display());
        }
    }
}

#[test]
fn stored_checkpoints_load_with_their_values() {
    for case in cases() {
        let root = Path::new(STORED).join(case.name);
        let config = if case.name == "striped" { striped(&root) } else { small_config() };
        let checkpoint = match case.path {
            Some(path) => OpenOptions::of(&config).open(root.join(path)).unwrap(),
            None => OpenOptions::new().foreign(true).open(root.join("c")).unwrap(),
        };
        let names = case.tensors.iter().map(|tensor| &tensor.name);
        let runtime = Runtime::new(config).unwrap();
        let loaded = checkpoint.load_names(names, on(&runtime)).unwrap();
        for tensor in &case.tensors {
            let view = loaded.tensor(&tensor.name).unwrap();
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            let bytes = view.data().to_vec();
            let got = Tensor { name: tensor.name.clone(), dtype, shape, bytes };
            assert_eq!(&got, tensor, "{}", case.name);
        }
        let state = checkpoint.state().unwrap();
        for (name, value) in case.values.iter().filter(|_| case.path.is_some()) {
            let got = state.get(name).unwrap();
            assert_eq!(format!("{got:?}"), format!("{value:?}"), "{name} of {}", case.name);
        }
    }
}

#[test]
fn steps_that_were_saved_before_there_were_places_count_and_come_first() {
    let old = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/format/before-places");
    let root = scratch();
    for (name, to) in [("step/c", "step-12"), ("ranks/c", "step-3")] {
        let to = root.path().join(to);
        fs::create_dir_all(&to).unwrap();
        for file in fs::read_dir(Path::new(old).join(name)).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    let mut state = StateDict::new();
    state.step(7);
    ringstow::save(&state, root.path().join("step-7")).unwrap();
    let found = ringstow::steps(root.path()).unwrap();
    assert_eq!(found.iter().map(|one| one.step).collect::<Vec<_>>(), [Some(3), Some(7), Some(12)]);
    assert!(found.iter().all(|one| one.saved_as.is_none()));
    assert_eq!(
        found.iter().map(|one| one.order.age.sequence > 0).collect::<Vec<_>>(),
        [false, true, false]
    );
}

#[test]
fn stored_metrics_come_back() {
    let read = Checkpoint::open(Path::new(STORED).join("metrics/c")).unwrap().info().metrics;
    let expected = [
        ("$float", 1e300),
        ("-inf", f64::NEG_INFINITY),
        ("inf", f64::INFINITY),
        ("loss", 0.1),
        ("nan", f64::NAN),
        ("steps", 3.0),
        ("\u{fc} \"", -0.0),
    ];
    let bits = |number: f64| number.to_bits();
    let read: Vec<(&str, u64)> = read.iter().map(|(name, &n)| (&**name, bits(n))).collect();
    assert_eq!(read, expected.map(|(name, number)| (name, bits(number))));
}

#[test]
#[ignore = "writes tests/format anew; run it where the format changes and say why"]
fn store_each_kind_of_save() {
    for case in cases() {
        let dir = Path::new(STORED).join(case.name);
        drop(fs::remove_dir_all(&dir));
        for (name, bytes) in save_anew(&case) {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
}
