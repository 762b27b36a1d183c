//! Opening a checkpoint, loading from it, checking it.

pub(crate) mod again;
pub(crate) mod checkpoint;
pub(crate) mod copies;
pub(crate) mod coverage;
pub(crate) mod damage;
pub(crate) mod dcp_mark;
pub(crate) mod diagnose;
pub(crate) mod fault;
pub(crate) mod fingerprint;
pub(crate) mod foreign;
pub(crate) mod index;
pub(crate) mod info;
pub(crate) mod kinds;
pub(crate) mod load;
pub(crate) mod loaded;
pub(crate) mod mapped;
pub(crate) mod needed;
pub(crate) mod object;
pub(crate) mod part;
mod places;
pub(crate) mod shards;
pub(crate) mod slices;
pub(crate) mod source;
pub(crate) mod values;
pub(crate) mod verify;
