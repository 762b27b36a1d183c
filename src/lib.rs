//! Training checkpoints at the speed of the disk.
//!
//! A state of tensors and values is saved as a directory of plain safetensors files and a
//! manifest: durable, checked by a checksum of every block, and there whole or not at all. Shards
//! go through one bounded pool of staging buffers, registered with io_uring, into O_DIRECT files.
//!
//! ```no_run
//! use ringstow::{Config, StateDict};
//!
//! # fn main() -> ringstow::Result<()> {
//! let weights = vec![0u8; 4096];
//! let mut state = StateDict::new();
//! state.bytes("layer.weight", ringstow::Dtype::F32, &[32, 32], &weights)?.value("step", 7);
//! let report = ringstow::save(&state, "ckpt/step-7", &Config::default())?;
//! println!("{:.2} GB/s", report.gb_per_s());
//!
//! let loaded = ringstow::load("ckpt/step-7")?;
//! let weights: &[f32] = loaded.tensor("layer.weight").unwrap().as_slice()?;
//! # Ok(())
//! # }
//! ```
//!
//! [`save_async`] and [`load_async`] return at once with a [`Handle`], to wait on or to await.
//! [`Checkpoint`] opens a checkpoint to look
//! at it or to load a part. `docs/format.md` describes the files.

// Every system call on a path goes through `sys`; clippy.toml lists what is refused elsewhere.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("ringstow maps whole checkpoints: it needs 64-bit addresses");
#[cfg(not(unix))]
compile_error!(
    "ringstow needs Linux, or another Unix system, where the portable engine does the work"
);

mod background;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
pub mod device;
pub mod doctor;
pub mod engine;
mod error;
pub mod format;
mod handle;
pub mod limits;
pub mod path_text;
pub mod pipeline;
pub mod plan;
pub mod pool;
mod state;
pub mod store;
pub mod sys;

pub use background::{Filled, load_async};
pub use config::{Config, EngineChoice, Switch};
pub use engine::fallback::Fallback;
pub use error::{Error, Result, Room};
pub use format::{Dtype, Element, Item, Part, PartOf, Receipt, StepPattern, TensorInfo, Value};
pub use handle::{Handle, LoadHandle, SaveHandle, Staged};
pub use pipeline::job::{Job, Progress};
pub use pipeline::report::{Damage, LoadReport, SaveReport, VerifyReport};
pub use pipeline::runtime::Runtime;
pub use state::StateDict;
pub use store::{
    Before, Checkpoint, Committed, Disposal, Info, Kind, LoadOptions, Loaded, Retention, Session,
    Slice, TensorPart, TensorView, Wanted, latest, latest_of, latest_verified, latest_with, list,
    list_with, prune, prune_with, retain, retain_plan, retain_with, retire, retire_with, steps,
    steps_with,
};

use handle::Work;
use std::path::Path;
use std::sync::Arc;

/// Saves a state as the checkpoint at `path` (a directory, made if need be) and returns once it is
/// durable. An earlier checkpoint there stands until then. A URL is refused, as is a path that begins with `~`.
///
/// # Errors
/// Any [`Error`]; then what was written is removed, and an earlier checkpoint is as it was. But for
/// [`Error::NotDurable`]: the new one is committed, and may not survive a crash.
pub fn save(state: &StateDict<'_>, path: impl AsRef<Path>, config: &Config) -> Result<SaveReport> {
    let runtime = Runtime::shared(config)?;
    store::save(&runtime, state, path.as_ref(), &Job::of(config))
}

/// Starts saving a state and returns at once, to where `path` leads at this moment. Owned tensors are dropped at the end; memory that is
/// shared with the trainer must not change until [`Handle::wait_staged`] returns: what is behind an
/// `Arc` cannot, unless it is changed through a lock, a cell or a raw pointer. A trainer that can tell
/// afterwards whether it was hands over a check, [`StateDict::check_staged`]: a save whose check fails
/// commits nothing.
///
/// The handle is a future, of any runtime's. An async trainer goes on like this:
///
/// ```no_run
/// # async fn step(_: u32) {}
/// # async fn train(state: ringstow::StateDict<'static>) -> ringstow::Result<()> {
/// let saving = ringstow::save_async(state, "run/step-1000", &ringstow::Config::default())?;
/// saving.until_staged().await; // from here on the weights may change
/// step(1001).await;
/// let report = saving.await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Invalid`] for a configuration or values that cannot be; all else comes through
/// [`Handle::result`].
pub fn save_async(
    state: StateDict<'static>,
    path: impl AsRef<Path>,
    config: &Config,
) -> Result<SaveHandle> {
    let runtime = Runtime::shared(config)?;
    state.tree()?; // what cannot be saved is refused here, rather than in the background
    let path = sys::path::absolute(path.as_ref())?;
    Handle::start(Work::Save, path.clone(), Job::of(config), move |job| {
        store::save(&runtime, &state, &path, job)
    })
}

/// Writes one rank's part of the checkpoint at `path`, durable but not committed: the coordinator's
/// [`Session`], begun before any rank writes, makes a checkpoint of all ranks' receipts.
///
/// Values of the state other than tensors are the coordinator's to commit; here they are ignored. A
/// state of no tensors writes no file, and gives a receipt all the same.
///
/// # Errors
/// Any [`Error`]; then what was written is removed, and an earlier checkpoint is as it was.
pub fn write_rank(
    state: &StateDict<'_>,
    rank: u32,
    path: impl AsRef<Path>,
    config: &Config,
) -> Result<(Receipt, SaveReport)> {
    let runtime = Runtime::shared(config)?;
    store::write_rank(&runtime, state, rank, path.as_ref(), &Job::of(config))
}

/// [`write_rank`] in the background, as [`save_async`] is [`save`].
///
/// # Errors
/// As for [`save_async`].
pub fn write_rank_async(
    state: StateDict<'static>,
    rank: u32,
    path: impl AsRef<Path>,
    config: &Config,
) -> Result<SaveHandle<(Receipt, SaveReport)>> {
    let runtime = Runtime::shared(config)?;
    let path = sys::path::absolute(path.as_ref())?;
    Handle::start(Work::Save, path.clone(), Job::of(config), move |job| {
        store::write_rank(&runtime, &state, rank, &path, job)
    })
}

/// Starts writing the tensors of a state as Hugging Face's programs read them: `model.safetensors`, or
/// several files with an index where they are more than the configuration's `shard_bytes`. Values
/// other than tensors are not written.
///
/// # Errors
/// As for [`save_async`].
pub fn export_async(
    state: StateDict<'static>,
    path: impl AsRef<Path>,
    config: &Config,
) -> Result<SaveHandle> {
    let runtime = Runtime::shared(config)?;
    let path = sys::path::absolute(path.as_ref())?;
    Handle::start(Work::Save, path.clone(), Job::of(config), move |job| {
        store::export(&runtime, &state, &path, job)
    })
}

/// Loads all tensors of the checkpoint at `path`, each block checked against its checksum, with the
/// configuration that is [found](Config::found). For a part of them, or for the values, see [`Checkpoint`].
/// If a save replaces the checkpoint meanwhile, what comes is all of the one or all of the other.
///
/// # Errors
/// What [`Checkpoint::open`] and [`Checkpoint::load_names`] give.
pub fn load(path: impl AsRef<Path>) -> Result<Loaded> {
    let config = Config::found()?;
    let runtime = Runtime::shared(&config)?;
    load_all(path.as_ref(), &runtime, &Job::of(&config))
}

fn load_all(path: &Path, runtime: &Runtime, job: &Arc<Job>) -> Result<Loaded> {
    store::while_replaced(|| {
        let checkpoint = Checkpoint::open_with(path, runtime.config())?;
        let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
        checkpoint.load_names(names, LoadOptions::default(), runtime, job)
    })
}

/// Reads every byte of the checkpoint at `path` and checks it against its checksums; what is
/// damaged is listed in the report.
///
/// # Errors
/// What [`Checkpoint::open`] gives, a file of another length among it, and failures to read.
pub fn verify(path: impl AsRef<Path>) -> Result<VerifyReport> {
    let config = Config::found()?;
    let runtime = Runtime::shared(&config)?;
    store::verify(&runtime, path.as_ref(), &Job::of(&config))
}
