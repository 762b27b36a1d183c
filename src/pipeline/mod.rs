//! Joins plan, device, pool and engine: moves a laid-out state to files, and blocks of files back.
//! Knows nothing of commits; that is the store's.

mod climb;
mod crew;
pub(crate) mod fallbacks;
mod fill;
pub mod job;
pub(crate) mod load;
pub mod report;
pub mod runtime;
pub(crate) mod save;
pub(crate) mod trace;
