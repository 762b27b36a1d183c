//! The only room that makes system calls on paths and descriptors, a function each; the engines make those that
//! transfer a shard's bytes. Nothing here knows what a checkpoint is. Each function passes the [`seam`],
//! where a test can count, fail or kill at a call.
//!
//! Most functions return [`Error::Io`](crate::Error::Io) with the path. Those that return the system's own error
//! have callers that decide by it.
#![allow(clippy::disallowed_methods)] // the only place for them

pub(crate) mod at_exit;
pub mod chance;
pub mod dir;
pub mod environment;
pub mod file;
pub mod file_mapping;
pub mod file_system;
pub(crate) mod fork;
pub(crate) mod holder;
pub(crate) mod inherited;
pub(crate) mod inodes;
pub mod late;
pub mod lease;
pub(crate) mod lock;
pub mod memlock;
pub mod memory;
pub(crate) mod open_dir;
pub mod page_cache;
pub(crate) mod path;
pub(crate) mod priority;
mod range_lock;
pub(crate) mod removal_note;
pub mod rlimit;
pub mod run_lock;
pub mod seam;
pub mod space;
pub(crate) mod tally;
