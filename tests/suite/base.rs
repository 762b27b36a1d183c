//! Saves that link the unchanged files of an earlier checkpoint.
#![cfg(target_os = "linux")]

mod life;
#[cfg(debug_assertions)] // the seam exists in these builds only
mod races;
mod ranks;
mod refused;

use crate::common::{
    State, assert_undamaged, load_all, names_in, noise, runtime, shards_in, small_config,
};
use ringstow::{Base, Checkpoint, Config, Result, Runtime, SaveReport, StateDict};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of the tensors that do not change, and of the one that does: `layer.3.weight`.
const SIZES: [usize; 4] = [30_000, 5, 12_288, 700];

/// The state of a step: all but the last tensor are those of every step.
fn state(step: i64) -> State {
    let mut state = State::new(7, &SIZES);
    state.step = step;
    state.tensors[3].1 = noise(step as u64, SIZES[3]);
    state
}

/// A run of checkpoints, each saved with the one before as its base.
struct Run {
    root: tempfile::TempDir,
    runtime: Runtime,
}

impl Run {
    fn new(config: Config) -> Self {
        Self { root: tempfile::tempdir().unwrap(), runtime: Runtime::new(config).unwrap() }
    }

    /// A run of these steps.
    fn of(steps: std::ops::RangeInclusive<i64>) -> Self {
        let run = Self::new(small_config());
        for step in steps.clone() {
            run.save(step, run.base(step, *steps.start())).unwrap();
        }
        run
    }

    fn at(&self, step: i64) -> PathBuf {
        self.root.path().join(format!("step-{step}"))
    }

    /// The step before, if there is one.
    fn base(&self, step: i64, first: i64) -> Base {
        if step == first { Base::none() } else { Base::at(self.at(step - 1)) }
    }

    fn save(&self, step: i64, base: Base) -> Result<SaveReport> {
        self.save_state(&state(step), base)
    }

    fn save_state(&self, state: &State, base: Base) -> Result<SaveReport> {
        self.save_dict(state.to_save()?.base(base), &self.at(state.step))
    }

    fn save_dict(&self, dict: &StateDict<'_>, path: &Path) -> Result<SaveReport> {
        ringstow::internals::store::save(&self.runtime, dict, path, &Arc::default())
    }

    /// Saves other states, in as many files, so that each recycled file is claimed.
    fn write_over_recycled_files(&self) {
        for step in 5..8 {
            let other = State::new(step, &SIZES);
            let mut dict = other.to_save().unwrap();
            self.save_dict(dict.droppable("layer.3"), &self.at(step)).unwrap();
        }
    }

    /// Steps are what was saved, in each way in which a reader can tell.
    #[track_caller]
    fn check(&self, steps: impl IntoIterator<Item = i64>) {
        for step in steps {
            let dir = self.at(step);
            state(step).assert_at(&self.runtime, &dir);
            assert_undamaged(&self.runtime, &dir);
            crate::common::assert_no_litter(&dir);
        }
    }
}

/// The inode of each shard.
fn inodes(dir: &Path) -> Vec<u64> {
    shards_in(dir).iter().map(|path| fs::metadata(path).unwrap().ino()).collect()
}

/// The file of a checkpoint that the next save links.
fn stable(dir: &Path) -> PathBuf {
    shards_in(dir).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap()
}

/// How many shards of two checkpoints are one file.
fn shared(one: &Path, other: &Path) -> usize {
    let others = inodes(other);
    inodes(one).iter().filter(|inode| others.contains(inode)).count()
}

/// The fallback that a report has for the base.
#[track_caller]
fn fallback(report: &SaveReport) -> String {
    let of_base = report.moved.fallbacks.iter().filter(|f| f.kind == ringstow::FallbackKind::Base);
    let reasons: Vec<&str> = of_base.map(|f| f.reason.as_str()).collect();
    assert_eq!(reasons.len(), 1, "{report:?}");
    reasons[0].to_owned()
}
