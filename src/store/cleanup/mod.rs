//! Removing checkpoints, and what killed saves left.

pub(crate) mod prune;
pub(crate) mod remove;
pub(crate) mod retain;
