//! What goes where on a save, and what to read on a load. Pure: values in, values out, no I/O.

pub mod load;
pub mod save;
pub mod slab;
