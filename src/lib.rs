//! ringstow
pub mod config;
pub mod error;
pub mod format;
pub mod pool;
