//! How a checkpoint is written, whole or not at all.

pub(crate) mod base;
pub(crate) mod compare;
pub(crate) mod export;
pub(crate) mod leftovers;
pub(crate) mod link;
pub(crate) mod make_dirs;
pub(crate) mod model_files;
pub(crate) mod model_session;
pub(crate) mod model_share;
pub(crate) mod node_session;
pub(crate) mod place;
pub(crate) mod reuse;
pub(crate) mod rollback;
pub(crate) mod save;
pub(crate) mod scope;
pub(crate) mod session;
pub(crate) mod stripe_dir;
pub(crate) mod swept;
pub(crate) mod transaction;
pub(crate) mod write_rank;
