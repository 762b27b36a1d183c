//! What a disk may hold after a loss of power at any moment of an operation.
//!
//! The operation runs for real, in directories of a disk or of memory. Before each of its system calls a [`Recorder`]
//! looks at what has changed there since the call before: names, lengths, blocks. With the syncs, that is a
//! [`Journal`]. From it a model computes what the disk may hold at each moment: what was synced, and any part of the
//! rest ([`Mode`] says which parts). A [`State`] is one such content, and can be written to directories.
//!
//! The model loses more than most disks do, and neither a device nor root is needed. It does not know when a disk
//! writes by itself; a sync lasts from its call to its answer, and holds from then on.
//!
//! ```no_run
//! use durable_image::{Mode, Recorder};
//! use ringstow::internals::sys::seam::Outcome;
//!
//! let root = std::path::PathBuf::from("/dev/shm/run");
//! let recorder = Recorder::new(&[root.clone()]); // what is there now is durable
//! let watch = recorder.watch(|_, _, _| Outcome::Pass);
//! // … saves; then, at the moment of the crash:
//! let disk = recorder.crash(Mode::Unordered, &mut fastrand::Rng::with_seed(1));
//! drop(watch);
//! disk.write_to(&[root]); // as the next program finds it
//! ```
#![cfg(debug_assertions)] // the seam exists in these builds only

mod change;
mod journal;
mod live;
mod pick;
mod recorder;
mod snapshot;
mod state;
mod tell;
#[cfg(test)]
mod tests;

pub use journal::{Journal, MODES, Mode, SyncCall};
pub use recorder::Recorder;
pub use state::State;
