//! One program on one host: a process of its own, which is this test binary again.

use crate::common::{State, load_opened};
use cut_disk::run;
use ringstow::internals::{
    store::{export, remove_checkpoint},
    sys::chance::{Chance, fix},
};
use ringstow::{
    Config, Disposal, Dtype, EngineChoice, Error, Loaded, OpenOptions, Pruning, Receipt,
    RetainOptions, Runtime, Session, StateDict, Store, Wanted,
};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The [`Order`] of a child; set only for it.
const ORDER: &str = "RINGSTOW_TEST_HOSTS_ORDER";

/// Three shards of some blocks each, with a tensor across their ends.
const SIZES: [usize; 4] = [40_000, 1, 70_000, 5000];
const RANKS: u32 = 2;

/// Below the share.
pub const STRIPE: &str = "stripe";
/// The kind of an error that means that there is no checkpoint.
pub const NONE: &str = "None";

/// What a program does. Each save has a number of its own, which identifies its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Job {
    Save(i64),
    SaveByRanks(i64),
    /// Begins a session for two ranks, is rank 0, gets all receipts and commits.
    Coordinate(i64),
    /// Is rank 1 of that session.
    Rank(i64),
    Load,
    Latest,
    Retain(usize),
    Prune,
    /// Prunes with the promise that nobody saves, which leaves nothing alone.
    Clean,
    Remove,
    /// Writes a model: in one file if its number is even, otherwise in several with an index.
    Export(i64),
    /// Reads a model.
    Read,
    /// Removes a model, as its user does.
    Discard,
}

impl Job {
    /// The state that it saves as a whole.
    pub fn saves(&self) -> Option<i64> {
        match *self {
            Self::Save(id) | Self::SaveByRanks(id) | Self::Coordinate(id) => Some(id),
            _ => None,
        }
    }

    /// The model that it exports.
    pub fn exports(&self) -> Option<i64> {
        match *self {
            Self::Export(id) => Some(id),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    pub job: Job,
    /// Below the mount point.
    pub at: PathBuf,
    pub portable: bool,
    /// Whether the mount passes locks on. Of FUSE nobody can know, so the program takes it for NFS.
    pub shared_locks: bool,
    /// Whether it stripes checkpoints over `stripe` below the mount point.
    pub striped: bool,
    /// What its host's clock is wrong by at each call, in milliseconds, over and over; empty for a clock that is right.
    pub clock: Vec<i64>,
}

/// The clock of a host. It is wrong, and may be set at any call.
struct Clock(Vec<i64>);

impl Chance for Clock {
    fn now_unix_ms(&mut self) -> u64 {
        self.0.rotate_left(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
        now.saturating_add(self.0[0]).max(0) as u64
    }

    fn random(&mut self) -> u64 {
        fastrand::u64(..)
    }
}

/// What became of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Outcome {
    Done(Seen),
    /// The error, and its kind.
    Refused(String, String),
    /// It was killed before its end.
    Killed,
}

/// What a program saw or did.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Seen {
    /// The state that it loaded, each byte compared.
    pub loaded: Option<i64>,
    /// The newest checkpoint.
    pub newest: Option<PathBuf>,
    /// The checkpoints that it removed.
    pub removed: Vec<PathBuf>,
}

/// Where every host mounts the share: a checkpoint has the same path on all.
fn common_path(point: &Path) -> PathBuf {
    point.with_file_name("share")
}

/// Moves this thread's view of a host's mount to the [`common_path`].
fn mount_as_all_hosts_do(point: &Path) -> PathBuf {
    let path = common_path(point);
    cut_disk::unshare_mounts().unwrap();
    let [from, to] = [point, &path].map(|path| path.to_str().unwrap());
    run("mount", &["--bind", from, to]).unwrap();
    path
}

fn config(portable: bool, stripe: Option<PathBuf>) -> Config {
    let engine = if portable { EngineChoice::Portable } else { EngineChoice::Auto };
    let (block_bytes, shard_bytes) = (16_384, 60_000);
    let config = Config { block_bytes, shard_bytes, engine, ..Config::default() };
    let stripe = stripe.into_iter().collect();
    Config { pool_bytes: 8 * block_bytes, fillers: 1, stripe, ..config }
}

/// A program's life, when a host starts it; nothing in an ordinary run.
#[test]
fn program_of_a_host() {
    let Ok(order) = std::env::var(ORDER) else { return };
    let (point, order): (PathBuf, Order) = serde_json::from_str(&order).unwrap();
    if !order.clock.is_empty() {
        fix(Clock(order.clock.clone()));
    }
    let outcome = match order.carry_out(&mount_as_all_hosts_do(&point)) {
        Ok(seen) => Outcome::Done(seen),
        Err(error) => {
            let name = format!("{error:?}");
            let kind = match is_none(&error) {
                true => NONE,
                false => name.split(|c: char| !c.is_alphanumeric()).next().unwrap(),
            };
            Outcome::Refused(kind.to_owned(), error.to_string())
        }
    };
    say("outcome", &outcome);
}

fn say(what: &str, value: &impl Serialize) {
    println!("\n{what} {}", serde_json::to_string(value).unwrap());
}

impl Order {
    fn carry_out(&self, point: &Path) -> Result<Seen, Error> {
        ringstow::internals::sys::late::look_at_once();
        let stripe = self.striped.then(|| point.join(STRIPE));
        let (runtime, path) = (Runtime::new(config(self.portable, stripe))?, point.join(&self.at));
        let store = Store::new(runtime.config().clone())?;
        let below = |path: PathBuf| path.strip_prefix(point).unwrap().to_path_buf();
        let mut seen = Seen::default();
        match self.job {
            Job::Save(id) => drop(State::new(id, &SIZES).save(&runtime, &path)?),
            Job::SaveByRanks(id) => {
                let session = Session::begin(&path, RANKS, runtime.config())?;
                let state = State::new(id, &SIZES);
                let write = |rank| state.write_share((rank, RANKS), &runtime, &path);
                session.commit((0..RANKS).map(write).collect::<Result<_, _>>()?, state.tree())?;
            }
            Job::Coordinate(id) => {
                let session = Session::begin(&path, RANKS, runtime.config())?;
                say("begun", &());
                let state = State::new(id, &SIZES);
                say("receipt", &state.write_share((0, RANKS), &runtime, &path)?);
                let mut receipts = String::new();
                std::io::stdin().read_line(&mut receipts).unwrap();
                session.commit(serde_json::from_str(&receipts).unwrap(), state.tree())?;
            }
            Job::Rank(id) => {
                let state = State::new(id, &SIZES);
                say("receipt", &state.write_share((1, RANKS), &runtime, &path)?);
            }
            Job::Load => seen.loaded = Some(load(&runtime, &path)?),
            Job::Latest => seen.newest = store.latest(&path, &Wanted::default())?.map(below),
            Job::Retain(keep) => {
                let retained = store.retain(&path, &RetainOptions::new(keep))?;
                seen.removed = retained.removed.into_iter().map(below).collect();
            }
            Job::Prune => drop(store.prune(&path)?),
            Job::Clean => {
                let alone = Pruning { no_other_writers: true, ..Pruning::default() };
                let swept = store.prune_with(&path, alone)?;
                assert!(swept.left.is_empty(), "LEFT: {:?}", swept.left);
            }
            Job::Remove => {
                remove_checkpoint(&path, Disposal::Remove, runtime.config())?;
                seen.removed.push(self.at.clone());
            }
            Job::Export(id) => export_model(id, runtime.config(), &path)?,
            Job::Read => seen.loaded = Some(read_model(&runtime, &path)?),
            Job::Discard => std::fs::remove_dir_all(&path).unwrap(),
        }
        Ok(seen)
    }
}

fn export_model(id: i64, config: &Config, path: &Path) -> Result<(), Error> {
    let shard_bytes = if id % 2 == 0 { 0 } else { config.shard_bytes };
    let runtime = Runtime::new(Config { shard_bytes, ..config.clone() })?;
    let (state, number, mut model) = (State::new(id, &SIZES), id.to_le_bytes(), StateDict::new());
    model.bytes("id", Dtype::I64, &[], &number)?;
    for (name, data) in &state.tensors {
        model.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
    }
    export(&runtime, &model, path, &Arc::default()).map(drop)
}

/// Reads a model, and returns which it is. Panics if it is not wholly that model.
fn read_model(runtime: &Runtime, path: &Path) -> Result<i64, Error> {
    let model = OpenOptions::new().foreign(true).open(path)?;
    let loaded = load_opened(runtime, &model)?;
    let number = loaded.tensor("id").expect("MIXED: no number").data();
    let id = i64::from_le_bytes(number.try_into().unwrap());
    assert_same(id, &loaded, 1);
    Ok(id)
}

fn assert_same(id: i64, loaded: &Loaded, others: usize) {
    let state = State::new(id, &SIZES);
    assert_eq!(loaded.tensors().count(), state.tensors.len() + others, "MIXED");
    for (name, data) in &state.tensors {
        assert!(loaded.tensor(name).unwrap().data() == data, "MIXED: {name} is not of state {id}");
    }
}

/// Loads a checkpoint, and returns which state it is. Panics if it is not wholly that state.
fn load(runtime: &Runtime, path: &Path) -> Result<i64, Error> {
    let checkpoint = OpenOptions::of(runtime.config()).open(path)?;
    let loaded = match load_opened(runtime, &checkpoint) {
        // As a trainer does: it opens the newer one.
        Err(Error::Replaced { .. }) => return load(runtime, path),
        loaded => loaded?,
    };
    let id = checkpoint.value("step")?.as_int().unwrap();
    assert_same(id, &loaded, 0);
    Ok(id)
}

/// A program that runs.
pub struct Running {
    child: Child,
    told: BufReader<ChildStdout>,
    stdin: ChildStdin,
}

impl Running {
    /// Starts a program on the host with this mount point, and kills it before its `kill`th system call.
    pub fn start(point: &Path, order: &Order, kill: Option<u64>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        if let Some(call) = kill {
            command.env("RINGSTOW_TEST_SEAM", format!("kill:{call}"));
        }
        if order.shared_locks {
            let path = common_path(point);
            command.env("RINGSTOW_TEST_FILE_SYSTEM", format!("nfs4::{}", path.display()));
        }
        let mut child = command
            .args(["--exact", "job::program_of_a_host", "--nocapture"])
            .env(ORDER, serde_json::to_string(&(point, order)).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let told = BufReader::new(child.stdout.take().unwrap());
        let stdin = child.stdin.take().unwrap();
        Self { child, told, stdin }
    }

    /// What it says under a name; `None` if it ends first, or says its outcome.
    pub fn says<T: serde::de::DeserializeOwned>(&mut self, what: &str) -> Result<T, Outcome> {
        let mut line = String::new();
        while self.told.read_line(&mut line).unwrap() > 0 {
            let (word, said) = line.trim_end().split_once(' ').unwrap_or_default();
            if word == what {
                return Ok(serde_json::from_str(said).unwrap());
            }
            if word == "outcome" {
                return Err(serde_json::from_str(said).unwrap());
            }
            line.clear();
        }
        Err(Outcome::Killed)
    }

    /// Gives the coordinator all receipts.
    pub fn give(&mut self, receipts: &[Receipt]) {
        // It may have been killed.
        let _ = writeln!(self.stdin, "{}", serde_json::to_string(receipts).unwrap());
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Outcome {
        let outcome = match self.says::<()>("nothing") {
            Ok(()) => unreachable!(),
            Err(outcome) => outcome,
        };
        drop(self.stdin);
        let status = self.child.wait().unwrap();
        let killed = status.signal() == Some(nix::libc::SIGABRT);
        assert!(killed || status.success(), "a program failed: {status}");
        if killed { Outcome::Killed } else { outcome }
    }
}

/// Whether an error means that there is no checkpoint, and never claims damage.
pub fn is_none(error: &Error) -> bool {
    matches!(error, Error::NoCheckpoint { .. } | Error::NotCommitted { .. })
        || error.io_error().is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}
