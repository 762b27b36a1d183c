//! Which save a checkpoint is of: the one place that decides whether two checkpoints are copies of one save.

use super::Manifest;
use super::manifest::Age;

/// What all copies of a save have alike, slimmed or not, and no other save of the step has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SaveId {
    /// Which of two saves is the later one.
    pub age: Age,
    block_bytes: u64,
}

impl SaveId {
    /// That of a manifest, or of the part of one that lists its files.
    pub fn of<T, S>(manifest: &Manifest<T, S>) -> Self {
        Self { age: manifest.age(), block_bytes: manifest.block_bytes }
    }
}
