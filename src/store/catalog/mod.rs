//! Which checkpoints a directory holds, which is the newest, and why one is not usable.

pub(crate) mod diagnose;
pub(crate) mod latest;
pub(crate) mod list;
pub(crate) mod rank_dirs;
pub(crate) mod steps;
