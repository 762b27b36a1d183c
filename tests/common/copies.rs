//! A fast disk and a shared one, for tests of copies from one to the other.

use super::{names_in, noise};
use ringstow::internals::store::{promote, save, verify};
use ringstow::{Config, Dtype, Job, Promotion, PromotionReport, Runtime, StateDict};
use std::path::{Path, PathBuf};

pub const MIB: usize = 1 << 20;
/// Bytes of the first tensor: three parts, and an end between two pages.
pub const LARGE: usize = 12 * MIB + 123;

pub fn config() -> Config {
    Config { block_bytes: MIB as u64, pool_bytes: 4 * MIB as u64, ..Config::default() }
}

pub fn small_parts() -> Promotion {
    Promotion { part_bytes: 5 << 20, uploads: 2, ..Promotion::default() }
}

/// A fast disk and a shared one.
pub struct Disks {
    pub root: tempfile::TempDir,
    pub runtime: Runtime,
}

impl Disks {
    pub fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap(), runtime: Runtime::new(config()).unwrap() }
    }

    pub fn from(&self) -> PathBuf {
        self.root.path().join("fast/run/step-1")
    }

    pub fn to(&self) -> PathBuf {
        self.root.path().join("shared/run/step-1")
    }

    /// Another directory on the fast disk.
    pub fn second(&self) -> PathBuf {
        self.root.path().join("second/run/step-1")
    }

    /// Saves on the fast disk.
    pub fn save(&self, seed: u64) {
        self.save_at(&self.from(), seed);
    }

    pub fn save_at(&self, path: &Path, seed: u64) {
        let bytes = noise(seed, LARGE);
        let mut state = StateDict::new();
        state.bytes("large", Dtype::U8, &[LARGE as u64], &bytes).unwrap();
        state.bytes("small", Dtype::U8, &[9], &bytes[..9]).unwrap();
        save(&self.runtime, &state, path, &Job::of(&config())).unwrap();
    }

    pub fn promote(&self) -> ringstow::Result<PromotionReport> {
        self.promote_as(small_parts())
    }

    pub fn promote_as(&self, how: Promotion) -> ringstow::Result<PromotionReport> {
        self.promote_from(&self.from(), how)
    }

    pub fn promote_from(&self, from: &Path, how: Promotion) -> ringstow::Result<PromotionReport> {
        promote(&self.runtime, from, &self.to(), how, &Job::of(&config()))
    }

    /// Whether the copy has what was saved with this seed.
    pub fn has(&self, seed: u64) -> bool {
        let loaded = ringstow::load(self.to()).unwrap();
        loaded.tensor("large").unwrap().data() == noise(seed, LARGE)
    }

    pub fn assert_copied(&self, seed: u64) {
        assert!(self.has(seed));
        let report = verify(&self.runtime, &self.to(), &Job::of(&config())).unwrap();
        assert!(report.damage.is_empty(), "{report:?}");
        assert_eq!(names_in(&self.to()).len(), report.files + 1, "{:?}", names_in(&self.to()));
        let run = self.from();
        assert_eq!(names_in(run.parent().unwrap()), ["step-1"], "no journal is left");
    }
}
