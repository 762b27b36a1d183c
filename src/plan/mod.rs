//! Plans what a save writes where, and what a load reads. Pure: values in, values out, no I/O.

mod deal;
pub mod load;
pub mod replicas;
pub mod save;
pub mod share;
pub mod slab;
pub mod turns;
pub mod unchanged;
