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
    Removed, Retained, Retention, Session, Slimmed, Swept, Wanted, copies_of, while_replaced,
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

    /// As [`export`](crate::export()).
    pub fn export(&self, state: &StateDict<'_>, path: impl AsRef<Path>) -> Result<SaveReport> {
        store::export(&*self.runtime()?, state, path.as_ref(), &Job::of(&self.config))
    }

    /// As [`export_async`](crate::export_async()).
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
    /// As for [`export_async`](crate::export_async()).
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

    /// As [`write_rank`](crate::write_rank()).
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

    /// As [`write_rank_async`](crate::write_rank_async()).
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

    /// As [`promote`](crate::promote()), as [`Promotion`](crate::Promotion) says.
    pub fn promote(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        how: crate::Promotion,
    ) -> Result<crate::PromotionReport> {
        let job = Job::of(&self.config);
        store::promote(&*self.runtime()?, from.as_ref(), to.as_ref(), how, &job)
    }

    /// As [`diff`](crate::diff()); with `values`, reads each tensor that differs and counts its elements.
    pub fn diff(
        &self,
        a: impl AsRef<Path>,
        b: impl AsRef<Path>,
        values: bool,
    ) -> Result<DiffReport> {
        let (runtime, job) = (self.runtime()?, Job::of(&self.config));
        store::diff(&runtime, (a.as_ref(), b.as_ref()), values, &job)
    }

    /// As [`open_write`](crate::open_write()), with options.
    ///
    /// # Errors
    /// As for [`open_write`](crate::open_write()); [`Error::Io`](crate::Error::Io) of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if a
    /// file is there that must not be replaced.
    pub fn open_write(&self, path: impl AsRef<Path>, options: WriteOptions) -> Result<FileWriter> {
        FileWriter::open(&*self.runtime()?, path.as_ref(), options)
    }

    /// As [`open_read`](crate::open_read()).
    pub fn open_read(&self, path: impl AsRef<Path>) -> Result<FileReader> {
        FileReader::open(&*self.runtime()?, path.as_ref())
    }

    /// As [`list`](crate::list()).
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
    /// As for [`latest_verified`](crate::latest_verified()); [`Error::Invalid`](crate::Error::Invalid) if [`Before`](crate::Before) is not one of
    /// the steps.
    pub fn latest(&self, dir: impl AsRef<Path>, wanted: &Wanted) -> Result<Option<PathBuf>> {
        store::latest(dir, wanted, &self.config, &Job::of(&self.config))
    }

    /// See [`retain`](crate::retain()).
    ///
    /// # Errors
    /// As for [`retain`](crate::retain()); [`Error::Invalid`](crate::Error::Invalid) for a rule that keeps nothing.
    pub fn retain(&self, root: impl AsRef<Path>, retention: &Retention) -> Result<Retained> {
        store::retain(root, retention, &self.config)
    }

    /// What [`Store::retain`] would do now. Changes nothing.
    pub fn retain_plan(&self, root: impl AsRef<Path>, retention: &Retention) -> Result<Retained> {
        store::retain_plan(root, retention, &self.config)
    }

    /// As [`remove`](crate::remove()).
    pub fn remove(&self, path: impl AsRef<Path>, disposal: Disposal) -> Result<Removed> {
        store::remove_checkpoint(path.as_ref(), disposal, &self.config)
    }

    /// As [`slim`](crate::slim()).
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
