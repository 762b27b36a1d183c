//! The calls of [`Store`], with the configuration that is [found](Config::found) in the environment and `ringstow.toml`.

use super::store::Store;
#[cfg(doc)]
use crate::config::Config;
use crate::error::Result;
use crate::format::Receipt;
#[cfg(doc)]
use crate::handle::Handle;
use crate::handle::{LoadHandle, SaveHandle};
use crate::pipeline::report::{SaveReport, VerifyReport};
use crate::state::StateDict;
use crate::store::{
    Checkpoint, DiffReport, Disposal, Found, Loaded, Removed, Retained, Retention, Session,
    Slimmed, Swept, Wanted,
};
use crate::stream::{FileReader, FileWriter, WriteOptions};
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

/// Opens a file to be written as a stream, for programs that know no tensors. [`FileWriter::finish`] publishes it whole;
/// until then an earlier file is untouched.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if the directory is missing or may not be written to, or the path is a directory;
/// [`Error::Invalid`](crate::Error::Invalid) for a URL, a device or FIFO, and a link that leads nowhere.
pub fn open_write(path: impl AsRef<Path>) -> Result<FileWriter> {
    Store::found()?.open_write(path, WriteOptions::default())
}

/// Opens a file to be read as a stream. If [checksums](WriteOptions::checksums) lie beside it, each byte is checked.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if it is missing or a directory; [`Error::Invalid`](crate::Error::Invalid) for a URL.
pub fn open_read(path: impl AsRef<Path>) -> Result<FileReader> {
    Store::found()?.open_read(path)
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

/// Writes the tensors of a state as Hugging Face's programs read them: `model.safetensors`, or several files with an
/// index if they exceed the configuration's `shard_bytes`. Other values are not written.
///
/// # Errors
/// As for [`save`], and no error but [`Error::NotDurable`](crate::Error::NotDurable) leaves a model there;
/// [`Error::Invalid`](crate::Error::Invalid) if there are model files already;
/// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor that safetensors cannot store.
pub fn export(state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
    Store::found()?.export(state, path)
}

/// [`export`] in the background.
///
/// # Errors
/// As for [`save_async`].
pub fn export_async(state: StateDict<'static>, path: impl AsRef<Path>) -> Result<SaveHandle> {
    Store::found()?.export_async(state, path)
}

/// Writes one rank's shards of the checkpoint at `path`, durable but not committed. The coordinator begins a
/// [`Session`] before any rank writes, and commits the receipts of all ranks.
///
/// Ignores values other than tensors: the coordinator commits those. A state without tensors writes no file, and still
/// returns a receipt.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if no session has begun there, or another write of the same rank took over;
/// any other [`Error`](crate::Error). Then written files are removed, and an earlier checkpoint is unchanged.
pub fn write_rank(
    state: &StateDict<'_>,
    rank: u32,
    path: impl AsRef<Path>,
) -> Result<(Receipt, SaveReport)> {
    Store::found()?.write_rank(state, rank, path)
}

/// [`write_rank`] in the background.
///
/// # Errors
/// As for [`save_async`].
pub fn write_rank_async(
    state: StateDict<'static>,
    rank: u32,
    path: impl AsRef<Path>,
) -> Result<SaveHandle<(Receipt, SaveReport)>> {
    Store::found()?.write_rank_async(state, rank, path)
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
/// As for [`OpenOptions::damaged`](crate::OpenOptions::damaged), a damaged manifest included; [`Error::Io`](crate::Error::Io).
pub fn verify(path: impl AsRef<Path>) -> Result<VerifyReport> {
    Store::found()?.verify(path)
}

/// Copies the checkpoint in the directory `from` to another directory, such as one that all nodes share, or to an object store
/// (cargo feature `object-store`): `s3://bucket/run/step-1000`, `gs://…` or `az://…`. There it is loaded by this path or URL. Each block is compared with its checksum on the way, and the manifest comes last: nobody sees half of a
/// checkpoint. After a failure or a kill, the same call goes on where it was.
///
/// Credentials come from the environment (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` and
/// so on, or the machine's own), and go nowhere else.
///
/// # Errors
/// As for [`Checkpoint::open`]; [`Error::Corrupt`](crate::Error::Corrupt) if a file is damaged, of which nothing is committed;
/// [`Error::Io`](crate::Error::Io) of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if another checkpoint is there, and of
/// other kinds for what the store or the system says; [`Error::Busy`](crate::Error::Busy) if the same promotion is in progress on this host, or a
/// save in the directory.
pub fn promote(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<crate::PromotionReport> {
    Store::found()?.promote(from, to, crate::Promotion::default())
}

/// Says how two checkpoints differ: tensors with other bytes, tensors and values that only one has, other dtypes and
/// shapes, other values. Reads only tensors whose checksums do not decide: equal checksums count as equal bytes, and what
/// is on the disk now is not looked at ([`verify`] does that). Either may be another program's safetensors files; then
/// values are not compared. [`Store::diff`] counts elements.
///
/// # Errors
/// As for [`OpenOptions::foreign`](crate::OpenOptions::foreign) and [`Checkpoint::load_part`].
pub fn diff(a: impl AsRef<Path>, b: impl AsRef<Path>) -> Result<DiffReport> {
    Store::found()?.diff(a, b, false)
}

/// All checkpoints directly under `dir`, committed or not; `dir` itself if it is a checkpoint and holds no others. Those
/// that are not [`steps`] come first, by the time of their commit. Skips directories without files of ringstow, and
/// unreadable ones whose name is not a step's (`lost+found`). Does not check the tensors' bytes.
///
/// If several ranks saved each by itself, the directory of their shares is one checkpoint. It is committed if every
/// rank's share is committed and all belong to one save.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if `dir` cannot be listed; as for [`Config::found`].
pub fn list(dir: impl AsRef<Path>) -> Result<Vec<Found>> {
    Store::found()?.list(dir)
}

/// The steps of training in `dir`, oldest first, including those that cannot be loaded. If nothing counts as a step,
/// all checkpoints by the time of their commit. Empty if `dir` does not exist. `docs/retention.md` says which
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
/// [`latest_verified`].
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if `dir`, or a directory in it that may be the newest step, cannot be read; as for
/// [`Config::found`].
pub fn latest(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    Store::found()?.latest(dir, &Wanted::default())
}

/// [`latest`] that also reads and checks every byte of the checkpoint. Skips a damaged one with a warning.
///
/// # Errors
/// As for [`latest`]; [`Error::Io`](crate::Error::Io) for read failures that are not damage.
pub fn latest_verified(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    Store::found()?.latest(dir, &Wanted { verify: true, ..Wanted::default() })
}

/// Removes all [`steps`] directly under `root` except the newest `keep` that can be loaded. [`Store::retain`] takes more
/// rules. `docs/retention.md` lists what it never removes.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for a `keep` of 0; [`Error::Io`](crate::Error::Io) if `root` cannot be
/// listed; as for [`Config::found`]. What fails below it is in [`Retained::left`], and the rest is done.
pub fn retain(root: impl AsRef<Path>, keep: usize, disposal: Disposal) -> Result<Retained> {
    Store::found()?.retain(root, &Retention { disposal, ..Retention::new(keep) })
}

/// Drops the values of these names and below them from the checkpoint at `path`, the tensors to which only they refer,
/// and the files that hold nothing else: `["optimizer"]` leaves what inference needs. The save must have set these names
/// [apart](StateDict::apart). A load of the rest goes on as before. If the process is killed meanwhile, the checkpoint is
/// as before or slimmed, and the next save into its directory or [`prune`] removes the rest.
///
/// # Errors
/// In each case the checkpoint is as before. [`Error::Invalid`](crate::Error::Invalid) for a name that the checkpoint does
/// not have, if no file would be freed or no tensor left, and for a link; [`Error::Unsupported`](crate::Error::Unsupported)
/// for a checkpoint that ranks saved each by itself, and where nobody can know whether another host is saving;
/// [`Error::Busy`](crate::Error::Busy) if a save into the directory is in progress; as for [`remove`] if there is none
/// or files are missing. [`Error::NotDurable`](crate::Error::NotDurable) if it is slimmed, and a crash may undo that.
pub fn slim(path: impl AsRef<Path>, drop: &[String]) -> Result<Slimmed> {
    Store::found()?.slim(path, drop)
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
/// `docs/retention.md` lists what it leaves alone.
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

impl Session {
    /// Creates the directory if it is missing, locks it, cleans up after a killed save, and notes how many ranks will
    /// write. The ranks must write with the same `stripe`.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) if another save there is in progress;
    /// [`Error::Invalid`](crate::Error::Invalid) if it holds safetensors files that ringstow did not write, or if
    /// `world_size` is 0; [`Error::Unsupported`](crate::Error::Unsupported) if it holds a checkpoint of a newer version;
    /// [`Error::Io`](crate::Error::Io); as for [`Config::found`].
    pub fn begin(path: impl AsRef<Path>, world_size: u32) -> Result<Self> {
        Store::found()?.begin(path, world_size)
    }
}
