//! Removing checkpoints, and what killed saves left.

pub(crate) mod evict;
pub(crate) mod going_back;
pub(crate) mod history;
pub(crate) mod keep;
pub(crate) mod look;
mod objects;
mod orphans;
pub(crate) mod prune;
pub(crate) mod remove;
pub(crate) mod retain;
pub(crate) mod slim;
