//! Which checkpoints a directory holds, and which is the newest.

pub(crate) mod found;
pub(crate) mod gone;
#[cfg(feature = "cli")]
pub(crate) mod in_flight;
pub(crate) mod join;
pub(crate) mod latest;
pub(crate) mod links;
pub(crate) mod list;
pub(crate) mod own_share;
pub(crate) mod pins;
pub(crate) mod row;
#[cfg(feature = "cli")]
pub(crate) mod runs;
pub(crate) mod shares;
pub(crate) mod steps;
