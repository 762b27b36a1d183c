//! What the integration tests share: states that can be told apart, and checks on directories.
#![allow(dead_code)] // every test binary uses a part of it

pub mod copies;
pub mod held;
#[cfg(target_os = "linux")]
pub mod mounts;
pub mod place;
pub mod rig;
pub mod warnings;

use ringstow::internals::engine::Engine;
use ringstow::internals::engine::portable::Portable;
use ringstow::internals::store;
use ringstow::{
    Base, Checkpoint, Config, Dtype, Error, Job, LoadOptions, Loaded, OpenOptions, RankShare,
    Receipt, RetainOptions, Retained, Runtime, SaveReport, Session, StateDict, Store, Swept,
    TensorInfo, Value, VerifyReport,
};
use serde_json::value::RawValue;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Bytes that differ everywhere, the same for the same seed. Stored files hold them (`tests/format`), so the
/// generator (xorshift64) is written out: a crate's may change with its version.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Small blocks and a small pool, so that little data makes many transfers.
pub fn small_config() -> Config {
    Config { block_bytes: 4096, pool_bytes: 8 * 4096, fillers: 2, ..Config::default() }
}

/// A state that is wholly told by its step: a counter and tensors of noise.
pub struct State {
    pub step: i64,
    pub tensors: Vec<(String, Vec<u8>)>,
}

impl State {
    pub fn new(step: i64, sizes: &[usize]) -> Self {
        let tensor = |(i, &len): (usize, &usize)| {
            (format!("layer.{i}.weight"), noise(step as u64 * 1000 + i as u64, len))
        };
        Self { step, tensors: sizes.iter().enumerate().map(tensor).collect() }
    }

    pub fn save(&self, runtime: &Runtime, path: &Path) -> ringstow::Result<SaveReport> {
        self.save_as(runtime, path, &Arc::default())
    }

    /// As [`State::save`], with progress that others see.
    pub fn save_as(
        &self,
        runtime: &Runtime,
        path: &Path,
        job: &Arc<Job>,
    ) -> ringstow::Result<SaveReport> {
        store::save(runtime, &self.to_save()?, path, job)
    }

    pub fn to_save(&self) -> ringstow::Result<StateDict<'_>> {
        let mut state = self.model()?;
        state.value("step", self.step);
        Ok(state)
    }

    /// As [`State::to_save`], for a save in the background.
    pub fn into_save(self) -> StateDict<'static> {
        let mut state = StateDict::new();
        for (name, data) in self.tensors {
            let shape = vec![data.len() as u64];
            state.source(TensorInfo { name, dtype: Dtype::U8, shape }, Box::new(data));
        }
        state.value("step", self.step);
        state
    }

    /// The tensors alone.
    pub fn model(&self) -> ringstow::Result<StateDict<'_>> {
        self.share((0, 1))
    }

    /// The tensors that one of several ranks has.
    pub fn share(&self, (rank, ranks): (u32, u32)) -> ringstow::Result<StateDict<'_>> {
        let mut share = StateDict::new();
        for (name, data) in self.tensors.iter().skip(rank as usize).step_by(ranks as usize) {
            share.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
        }
        Ok(share)
    }

    /// As [`State::save`], with more tensors and a value, in files of their own, that a checkpoint can be slimmed by.
    pub fn save_with_extra(&self, runtime: &Runtime, path: &Path) -> ringstow::Result<SaveReport> {
        self.save_with_extra_from(None, runtime, path)
    }

    /// As [`State::save_with_extra`], linking what a base has of it.
    pub fn save_with_extra_from(
        &self,
        base: Option<Base>,
        runtime: &Runtime,
        path: &Path,
    ) -> ringstow::Result<SaveReport> {
        let extra = noise(77, 30_000);
        let mut state = self.to_save()?;
        for (name, range) in EXTRAS {
            state.bytes(name, Dtype::U8, &[range.len() as u64], &extra[range])?;
        }
        state.value("extra.lr", 0.5).droppable(EXTRA);
        if let Some(base) = base {
            state.base(base);
        }
        store::save(runtime, &state, path, &Arc::default())
    }

    /// As [`State::save_with_extra`], by two ranks that each have some of the tensors and half of one extra tensor.
    pub fn save_with_extra_by_ranks(&self, runtime: &Runtime, path: &Path) -> ringstow::Result<()> {
        self.save_with_extra_by_ranks_from(None, runtime, path)
    }

    /// As [`State::save_with_extra_by_ranks`], linking what a base has of it.
    pub fn save_with_extra_by_ranks_from(
        &self,
        base: Option<Base>,
        runtime: &Runtime,
        path: &Path,
    ) -> ringstow::Result<()> {
        let extra = noise(77, 30_000);
        let session = Session::begin(path, 2, runtime.config())?;
        let write = |rank: u32| -> ringstow::Result<Receipt> {
            let mut share = self.share((rank, 2))?;
            let (name, range) = EXTRAS[rank as usize].clone();
            share.bytes(name, Dtype::U8, &[range.len() as u64], &extra[range])?;
            let half = rank as usize * 5000..(rank as usize + 1) * 5000;
            let info =
                TensorInfo { name: "extra.both".into(), dtype: Dtype::U8, shape: vec![5000] };
            let region = ringstow::Region { shape: vec![10_000], offsets: vec![half.start as u64] };
            share.region(info, region, Box::new(extra[half].to_vec())).droppable(EXTRA);
            if let Some(base) = &base {
                share.base(base.clone());
            }
            let job = Arc::default();
            Ok(store::write_rank(runtime, &share, rank, path, &job)?.0)
        };
        let receipts = vec![write(0)?, write(1)?];
        let extra = ["extra.a", "extra.b", "extra.both"].map(|name| Value::Tensor(name.into()));
        let lr = [Value::Float(0.5)];
        let keys = ["a", "b", "both", "lr"].map(Value::from);
        let extra = keys.into_iter().zip(extra.into_iter().chain(lr)).collect();
        let tree = self.tree_with(vec![(EXTRA.into(), Value::Dict(extra))]);
        session.commit(receipts, tree).map(drop)
    }

    /// As [`State::save`], by several ranks at once that each have some of the tensors.
    pub fn save_by_ranks(&self, ranks: u32, runtime: &Runtime, path: &Path) {
        let session = Session::begin(path, ranks, runtime.config()).unwrap();
        let write = |rank: u32| self.write_share((rank, ranks), runtime, path).unwrap();
        let receipts = std::thread::scope(|scope| {
            let running: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || write(rank))).collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        session.commit(receipts, self.tree()).unwrap();
    }

    /// Writes the tensors that one of several ranks has.
    pub fn write_share(
        &self,
        (rank, ranks): (u32, u32),
        runtime: &Runtime,
        path: &Path,
    ) -> ringstow::Result<Receipt> {
        let (share, job) = (self.share((rank, ranks))?, Arc::default());
        Ok(store::write_rank(runtime, &share, rank, path, &job)?.0)
    }

    /// As [`State::save`], by one of so many ranks that each save by themselves, in a directory of its own. All of them
    /// give the same name to the save.
    pub fn save_alone(
        &self,
        (rank, ranks): (u32, u32),
        save: &str,
        runtime: &Runtime,
        whole: &Path,
    ) {
        let part = whole.join(ringstow::rank_dir(rank));
        let share = RankShare { rank, ranks, save: save.into() };
        let session = Session::begin(&part, 1, runtime.config()).unwrap().rank_share(share);
        let receipt = self.write_share((0, 1), runtime, &part).unwrap();
        session.commit(vec![receipt], self.tree()).unwrap();
    }

    /// What the coordinator commits with the ranks' shares.
    pub fn tree(&self) -> Box<RawValue> {
        self.tree_with(Vec::new())
    }

    fn tree_with(&self, more: Vec<(Value, Value)>) -> Box<RawValue> {
        let tensors = self.tensors.iter();
        let tensors =
            tensors.map(|(name, _)| (Value::from(name.as_str()), Value::Tensor(name.clone())));
        let step = (Value::from("step"), Value::Int(self.step));
        Value::Dict([step].into_iter().chain(tensors).chain(more).collect()).to_json().unwrap()
    }

    /// The checkpoint at `path` is this state, byte by byte.
    #[track_caller]
    pub fn assert_at(&self, runtime: &Runtime, path: &Path) {
        assert_eq!(step_with(runtime.config(), path), self.step);
        self.assert_equals(&load_all(runtime, path).unwrap());
    }

    /// The loaded tensors are this state's, byte by byte.
    #[track_caller]
    pub fn assert_equals(&self, loaded: &Loaded) {
        assert_eq!(self.difference(loaded), None);
    }

    /// What the loaded tensors have that this state has not, or the other way round.
    pub fn difference(&self, loaded: &Loaded) -> Option<String> {
        let count = loaded.tensors().filter(|(name, _)| !is_extra(name)).count();
        if count != self.tensors.len() {
            return Some(format!("{count} tensors, not {}", self.tensors.len()));
        }
        let is_here = |(name, data): &&(String, Vec<u8>)| {
            loaded.tensor(name).is_some_and(|t| t.data() == data)
        };
        let missing = self.tensors.iter().find(|tensor| !is_here(tensor));
        missing.map(|(name, _)| format!("{name} is not of step {}", self.step))
    }
}

/// What [`State::save_with_extra`] adds.
pub const EXTRA: &str = "extra";

/// The tensors of it, and which bytes of the same noise they hold.
const EXTRAS: [(&str, std::ops::Range<usize>); 2] =
    [("extra.a", 0..20_000), ("extra.b", 20_000..30_000)];

/// Whether a tensor is none of a [`State`]'s.
pub fn is_extra(name: &str) -> bool {
    name.starts_with("extra.")
}

/// A number in the environment.
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect(variable))
}

/// The seeds for transfers that are short, interrupted and reordered: `RINGSTOW_FAULT_SEEDS` sets how many. `make
/// torture-faults` is the long form.
pub fn fault_seeds() -> impl Iterator<Item = u64> {
    let first = number("RINGSTOW_SEED", 0);
    first..first + number("RINGSTOW_FAULT_SEEDS", 40)
}

/// Which calls a test has fail, each in a trial of its own: those that one seed chooses, or all (`make torture-calls`).
pub fn some_calls() -> impl Iterator<Item = u64> {
    let step = if std::env::var_os("RINGSTOW_EACH_CALL").is_some() { 1 } else { 12 };
    (1 + number("RINGSTOW_SEED", 0) % step..).step_by(step as usize)
}

/// Runs this test, of this name, in a process of its own, since it changes that or looks at all of it. Whether this is that
/// process: the test is to go on.
#[track_caller]
pub fn is_alone(test: &str) -> bool {
    const ALONE: &str = "RINGSTOW_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let ran = child.args([test, "--exact", "--nocapture"]).env(ALONE, "").output().unwrap();
    let said = [ran.stdout, ran.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    print!("{}", said.concat());
    assert!(ran.status.success() && said[0].contains("1 passed"), "it fails by itself");
    false
}

/// A directory in memory where there is one, for tests that save hundreds of times and do not care
/// for the disk: its syncs cost nothing.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// The counter of the checkpoint at `path`.
#[track_caller]
pub fn step_at(path: &Path) -> i64 {
    step_with(&Config::default(), path)
}

/// As [`step_at`], of a checkpoint that may be striped.
#[track_caller]
pub fn step_with(config: &Config, path: &Path) -> i64 {
    let state = OpenOptions::of(config).open(path).unwrap().state().unwrap();
    state.get("step").and_then(Value::as_int).expect("the state has a step")
}

pub fn load_all(runtime: &Runtime, path: &Path) -> ringstow::Result<Loaded> {
    load_opened(runtime, &OpenOptions::of(runtime.config()).open(path)?)
}

pub fn load_opened(runtime: &Runtime, checkpoint: &Checkpoint) -> ringstow::Result<Loaded> {
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
    checkpoint.load_names(names, on(runtime))
}

/// A load by this runtime, all else as ever.
pub fn on(runtime: &Runtime) -> LoadOptions<'_> {
    LoadOptions { runtime: Some(runtime), ..LoadOptions::default() }
}

/// Reads all bytes of a checkpoint.
pub fn verify(runtime: &Runtime, path: &Path) -> ringstow::Result<VerifyReport> {
    store::verify(runtime, path, &Arc::default())
}

/// All bytes of a checkpoint are as they were written.
#[track_caller]
pub fn assert_undamaged(runtime: &Runtime, path: &Path) {
    let damage = verify(runtime, path).unwrap().damage;
    assert!(damage.is_empty(), "{damage:?}");
}

/// Retains, after checking that the plan says the same.
#[track_caller]
pub fn retain_as_planned(root: &Path, options: &RetainOptions, config: &Config) -> Retained {
    let plan = store::retain_plan(root, options, config).unwrap();
    let done = store::retain(root, options, config).unwrap();
    assert_eq!(plan, done);
    done
}

/// Prunes, after checking that the plan says the same.
#[track_caller]
pub fn prune_as_planned(dir: &Path, config: &Config) -> Swept {
    let plan = store::prune_plan(dir, config).unwrap();
    let done = store::prune(dir, config).unwrap();
    assert_eq!(plan, done);
    done
}

/// All paths below a directory, each directory before what is in it. Links are not followed.
pub fn below(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            found.extend(below(&entry.path()));
        }
        found.insert(entry.path());
    }
    found
}

/// Copies a directory and all that is in it.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for path in below(from) {
        let copied = to.join(path.strip_prefix(from).unwrap());
        match path.is_dir() {
            true => fs::create_dir(copied).unwrap(),
            false => drop(fs::copy(path, copied).unwrap()),
        }
    }
}

/// The shards in a directory, by name.
#[track_caller]
pub fn shards_in(dir: &Path) -> Vec<PathBuf> {
    let shards = names_in(dir).into_iter().filter(|name| name.ends_with(".safetensors"));
    shards.map(|name| dir.join(name)).collect()
}

/// Lets user 4242 read a file, by an ACL. Not all file systems have them.
#[cfg(target_os = "linux")]
pub fn set_acl(path: &Path) -> bool {
    // Version 2; then tag, rights and id: owner, user 4242, group, mask, others.
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, !0), (2, 4, 4242), (4, 4, !0), (16, 4, !0), (32, 4, !0)];
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        acl.extend(tag.to_le_bytes());
        acl.extend(rights.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(path, "system.posix_acl_access", &acl, flags).is_ok()
}

/// Names in a directory, sorted.
#[track_caller]
pub fn names_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The directory holds the manifest and the shards that it lists, and nothing else.
#[track_caller]
pub fn assert_no_litter(dir: &Path) {
    assert_no_litter_in(&Config::default(), dir);
}

/// As [`assert_no_litter`], also of the directories on other disks, each of which has a marker and a
/// shard at least.
#[track_caller]
pub fn assert_no_litter_in(config: &Config, dir: &Path) {
    let checkpoint = OpenOptions::of(config).open(dir).unwrap();
    let mut listed: Vec<String> =
        checkpoint.manifest().files.iter().map(|file| file.name.clone()).collect();
    listed.push("manifest.json".into());
    listed.sort();
    let mut present = names_in(dir);
    for stripe in &config.stripe {
        let mut names = names_in(&stripe.join(dir.file_name().unwrap()));
        names.retain(|name| name != "companion.json");
        assert!(!names.is_empty(), "nothing in {}", stripe.display());
        present.append(&mut names);
    }
    present.sort();
    assert_eq!(present, listed);
}

/// The system's error number, if it was the system that refused.
pub fn errno(error: &Error) -> Option<i32> {
    error.io_error()?.raw_os_error()
}

/// Ringstow's own engines, by name.
pub fn engine(name: &str) -> io::Result<Box<dyn Engine>> {
    match name {
        "portable" => Ok(Box::new(Portable::new(4)?)),
        #[cfg(all(target_os = "linux", feature = "uring"))]
        "uring" => {
            use ringstow::Switch;
            use ringstow::internals::engine::uring::Uring;
            Ok(Box::new(Uring::new(4, None, Switch::Off)?))
        }
        #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
        "tokio-uring" => {
            use ringstow::Switch;
            use ringstow::internals::engine::tokio_uring::TokioUring;
            Ok(Box::new(TokioUring::new(4, None, Switch::Off)?))
        }
        other => panic!("no engine {other}"),
    }
}

/// Names of the engines that this build has.
pub const ENGINES: &[&str] = &[
    "portable",
    #[cfg(all(target_os = "linux", feature = "uring"))]
    "uring",
    #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
    "tokio-uring",
];

/// Sizes in bytes of the tensors of [`saved`]: empty, over a block, whole pages, odd.
pub const SIZES: [usize; 4] = [0, 5000, 12_288, 20_001];

/// A runtime of small buffers.
pub fn runtime() -> Runtime {
    Runtime::new(small_config()).unwrap()
}

/// A store of small buffers.
pub fn store() -> Store {
    Store::new(small_config()).unwrap()
}

/// What a coordinator commits that has no values.
pub fn no_values() -> Box<RawValue> {
    Value::Dict(Vec::new()).to_json().unwrap()
}

/// A checkpoint of step 1 and the directory that it is in.
pub fn saved() -> (tempfile::TempDir, PathBuf) {
    let root = scratch();
    let dir = root.path().join("ckpt");
    State::new(1, &SIZES).save(&runtime(), &dir).unwrap();
    (root, dir)
}

/// A manifest whose text up to its trailer is `body`, as if ringstow had written it.
pub fn sealed(body: &[u8]) -> Vec<u8> {
    let trailer = format!(",\"crc32\":\"{:08x}\"}}\n", crc32fast::hash(body));
    [body, trailer.as_bytes()].concat()
}

/// The shard of a checkpoint that was saved once.
pub fn shard_of(dir: &Path) -> PathBuf {
    dir.join("rank00000-0.safetensors")
}

/// Flips a bit of the byte at an offset of a file.
pub fn flip(path: &Path, offset: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[offset] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Loading all of it fails, and so does opening, unless only the bytes are damaged.
#[track_caller]
pub fn load_error(dir: &Path) -> Error {
    load_all(&runtime(), dir).unwrap_err()
}

/// The message holds each of the words.
#[track_caller]
pub fn assert_says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}
