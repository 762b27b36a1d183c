//! Where the files of a checkpoint are: its own directory, stripe directories on other disks, recycled files.

pub(crate) mod manifest;
pub(crate) mod node;
pub(crate) mod published;
pub(crate) mod rank_dirs;
pub(crate) mod recycled;
pub(crate) mod session_note;
pub(crate) mod stripe_marker;
pub(crate) mod stripes;
pub(crate) mod summary;
