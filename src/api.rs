//! What a trainer calls: a [`Store`], and the same functions with the configuration that is found.

mod functions;
mod store;

pub use functions::{
    diff, export, export_async, latest, latest_verified, list, load, load_async, open_read,
    open_write, promote, prune, remove, retain, save, save_async, slim, steps, verify, write_rank,
    write_rank_async,
};
pub use store::Store;
