//! A checkpoint that is saved over in each of the ways which make different system calls, also by a child process.

use super::{State, assert_no_litter_in, small_config};
use ringstow::internals::store::export;
use ringstow::{Base, Config, Runtime, Session};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Of the tensors: each of the two shards has some.
pub const SIZES: [usize; 3] = [5000, 12_288, 20_001];

/// Says to a child process where it saves, and in which way.
const CHILD_DIR: &str = "RINGSTOW_TEST_EACH_CALL_DIR";
const CHILD_WAY: &str = "RINGSTOW_TEST_EACH_CALL_WAY";

/// The ways of saving that make different calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    Plain,
    Recycled,
    Striped,
    ByRanks,
}

pub const WAYS: [Way; 4] = [Way::Plain, Way::Recycled, Way::Striped, Way::ByRanks];

/// A directory of checkpoints, and what saves into it.
pub struct Place {
    pub way: Way,
    pub root: PathBuf,
    pub runtime: Runtime,
}

impl Place {
    pub fn new(way: Way, root: &Path) -> Self {
        Self::with_config(way, root, small_config())
    }

    pub fn with_config(way: Way, root: &Path, config: Config) -> Self {
        let mut config = Config { files: 2, recycle: way == Way::Recycled, ..config };
        if way == Way::Striped {
            config.stripe = vec![root.join("disk")];
        }
        Self { way, root: root.into(), runtime: Runtime::new(config).unwrap() }
    }

    /// With the checkpoint of step 1.
    pub fn with_step_1(way: Way, root: &Path) -> Self {
        std::fs::create_dir(root.join("disk")).unwrap();
        let place = Self::new(way, root);
        if way == Way::Recycled {
            place.save(0).unwrap(); // its files are the recycled ones of the next saves
        }
        place.save(1).unwrap();
        place
    }

    /// The directory of all checkpoints.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    pub fn dir(&self) -> PathBuf {
        self.run().join("checkpoint")
    }

    pub fn config(&self) -> &Config {
        self.runtime.config()
    }

    pub fn save(&self, step: i64) -> ringstow::Result<()> {
        self.save_to(step, &self.dir())
    }

    pub fn save_to(&self, step: i64, dir: &Path) -> ringstow::Result<()> {
        let state = State::new(step, &SIZES);
        if self.way != Way::ByRanks {
            return state.save(&self.runtime, dir).map(drop);
        }
        let session = Session::begin(dir, 2, self.config())?;
        let write = |rank| state.write_share((rank, 2), &self.runtime, dir);
        let receipts = [write(0)?, write(1)?];
        session.commit(receipts.into(), state.tree()).map(drop)
    }

    /// As [`Place::save_to`], with tensors that all steps have, linked from a base if that has them.
    pub fn save_from(&self, base: Base, step: i64, dir: &Path) -> ringstow::Result<()> {
        let (state, base) = (State::new(step, &SIZES), Some(base));
        match self.way {
            Way::ByRanks => state.save_with_extra_by_ranks_from(base, &self.runtime, dir),
            _ => state.save_with_extra_from(base, &self.runtime, dir).map(drop),
        }
    }

    /// Exports a step's tensors as a model of several files and an index.
    pub fn export_to(&self, step: i64, to: &Path) -> ringstow::Result<()> {
        let config = Config { shard_bytes: 20_000, stripe: Vec::new(), ..self.config().clone() };
        let (runtime, state) = (Runtime::new(config)?, State::new(step, &SIZES));
        export(&runtime, &state.model()?, to, &Arc::default()).map(drop)
    }

    pub fn prune(&self) -> ringstow::Result<()> {
        ringstow::internals::store::prune(&self.run(), self.config()).map(drop)
    }

    /// The checkpoint is the one of this step, byte by byte; and the next save replaces it and leaves nothing else.
    #[track_caller]
    pub fn assert_holds(&self, step: i64) {
        State::new(step, &SIZES).assert_at(&self.runtime, &self.dir());
        self.save(9).unwrap();
        State::new(9, &SIZES).assert_at(&self.runtime, &self.dir());
        assert_no_litter_in(self.config(), &self.dir());
    }

    /// Runs a test in a child process, with these variables in its environment; says whether it passed.
    pub fn in_child(&self, test: &str, variables: &[(&str, &str)]) -> bool {
        let program = std::env::current_exe().unwrap();
        let status = Command::new(program)
            .args([test, "--exact"])
            .env(CHILD_DIR, &self.root)
            .env(CHILD_WAY, format!("{:?}", self.way))
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        status.success()
    }

    /// In a child process, its parent's.
    pub fn of_parent() -> Option<Self> {
        let root = std::env::var_os(CHILD_DIR).map(PathBuf::from)?;
        let way = std::env::var(CHILD_WAY).unwrap();
        let way = WAYS.into_iter().find(|known| format!("{known:?}") == way).unwrap();
        Some(Self::new(way, &root))
    }
}
