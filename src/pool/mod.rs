//! Staging memory: huge-page mappings cut into buffers that have one owner at a time.
//!
//! A [`Buffer`] is the only way to touch a [`Mapping`] while it is being cut up, so the holder
//! of one has its bytes alone: a filler, then the engine, then the filler of the next block. That is
//! what makes the raw pointers handed to the kernel sound. Nothing here does file I/O.
#![allow(unsafe_code)]

mod budget;
mod buffer;
mod copy_memory;
mod free_slots;
mod growth;
mod mapping;
mod staging;

pub use budget::NoMore;
#[cfg(feature = "cli")]
pub use budget::left;
pub use buffer::{Buffer, CutMapping};
pub use copy_memory::CopyMemory;
pub(crate) use copy_memory::{give_back as give_back_copies, is_any as has_copies};
#[cfg(feature = "tokio-uring")]
pub use free_slots::FreeSlots;
pub use mapping::Mapping;
pub use staging::Pool;

/// For tests of memory that all pools and copies of the process give back.
#[cfg(test)]
fn in_turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
