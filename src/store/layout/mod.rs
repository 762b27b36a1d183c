//! Where the files of a checkpoint are: its own directory, stripes on other disks, recycled files.

pub(crate) mod recycled;
pub(crate) mod stripes;
pub(crate) mod unique;
