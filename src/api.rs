//! What a trainer calls: a [`Store`], and the same functions with the configuration that is [found](Config::found).

use crate::config::Config;
use crate::error::Result;
use crate::format::{Receipt, StepPattern};
use crate::handle::{Handle, LoadHandle, SaveHandle, Work};
use crate::pipeline::job::Job;
use crate::pipeline::report::{SaveReport, VerifyReport};
use crate::pipeline::runtime::Runtime;
use crate::plan::share::{Place, SharedFile};
use crate::state::StateDict;
use crate::store::{
    self, Checkpoint, DiffReport, Disposal, Found, LoadOptions, Loaded, Pruning, Removed, Retained,
    Retention, Session, Slimmed, Swept, Wanted, while_replaced,
};
use crate::stream::{FileReader, FileWriter, WriteOptions};
use crate::sys::path::{absolute, absolute_or_object};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves, loads, lists and removes checkpoints with one configuration. Each method does what the function of its name
/// does, and returns the same errors.
///
/// Stores whose configurations need the same pool and engines share them. A store takes nothing from the system until
/// it saves or loads, and a clone of it costs nothing.
#[derive(Debug, Clone)]
pub struct Store {
    config: Arc<Config>,
}

impl Store {
    /// A store with this configuration.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) naming the invalid field.
    pub fn new(config: Config) -> Result<Self> {
        config.validate()?;
        Ok(Self { config: Arc::new(config) })
    }

    /// A store with the configuration that is [found](Config::found) in the environment and `ringstow.toml`.
    ///
    /// # Errors
    /// As for [`Config::found`].
    pub fn found() -> Result<Self> {
        Self::new(Config::found()?)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Looks up the shared runtime for each call, so that a forked child never gets its parent's.
    fn runtime(&self) -> Result<Arc<Runtime>> {
        Runtime::shared(&self.config)
    }

    /// Runs a save in the background.
    fn start<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce(&Runtime, &Path, &Arc<Job>) -> Result<T> + Send + 'static,
    ) -> Result<SaveHandle<T>> {
        let (runtime, path) = (self.runtime()?, absolute(path)?);
        Handle::start(Work::Save, path.clone(), Job::of(&self.config), move |job| {
            work(&runtime, &path, job)
        })
    }

    /// As [`save`].
    pub fn save(&self, state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
        store::save(&*self.runtime()?, state, path.as_ref(), &Job::of(&self.config))
    }

    /// As [`save_async`].
    pub fn save_async(
        &self,
        state: StateDict<'static>,
        path: impl AsRef<Path>,
    ) -> Result<SaveHandle> {
        self.save_then(state, path.as_ref(), |report| report)
    }

    /// [`Store::save_async`], and `then` on its thread after the commit. The handle returns what `then` does.
    pub(crate) fn save_then<T: Send + 'static>(
        &self,
        state: StateDict<'static>,
        path: &Path,
        then: impl FnOnce(SaveReport) -> T + Send + 'static,
    ) -> Result<SaveHandle<T>> {
        state.tree()?; // refuses invalid values here rather than in the background
        state.lock()?;
        self.start(path, move |runtime, path, job| {
            let report = store::save(runtime, &state, path, job)?;
            drop(state); // its tensors need not outlive the save
            Ok(then(report))
        })
    }

    /// As [`export`].
    pub fn export(&self, state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
        store::export(&*self.runtime()?, state, path.as_ref(), &Job::of(&self.config))
    }

    /// As [`export_async`].
    pub fn export_async(
        &self,
        state: StateDict<'static>,
        path: impl AsRef<Path>,
    ) -> Result<SaveHandle> {
        state.lock()?;
        self.start(path.as_ref(), move |runtime, path, job| {
            store::export(runtime, &state, path, job)
        })
    }

    /// Writes one rank's share of a model that several ranks export. For the Python binding, which does the ranks' part.
    ///
    /// # Errors
    /// As for [`export_async`].
    #[doc(hidden)]
    pub fn write_model_share_async(
        &self,
        state: StateDict<'static>,
        dir: impl AsRef<Path>,
        files: Vec<(PathBuf, SharedFile)>,
        places: Vec<Place>,
    ) -> Result<SaveHandle> {
        self.start(dir.as_ref(), move |runtime, dir, job| {
            store::write_model_share(runtime, &state, dir, (&files, &places), job)
        })
    }

    /// As [`Session::begin`].
    pub fn begin(&self, path: impl AsRef<Path>, world_size: u32) -> Result<Session> {
        Session::begin_with(path, world_size, &self.config)
    }

    /// As [`write_rank`].
    pub fn write_rank(
        &self,
        state: &StateDict<'_>,
        rank: u32,
        path: impl AsRef<Path>,
    ) -> Result<(Receipt, SaveReport)> {
        let job = Job::of(&self.config);
        store::write_rank(&*self.runtime()?, state, rank, path.as_ref(), &job)
    }

    /// As [`write_rank_async`].
    pub fn write_rank_async(
        &self,
        state: StateDict<'static>,
        rank: u32,
        path: impl AsRef<Path>,
    ) -> Result<SaveHandle<(Receipt, SaveReport)>> {
        state.lock()?;
        self.start(path.as_ref(), move |runtime, path, job| {
            store::write_rank(runtime, &state, rank, path, job)
        })
    }

    /// As [`Checkpoint::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_with(path, &self.config)
    }

    /// As [`Checkpoint::open_damaged`].
    pub fn open_damaged(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_damaged_with(path, &self.config)
    }

    /// As [`Checkpoint::open_foreign`].
    pub fn open_foreign(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_foreign_with(path, &self.config)
    }

    /// As [`load`].
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        self.load_all(path.as_ref(), &Job::of(&self.config))
    }

    /// As [`load_async`].
    pub fn load_async(&self, path: impl AsRef<Path>) -> Result<LoadHandle> {
        let (store, path) = (self.clone(), absolute_or_object(path.as_ref())?);
        Handle::start(Work::Load, path.clone(), Job::of(&self.config), move |job| {
            store.load_all(&path, job)
        })
    }

    fn load_all(&self, path: &Path, job: &Arc<Job>) -> Result<Loaded> {
        let runtime = self.runtime()?;
        while_replaced(|| {
            let checkpoint = Checkpoint::open_once(path, &self.config)?;
            let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
            checkpoint.load_names(names, LoadOptions::default().on(&runtime, job))
        })
    }

    /// As [`verify`].
    pub fn verify(&self, path: impl AsRef<Path>) -> Result<VerifyReport> {
        store::verify(&*self.runtime()?, path.as_ref(), &Job::of(&self.config))
    }

    /// As [`promote`], as [`Promotion`](crate::Promotion) says.
    #[cfg(feature = "object-store")]
    pub fn promote(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        how: crate::Promotion,
    ) -> Result<crate::PromotionReport> {
        let job = Job::of(&self.config);
        store::promote(&*self.runtime()?, from.as_ref(), to.as_ref(), how, &job)
    }

    /// As [`diff`]; with `values`, reads each tensor that differs and counts its elements.
    pub fn diff(
        &self,
        a: impl AsRef<Path>,
        b: impl AsRef<Path>,
        values: bool,
    ) -> Result<DiffReport> {
        let (runtime, job) = (self.runtime()?, Job::of(&self.config));
        store::diff(&runtime, (a.as_ref(), b.as_ref()), values, &job)
    }

    /// As [`open_write`], with options.
    ///
    /// # Errors
    /// As for [`open_write`]; [`Error::Io`](crate::Error::Io) of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if a
    /// file is there that must not be replaced.
    pub fn open_write(&self, path: impl AsRef<Path>, options: WriteOptions) -> Result<FileWriter> {
        FileWriter::open(&*self.runtime()?, path.as_ref(), options)
    }

    /// As [`open_read`].
    pub fn open_read(&self, path: impl AsRef<Path>) -> Result<FileReader> {
        FileReader::open(&*self.runtime()?, path.as_ref())
    }

    /// As [`list`].
    pub fn list(&self, dir: impl AsRef<Path>) -> Result<Vec<Found>> {
        store::list(dir.as_ref(), &self.config)
    }

    /// As [`steps`]. With a pattern, the steps are the names that fit it, and nothing else.
    pub fn steps(
        &self,
        dir: impl AsRef<Path>,
        pattern: Option<&StepPattern>,
    ) -> Result<Vec<Found>> {
        store::steps(dir, pattern, &self.config)
    }

    /// The newest of the steps in `dir` that matches `wanted`; see [`latest`].
    ///
    /// # Errors
    /// As for [`latest_verified`]; [`Error::Invalid`](crate::Error::Invalid) if [`Before`](crate::Before) is not one of
    /// the steps.
    pub fn latest(&self, dir: impl AsRef<Path>, wanted: &Wanted) -> Result<Option<PathBuf>> {
        store::latest(dir, wanted, &self.config, &Job::of(&self.config))
    }

    /// See [`retain`].
    ///
    /// # Errors
    /// As for [`retain`]; [`Error::Invalid`](crate::Error::Invalid) for a rule that keeps nothing.
    pub fn retain(&self, root: impl AsRef<Path>, retention: &Retention) -> Result<Retained> {
        store::retain(root, retention, &self.config)
    }

    /// What [`Store::retain`] would do now. Changes nothing.
    pub fn retain_plan(&self, root: impl AsRef<Path>, retention: &Retention) -> Result<Retained> {
        store::retain_plan(root, retention, &self.config)
    }

    /// As [`remove`].
    pub fn remove(&self, path: impl AsRef<Path>, disposal: Disposal) -> Result<Removed> {
        store::remove_checkpoint(path.as_ref(), disposal, &self.config)
    }

    /// As [`slim`].
    pub fn slim(&self, path: impl AsRef<Path>, drop: &[String]) -> Result<Slimmed> {
        store::slim(path.as_ref(), drop, &self.config)
    }

    /// As [`prune`].
    pub fn prune(&self, dir: impl AsRef<Path>) -> Result<Swept> {
        store::prune(dir.as_ref(), &self.config)
    }

    /// [`prune`], as `pruning` says: also directories to which other hosts could be saving, if the caller promises that
    /// none does.
    ///
    /// # Errors
    /// As for [`prune`].
    pub fn prune_with(&self, dir: impl AsRef<Path>, pruning: Pruning) -> Result<Swept> {
        store::prune_with(dir.as_ref(), pruning, &self.config)
    }

    /// What [`Store::prune`] would do now. Changes nothing.
    pub fn prune_plan(&self, dir: impl AsRef<Path>) -> Result<Swept> {
        store::prune_plan(dir.as_ref(), &self.config)
    }
}

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
/// As for [`Checkpoint::open_damaged`], a damaged manifest included; [`Error::Io`](crate::Error::Io).
pub fn verify(path: impl AsRef<Path>) -> Result<VerifyReport> {
    Store::found()?.verify(path)
}

/// Copies the checkpoint in the directory `from` to an object store: `s3://bucket/run/step-1000`, `gs://…` or `az://…`. There it
/// is loaded by its URL. Each block is compared with its checksum on the way, and the manifest comes last: nobody sees half of a
/// checkpoint. After a failure or a kill, the same call goes on where it was.
///
/// Credentials come from the environment (`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` and
/// so on, or the machine's own), and go nowhere else.
///
/// # Errors
/// As for [`Checkpoint::open`]; [`Error::Corrupt`](crate::Error::Corrupt) if a file is damaged, of which nothing is committed;
/// [`Error::Io`](crate::Error::Io) of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if another checkpoint is at the URL, and of
/// other kinds for what the store says; [`Error::Busy`](crate::Error::Busy) if the same promotion is in progress on this host.
#[cfg(feature = "object-store")]
pub fn promote(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<crate::PromotionReport> {
    Store::found()?.promote(from, to, crate::Promotion::default())
}

/// Says how two checkpoints differ: tensors with other bytes, tensors and values that only one has, other dtypes and
/// shapes, other values. Reads only tensors whose checksums do not decide: equal checksums count as equal bytes, and what
/// is on the disk now is not looked at ([`verify`] does that). Either may be another program's safetensors files; then
/// values are not compared. [`Store::diff`] counts elements.
///
/// # Errors
/// As for [`Checkpoint::open_foreign`] and [`Checkpoint::load_part`].
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

    /// [`Checkpoint::open`] that also opens a checkpoint whose files are missing, or have another length than they
    /// should. Loads of tensors in them fail; with [`OnCorrupt::Skip`](crate::OnCorrupt::Skip) they return all others.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], except for missing files and wrong lengths. A damaged manifest is still an error.
    pub fn open_damaged(path: impl AsRef<Path>) -> Result<Self> {
        Store::found()?.open_damaged(path)
    }

    /// [`Checkpoint::open`] that also opens a directory of safetensors files without a manifest. The files may hold
    /// whole tensors, as Hugging Face's libraries write them, or chunks, as PyTorch's `HuggingFaceStorageWriter` does.
    /// They have no checksums, so loads are not verified.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`];
    /// [`Error::NotCommitted`](crate::Error::NotCommitted) also for ringstow's shards without a manifest;
    /// [`Error::MissingFiles`](crate::Error::MissingFiles) also for files and tensors that an index lists, and for chunks
    /// of tensors;
    /// [`Error::Format`](crate::Error::Format) for files that are not safetensors.
    pub fn open_foreign(path: impl AsRef<Path>) -> Result<Self> {
        Store::found()?.open_foreign(path)
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
