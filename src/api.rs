//! What a trainer calls: a [`Store`], and its most common calls with the configuration that is [found](Config::found) in the
//! environment and `ringstow.toml`.

mod store;

pub use store::Store;

#[cfg(doc)]
use crate::config::Config;
use crate::error::Result;
#[cfg(doc)]
use crate::handle::Handle;
use crate::handle::{LoadHandle, SaveHandle};
use crate::pipeline::report::{SaveReport, VerifyReport};
use crate::state::StateDict;
use crate::store::{
    Checkpoint, Disposal, Found, Loaded, Removed, RetainOptions, Retained, Swept, Wanted,
};
use std::path::{Path, PathBuf};

/// Saves a state as the checkpoint at `path` and returns once it is durable. Creates the directory if it is missing.
/// An earlier checkpoint there stays until then. Refuses a URL and a path that begins with `~`.
///
/// # Errors
/// Any [`Error`](crate::Error); then written files are removed, and an earlier checkpoint is unchanged. Except for
/// [`Error::NotDurable`](crate::Error::NotDurable): the new one is committed, and may not survive a crash. If a rename fails
/// and the manifest cannot be read to see whether it took effect, the error says that either may be committed, and the
/// files of both stay.
pub fn save(state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
    Store::found()?.save(state, path)
}

/// Starts saving a state and returns at once. `path` is resolved now: a later change of directory does not move it.
///
/// Owned tensors are dropped at the end. Memory shared with the trainer must not change until
/// [`Handle::wait_staged`] returns. This includes memory behind an `Arc` that a lock, a cell or a raw pointer can
/// change. A trainer that can detect a change passes a check to [`StateDict::check_staged`]: a save whose check fails
/// commits nothing.
///
/// The state is `'static`: it borrows nothing. Give it an `Arc` of each tensor, and train on with the other:
///
/// ```
/// use ringstow::StateDict;
/// use std::sync::Arc;
///
/// # fn main() -> ringstow::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("step-1000");
/// let mut weight = Arc::new(vec![0.5f32; 1024]);
/// let mut state = StateDict::new();
/// state.step(1000).shared("layer.weight", &[32, 32], weight.clone())?;
/// let saving = ringstow::save_async(state, &path)?;
/// Arc::make_mut(&mut weight)[0] = 1.0; // train: copies the weight only while the save still holds it
/// let report = saving.result()?; // the checkpoint is durable
/// # let loaded = ringstow::load(&path)?;
/// # assert_eq!(loaded.tensor("layer.weight").unwrap().as_slice::<f32>()?, [0.5; 1024]);
/// # Ok(())
/// # }
/// ```
///
/// The handle is a future; any async runtime works:
///
/// ```no_run
/// # async fn step(_: u32) {}
/// # async fn train(state: ringstow::StateDict<'static>) -> ringstow::Result<()> {
/// let saving = ringstow::save_async(state, "run/step-1000")?;
/// saving.until_staged().await; // from here on the weights may change
/// step(1001).await;
/// let report = saving.await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for an invalid configuration or invalid values; [`Handle::result`] returns
/// any other error.
pub fn save_async(state: StateDict<'static>, path: impl AsRef<Path>) -> Result<SaveHandle> {
    Store::found()?.save_async(state, path)
}

/// Loads all tensors of the checkpoint at `path`, and compares each checksum chunk with its checksum. For some of the
/// tensors, or for the values, see [`Checkpoint`]. If a save replaces the checkpoint meanwhile, the result is entirely
/// the old or entirely the new one.
///
/// # Errors
/// As for [`Checkpoint::open`] and [`Checkpoint::load_names`].
pub fn load(path: impl AsRef<Path>) -> Result<Loaded> {
    Store::found()?.load(path)
}

/// [`load`] in the background.
///
/// # Errors
/// As for [`Config::found`]; [`Error::Io`](crate::Error::Io) if no thread can be started. The handle returns any other
/// error.
pub fn load_async(path: impl AsRef<Path>) -> Result<LoadHandle> {
    Store::found()?.load_async(path)
}

/// Reads every byte of the checkpoint at `path` and compares it with its checksums. The report lists all damage: ranges
/// of files that are not what was written, cannot be read or are missing, with the names of the tensors in them.
///
/// # Errors
/// As for [`OpenOptions::open`](crate::OpenOptions::open) with `damaged`, a damaged manifest included; [`Error::Io`](crate::Error::Io).
pub fn verify(path: impl AsRef<Path>) -> Result<VerifyReport> {
    Store::found()?.verify(path)
}

/// The steps of training in `dir`, oldest first, including those that cannot be loaded. If nothing counts as a step,
/// all checkpoints by the time of their commit. Empty if `dir` does not exist. `docs/manager.md` says which
/// checkpoints count as steps.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if `dir`, or a directory in it that may be a step, cannot be read; as for
/// [`Config::found`].
pub fn steps(dir: impl AsRef<Path>) -> Result<Vec<Found>> {
    Store::found()?.steps(dir, None)
}

/// The last of the [`steps`] in `dir` that can be loaded. `None` if nothing was committed there yet, or `dir` does not
/// exist. Skips a committed checkpoint that cannot be loaded, with a warning, if an older one can. Does not check the tensors' bytes: see
/// [`Wanted::verify`].
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if `dir`, or a directory in it that may be the newest step, cannot be read; as for
/// [`Config::found`].
pub fn latest(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    Store::found()?.latest(dir, &Wanted::default())
}

/// Removes all [`steps`] directly under `root` except the newest `keep` that can be loaded. [`Store::retain`] takes more
/// rules. `docs/manager.md` lists what it never removes.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for a `keep` of 0; [`Error::Io`](crate::Error::Io) if `root` cannot be
/// listed; as for [`Config::found`]. What fails below it is in [`Retained::left`], and the rest is done.
pub fn retain(root: impl AsRef<Path>, keep: usize, disposal: Disposal) -> Result<Retained> {
    Store::found()?.retain(root, &RetainOptions { disposal, ..RetainOptions::new(keep) })
}

/// Removes the checkpoint at `path`. If the process is killed meanwhile, the checkpoint may be incomplete, and another
/// call finishes the removal. A load that has begun completes. With [`Disposal::Recycle`], the next saves write over
/// its files.
///
/// # Errors
/// [`Error::NoCheckpoint`](crate::Error::NoCheckpoint) or [`Error::NotCommitted`](crate::Error::NotCommitted) if there
/// is none; [`Error::MissingFiles`](crate::Error::MissingFiles) if some files of a striped one are not found;
/// [`Error::Busy`](crate::Error::Busy) if a save into the directory is in progress;
/// [`Error::Invalid`](crate::Error::Invalid) for a link; as for [`Checkpoint::open`] if the manifest cannot be read;
/// [`Error::Io`](crate::Error::Io); as for [`Config::found`].
pub fn remove(path: impl AsRef<Path>, disposal: Disposal) -> Result<Removed> {
    Store::found()?.remove(path, disposal)
}

/// Removes what killed saves left in `dir` and in the checkpoints in it, and finishes killed removals.
/// `docs/manager.md` lists what it leaves alone.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if `dir` cannot be listed; as for [`Config::found`]. What fails below it is in
/// [`Swept::left`], and the rest is done.
pub fn prune(dir: impl AsRef<Path>) -> Result<Swept> {
    Store::found()?.prune(dir)
}

impl Checkpoint {
    /// Reads the manifest of the checkpoint at `path`, and checks that all its files exist with their full length.
    /// Reads no tensor. Looks for the files of a striped checkpoint in the configuration's `stripe`; see
    /// [`Store::open`].
    ///
    /// No file stays open. If a save or a removal then takes the files away, a load returns
    /// [`Error::Replaced`](crate::Error::Replaced) or [`Error::NoCheckpoint`](crate::Error::NoCheckpoint). It never
    /// reads another checkpoint in place of this one.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if there is no such directory;
    /// [`Error::NoCheckpoint`](crate::Error::NoCheckpoint) or [`Error::NotCommitted`](crate::Error::NotCommitted) if
    /// nothing was committed there; [`Error::MissingFiles`](crate::Error::MissingFiles);
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the manifest or a file's length is not what was written;
    /// [`Error::Format`](crate::Error::Format) for a manifest that is not ringstow's;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for one of a newer version;
    /// [`Error::Invalid`](crate::Error::Invalid) if PyTorch's own DCP writer has saved over it; as for
    /// [`Config::found`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Store::found()?.open(path)
    }
}
