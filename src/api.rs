//! What a trainer calls: a [`Store`], and the same functions with the configuration that is found.

mod functions;
mod store;

#[cfg(feature = "object-store")]
pub use functions::promote;
pub use functions::{
    diff, export, export_async, latest, latest_verified, list, load, load_async, open_read,
    open_write, prune, remove, retain, save, save_async, slim, steps, verify, write_rank,
    write_rank_async,
};
pub use store::Store;
