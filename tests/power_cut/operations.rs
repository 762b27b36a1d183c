//! What the power can be cut in.

use crate::common::State;
use crate::saved::Saved;
use ringstow::{Config, Disposal, EngineChoice, Receipt, Result, Runtime, Session, Store};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Shards of some blocks each.
const SIZES: [usize; 5] = [300_000, 1, 700_000, 65_536, 400_001];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// A save to a new path, then `retain`, which removes.
    New,
    /// A save to a new path over recycled files, then `retain`, which recycles.
    Recycled,
    /// A save over an earlier checkpoint.
    Over,
    /// The same in the background.
    Async,
    /// The same over two disks.
    Striped,
    /// The same by two ranks, each a process.
    Ranks,
    /// A save, and the checkpoint's removal.
    Remove,
    /// A model, for other programs.
    Export,
}

pub const OPERATIONS: [Operation; 8] = [
    Operation::New,
    Operation::Recycled,
    Operation::Over,
    Operation::Async,
    Operation::Striped,
    Operation::Ranks,
    Operation::Remove,
    Operation::Export,
];

pub fn state(step: i64) -> State {
    State::new(step, &SIZES)
}

/// How checkpoints are saved and read.
pub struct Machine {
    pub plain: Runtime,
    pub recycling: Runtime,
    pub striping: Runtime,
}

impl Machine {
    pub fn new(saved: &Saved, engine: EngineChoice) -> Self {
        let config = config(engine);
        let new = |config| Runtime::new(config).unwrap();
        Self {
            recycling: new(Config { recycle: true, ..config.clone() }),
            striping: new(Config { stripe: vec![saved.second.clone()], ..config.clone() }),
            plain: new(config),
        }
    }

    pub fn of(&self, operation: Operation) -> &Runtime {
        match operation {
            Operation::Recycled => &self.recycling,
            Operation::Striped => &self.striping,
            _ => &self.plain,
        }
    }

    pub fn store(&self, operation: Operation) -> Store {
        Store::new(self.of(operation).config().clone()).unwrap()
    }
}

fn config(engine: EngineChoice) -> Config {
    let (block_bytes, shard_bytes) = (65_536, 700_000);
    Config { block_bytes, pool_bytes: 8 * block_bytes, shard_bytes, engine, ..Config::default() }
}

/// Saves step `step` there.
pub fn save(machine: &Machine, operation: Operation, step: i64, to: &Path) -> Result<()> {
    match operation {
        Operation::Async => {
            let store = Store::new(machine.plain.config().clone())?;
            store.save_async(state(step).into_save(), to)?.result().map(drop)
        }
        Operation::Ranks => save_by_ranks(machine.plain.config(), step, to),
        Operation::Export => {
            let (state, job) = (state(step), Arc::default());
            ringstow::internals::store::export(&machine.plain, &state.model()?, to, &job).map(drop)
        }
        _ => state(step).save(machine.of(operation), to).map(drop),
    }
}

/// What follows the save.
pub fn clear(operation: Operation, root: &Path, to: &Path) -> Result<()> {
    match operation {
        Operation::New => ringstow::retain(root, 2, Disposal::Remove).map(drop),
        Operation::Recycled => ringstow::retain(root, 2, Disposal::Recycle).map(drop),
        Operation::Remove => ringstow::remove(to, Disposal::Remove).map(drop),
        _ => Ok(()),
    }
}

const RANKS: u32 = 2;

/// Says to a child process which rank of which save it is.
const CHILD: &str = "RINGSTOW_TEST_POWER_CUT_RANK";

fn save_by_ranks(config: &Config, step: i64, to: &Path) -> Result<()> {
    let session = Session::begin(to, RANKS, config)?;
    let outside = tempfile::tempdir().unwrap();
    let receipt_of = |rank: u32| outside.path().join(rank.to_string());
    let start = |rank: u32| {
        Command::new(std::env::current_exe().unwrap())
            .args(["operations::child_that_writes_a_rank", "--exact"])
            .env(CHILD, format!("{rank} {step} {:?}", config.engine))
            .env("RINGSTOW_TEST_POWER_CUT_TO", to)
            .env("RINGSTOW_TEST_POWER_CUT_RECEIPT", receipt_of(rank))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let running: Vec<_> = (0..RANKS).map(start).collect();
    for mut child in running {
        child.wait().unwrap();
    }
    let receipts = (0..RANKS).map(|rank| match std::fs::read(receipt_of(rank)) {
        Ok(bytes) => Receipt::decode(&bytes),
        Err(error) => Err(ringstow::Error::invalid(format!("rank {rank} failed: {error}"))),
    });
    let receipts = receipts.collect::<Result<Vec<_>>>()?;
    session.commit(receipts, state(step).tree()).map(drop)
}

/// A rank's life, when started by [`save_by_ranks`].
#[test]
fn child_that_writes_a_rank() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let path = |name: &str| PathBuf::from(std::env::var_os(name).unwrap());
    let mut words = told.split(' ');
    let mut word = || words.next().unwrap();
    let (rank, step): (u32, i64) = (word().parse().unwrap(), word().parse().unwrap());
    let engine = match word() {
        "Portable" => EngineChoice::Portable,
        _ => EngineChoice::Auto,
    };
    let runtime = Runtime::new(config(engine)).unwrap();
    let to = path("RINGSTOW_TEST_POWER_CUT_TO");
    let receipt = state(step).write_share((rank, RANKS), &runtime, &to).unwrap().encode();
    std::fs::write(path("RINGSTOW_TEST_POWER_CUT_RECEIPT"), receipt).unwrap();
}
