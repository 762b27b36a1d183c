//! System calls on paths, files and this process, a function each. Nothing here knows what a checkpoint is.

pub(crate) mod dir;
pub mod file;
pub(crate) mod fork;
pub(crate) mod inherited;
pub mod lease;
pub(crate) mod lock;
pub mod memlock;
pub(crate) mod path;
