//! The targets, one a file.

pub mod config;
pub mod directory;
pub mod header;
pub mod index;
pub mod manifest;
pub mod names;
pub mod receipt;
pub mod select;
pub mod slices;
pub mod values;

/// What reading a small input may take besides four times its size. Less than the 1 MiB that is promised: inputs of a
/// fuzzer are small, and what takes too much for its size must show all the same.
pub(crate) const SLACK: usize = 64 << 10;
