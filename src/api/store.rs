//! [`Store`]: all calls, with a configuration of the caller's.

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
    self, Checkpoint, DiffReport, Disposal, Found, LoadOptions, Loaded, OpenOptions, Pruning,
    Removed, RetainOptions, Retained, Session, Slimmed, Swept, Wanted, copies_of, while_replaced,
};
use crate::stream::{FileReader, FileWriter, WriteOptions};
use crate::sys::path::{absolute, absolute_or_object};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves, loads, lists and removes checkpoints with one configuration. The crate has functions for the most common
/// calls, with the configuration that is [found](Config::found): they say what the methods of the same name do.
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
        Handle::start(Work::Save, path.clone(), Job::in_background(&self.config), move |job| {
            work(&runtime, &path, job)
        })
    }

    /// As [`save`](crate::save()).
    pub fn save(&self, state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
        self.config.refuse_tiers()?;
        store::save(&*self.runtime()?, state, path.as_ref(), &Job::of(&self.config))
    }

    /// As [`save_async`](crate::save_async()).
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
        self.config.refuse_tiers()?;
        state.tree()?; // refuses invalid values here rather than in the background
        state.lock()?;
        self.start(path, move |runtime, path, job| {
            let report = store::save(runtime, &state, path, job)?;
            drop(state); // its tensors need not outlive the save
            Ok(then(report))
        })
    }

    /// Writes the tensors of a state as Hugging Face's programs read them: `model.safetensors`, or several files with an
    /// index if they exceed the configuration's `shard_bytes`. Other values are not written.
    ///
    /// # Errors
    /// As for [`save`](crate::save()), and no error but [`Error::NotDurable`](crate::Error::NotDurable) leaves a model there;
    /// [`Error::Invalid`](crate::Error::Invalid) if there are model files already;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor that safetensors cannot store.
    pub fn export(&self, state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
        store::export(&*self.runtime()?, state, path.as_ref(), &Job::of(&self.config))
    }

    /// [`Store::export`] in the background.
    ///
    /// # Errors
    /// As for [`save_async`](crate::save_async()).
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
    /// As for [`Store::export_async`].
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
        Session::begin(path, world_size, &self.config)
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
        &self,
        state: &StateDict<'_>,
        rank: u32,
        path: impl AsRef<Path>,
    ) -> Result<(Receipt, SaveReport)> {
        self.config.refuse_tiers()?;
        let job = Job::of(&self.config);
        store::write_rank(&*self.runtime()?, state, rank, path.as_ref(), &job)
    }

    /// [`Store::write_rank`] in the background.
    ///
    /// # Errors
    /// As for [`save_async`](crate::save_async()).
    pub fn write_rank_async(
        &self,
        state: StateDict<'static>,
        rank: u32,
        path: impl AsRef<Path>,
    ) -> Result<SaveHandle<(Receipt, SaveReport)>> {
        self.config.refuse_tiers()?;
        state.lock()?;
        self.start(path.as_ref(), move |runtime, path, job| {
            store::write_rank(runtime, &state, rank, path, job)
        })
    }

    /// As [`Checkpoint::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        self.nearest(path, &copies_of(path, &self.config.tiers))
    }

    /// Opens a checkpoint, or else the first of its copies that is of the same run.
    fn nearest(&self, path: &Path, copies: &[PathBuf]) -> Result<Checkpoint> {
        let failure = match OpenOptions::of(&self.config).copies(copies).open(path) {
            Err(error) if error.is_of_checkpoint() => error,
            opened => return opened,
        };
        for (at, copy) in
            copies.iter().enumerate().filter(|(_, copy)| store::is_one_run(path, copy))
        {
            match OpenOptions::of(&self.config).copies(&copies[at + 1..]).open(copy) {
                Ok(checkpoint) => {
                    let (path, copy) = (path.display(), copy.display());
                    tracing::warn!("{copy} is loaded instead of {path}: {failure}");
                    return Ok(checkpoint);
                }
                Err(error) => tracing::debug!(%error, "{} cannot be opened", copy.display()),
            }
        }
        Err(failure)
    }

    /// As [`load`](crate::load()). Of the tiers that the configuration names, see [`OpenOptions::copies`]: they have the
    /// copies under the same name. If the checkpoint cannot be opened, and directory and tier are noted to be of one run, its
    /// first copy that can be opened is loaded.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        let path = path.as_ref();
        self.load_copied(path, &copies_of(path, &self.config.tiers))
    }

    /// [`Store::load`] of a checkpoint that has these copies, and no others.
    pub(crate) fn load_copied(&self, path: &Path, copies: &[PathBuf]) -> Result<Loaded> {
        self.load_all(path, copies, &Job::of(&self.config))
    }

    /// As [`load_async`](crate::load_async()).
    pub fn load_async(&self, path: impl AsRef<Path>) -> Result<LoadHandle> {
        let (store, path) = (self.clone(), absolute_or_object(path.as_ref())?);
        Handle::start(Work::Load, path.clone(), Job::of(&self.config), move |job| {
            store.load_all(&path, &copies_of(&path, &store.config.tiers), job)
        })
    }

    fn load_all(&self, path: &Path, copies: &[PathBuf], job: &Arc<Job>) -> Result<Loaded> {
        let runtime = self.runtime()?;
        while_replaced(|| {
            let checkpoint = self.nearest(path, copies)?;
            let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
            checkpoint.load_names(names, LoadOptions::default().on(&runtime, job))
        })
    }

    /// As [`verify`](crate::verify()).
    pub fn verify(&self, path: impl AsRef<Path>) -> Result<VerifyReport> {
        store::verify(&*self.runtime()?, path.as_ref(), &Job::of(&self.config))
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
    pub fn promote(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        how: crate::Promotion,
    ) -> Result<crate::PromotionReport> {
        let job = Job::of(&self.config);
        store::promote(&*self.runtime()?, from.as_ref(), to.as_ref(), how, &job)
    }

    /// Says how two checkpoints differ: tensors with other bytes, tensors and values that only one has, other dtypes and
    /// shapes, other values. Reads only tensors whose checksums do not decide: equal checksums count as equal bytes, and what
    /// is on the disk now is not looked at ([`verify`](crate::verify()) does that). Either may be another program's safetensors files; then
    /// values are not compared. With `values`, reads each tensor that differs and counts the elements that differ.
    ///
    /// # Errors
    /// As for [`OpenOptions::open`](crate::OpenOptions::open) with `foreign` and [`Checkpoint::load_part`].
    pub fn diff(
        &self,
        a: impl AsRef<Path>,
        b: impl AsRef<Path>,
        values: bool,
    ) -> Result<DiffReport> {
        let (runtime, job) = (self.runtime()?, Job::of(&self.config));
        store::diff(&runtime, (a.as_ref(), b.as_ref()), values, &job)
    }

    /// Opens a file to be written as a stream, for programs that know no tensors. [`FileWriter::finish`] publishes it whole;
    /// until then an earlier file is untouched.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if the directory is missing or may not be written to, or the path is a directory;
    /// [`Error::Invalid`](crate::Error::Invalid) for a URL, a device or FIFO, and a link that leads nowhere; [`Error::Io`](crate::Error::Io) of
    /// [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if a file is there that must not be replaced.
    pub fn open_write(&self, path: impl AsRef<Path>, options: WriteOptions) -> Result<FileWriter> {
        FileWriter::open(&*self.runtime()?, path.as_ref(), options)
    }

    /// Opens a file to be read as a stream. If [checksums](WriteOptions::checksums) lie beside it, each byte is checked.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if it is missing or a directory; [`Error::Invalid`](crate::Error::Invalid) for a URL.
    pub fn open_read(&self, path: impl AsRef<Path>) -> Result<FileReader> {
        FileReader::open(&*self.runtime()?, path.as_ref())
    }

    /// All checkpoints directly under `dir`, committed or not; `dir` itself if it is a checkpoint and holds no others. Those
    /// that are not [`steps`](crate::steps()) come first, by the time of their commit. Skips directories without files of ringstow, and
    /// unreadable ones whose name is not a step's (`lost+found`). Does not check the tensors' bytes.
    ///
    /// If several ranks saved each by itself, the directory of their shares is one checkpoint. It is committed if every
    /// rank's share is committed and all belong to one save.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if `dir` cannot be listed.
    pub fn list(&self, dir: impl AsRef<Path>) -> Result<Vec<Found>> {
        store::list(dir.as_ref(), &self.config)
    }

    /// As [`steps`](crate::steps()). With a pattern, the steps are the names that fit it, and nothing else.
    pub fn steps(
        &self,
        dir: impl AsRef<Path>,
        pattern: Option<&StepPattern>,
    ) -> Result<Vec<Found>> {
        store::steps(dir, pattern, &self.config)
    }

    /// The newest of the steps in `dir` that matches `wanted`; see [`latest`](crate::latest()).
    ///
    /// # Errors
    /// As for [`latest`](crate::latest()); [`Error::Io`](crate::Error::Io) for read failures that are not damage; [`Error::Invalid`](crate::Error::Invalid) if [`Before`](crate::Before) is not one of
    /// the steps.
    pub fn latest(&self, dir: impl AsRef<Path>, wanted: &Wanted) -> Result<Option<PathBuf>> {
        let newest = store::latest(dir, wanted, &self.config, &Job::of(&self.config))?;
        Ok(newest.map(|found| found.path))
    }

    /// See [`retain`](crate::retain()).
    ///
    /// # Errors
    /// As for [`retain`](crate::retain()); [`Error::Invalid`](crate::Error::Invalid) for a rule that keeps nothing.
    pub fn retain(&self, root: impl AsRef<Path>, retention: &RetainOptions) -> Result<Retained> {
        store::retain(root, retention, &self.config)
    }

    /// What [`Store::retain`] would do now. Changes nothing.
    pub fn retain_plan(
        &self,
        root: impl AsRef<Path>,
        retention: &RetainOptions,
    ) -> Result<Retained> {
        store::retain_plan(root, retention, &self.config)
    }

    /// As [`remove`](crate::remove()).
    pub fn remove(&self, path: impl AsRef<Path>, disposal: Disposal) -> Result<Removed> {
        store::remove_checkpoint(path.as_ref(), disposal, &self.config)
    }

    /// Drops the values of these names and below them from the checkpoint at `path`, the tensors to which only they refer,
    /// and the files that hold nothing else: `["optimizer"]` leaves what inference needs. The save must have set these names
    /// [droppable](StateDict::droppable). A load of the rest goes on as before. If the process is killed meanwhile, the checkpoint is
    /// as before or slimmed, and the next save into its directory or [`prune`](crate::prune()) removes the rest.
    ///
    /// # Errors
    /// In each case the checkpoint is as before. [`Error::Invalid`](crate::Error::Invalid) for a name that the checkpoint does
    /// not have, if no file would be freed or no tensor left, and for a link; [`Error::Unsupported`](crate::Error::Unsupported)
    /// for a checkpoint that ranks saved each by itself, and where nobody can know whether another host is saving;
    /// [`Error::Busy`](crate::Error::Busy) if a save into the directory is in progress; as for [`remove`](crate::remove()) if there is none
    /// or files are missing. [`Error::NotDurable`](crate::Error::NotDurable) if it is slimmed, and a crash may undo that.
    pub fn slim(&self, path: impl AsRef<Path>, drop: &[String]) -> Result<Slimmed> {
        store::slim(path.as_ref(), drop, &self.config)
    }

    /// As [`prune`](crate::prune()).
    pub fn prune(&self, dir: impl AsRef<Path>) -> Result<Swept> {
        store::prune(dir.as_ref(), &self.config)
    }

    /// [`prune`](crate::prune()), as `pruning` says: also directories to which other hosts could be saving, if the caller promises that
    /// none does.
    ///
    /// # Errors
    /// As for [`prune`](crate::prune()).
    pub fn prune_with(&self, dir: impl AsRef<Path>, pruning: Pruning) -> Result<Swept> {
        store::prune_with(dir.as_ref(), pruning, &self.config)
    }

    /// What [`Store::prune`] would do now. Changes nothing.
    pub fn prune_plan(&self, dir: impl AsRef<Path>) -> Result<Swept> {
        store::prune_plan(dir.as_ref(), &self.config)
    }
}
