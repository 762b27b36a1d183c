//! Which save a checkpoint is of: the one place that decides whether two checkpoints are copies of one save.

use super::Manifest;

/// What all copies of a save have alike, slimmed or not, and no other save of the step has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SaveId {
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    block_bytes: u64,
}

impl SaveId {
    /// That of a manifest, or of the part of one that lists its files.
    pub fn of<T, S>(manifest: &Manifest<T, S>) -> Self {
        Self { created_unix_ms: manifest.created_unix_ms, block_bytes: manifest.block_bytes }
    }
}
