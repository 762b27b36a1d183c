//! How a checkpoint comes to be, whole or not at all.

pub(crate) mod export;
pub(crate) mod rollback;
pub(crate) mod save;
pub(crate) mod session;
pub(crate) mod transaction;
pub(crate) mod write_rank;
