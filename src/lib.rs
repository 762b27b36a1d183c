//! ringstow
pub mod config;
pub mod device;
pub mod error;
pub mod format;
pub mod plan;
pub mod pool;
