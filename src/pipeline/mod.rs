//! Joins plan, device, pool and engine: moves a laid-out state to files, and blocks of files back.
//! Knows nothing of commits; those are the store's.

pub(crate) mod blocks;
pub(crate) mod chunks;
mod clock;
pub(crate) mod fallbacks;
mod in_flight;
pub mod job;
pub(crate) mod load;
mod open;
pub(crate) mod pace;
pub mod report;
pub mod runtime;
pub(crate) mod save;
pub(crate) mod spans;
pub(crate) mod stream;
pub(crate) mod trace;
mod transfers;
pub(crate) mod workers;
