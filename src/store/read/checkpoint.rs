//! Opening a checkpoint: reads and checks the manifest, and checks that all files exist with their full length.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{Manifest, SaveId, TensorEntry, Value, names};
use crate::object::{Bucket, is_url};
use crate::pipeline::load::{FileOwner, ShardFile};
use crate::store::layout::manifest;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::store::layout::summary;
use crate::store::read::again::while_replaced;
use crate::store::read::copies::{Copies, OpenCopy};
use crate::store::read::dcp_mark;
use crate::store::read::diagnose::{explain, no_manifest, not_ringstows};
use crate::store::read::fault::{Fault, FaultKind, PlaceIndex};
use crate::store::read::fingerprint::Fingerprint;
use crate::store::read::foreign;
use crate::store::read::index::NameIndex;
use crate::store::read::kinds;
use crate::store::read::object;
use crate::store::read::shards::{Shards, find_shards};
use crate::store::read::values::Values;
use crate::sys::dir;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Which program wrote a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointKind {
    /// ringstow: committed by a manifest that has a checksum of every chunk.
    Ringstow,
    /// Another program: safetensors files, without checksums.
    Safetensors,
}

/// A committed checkpoint, opened.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    kind: CheckpointKind,
    pub(in crate::store) manifest: Arc<Manifest>,
    by_name: NameIndex,
    pub(in crate::store) by_place: OnceLock<PlaceIndex>,
    pub(in crate::store) files: Vec<ShardFile>,
    /// What is wrong with the files, by rising number; empty unless it was opened although damaged.
    pub(in crate::store) faults: Vec<Fault>,
    /// Which files are missing, and what to do.
    pub(in crate::store) problem: Option<String>,
    /// Where else it is.
    pub(in crate::store) copies: Copies,
    pub(in crate::store) values: Arc<Values>,
    config: Config,
    /// The fingerprint of the manifest; `None` for another program's directory.
    fingerprint: Option<Fingerprint>,
}

/// How to open a checkpoint. [`Checkpoint::open`] is the common way.
///
/// ```no_run
/// use ringstow::OpenOptions;
///
/// # fn main() -> ringstow::Result<()> {
/// let model = OpenOptions::new().foreign(true).open("model")?; // a directory of safetensors files
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[must_use]
pub struct OpenOptions<'a> {
    config: Option<&'a Config>,
    copies: &'a [PathBuf],
    damaged: bool,
    foreign: bool,
}

impl<'a> OpenOptions<'a> {
    /// Opens with the configuration that is [found](Config::found), except for its tiers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens with this configuration, except for its tiers: [`Store::open`](crate::Store::open) reads from those.
    pub fn of(config: &'a Config) -> Self {
        Self { config: Some(config), ..Self::default() }
    }

    /// Whether a checkpoint is also opened if files of it are missing, or have another length than they should. Loads of
    /// tensors in them fail; with [`OnCorrupt::Skip`](crate::OnCorrupt::Skip) they return all others. A damaged manifest is
    /// still an error.
    pub fn damaged(self, damaged: bool) -> Self {
        Self { damaged, ..self }
    }

    /// Whether safetensors files without a manifest are also opened: a file, an index (`model.safetensors.index.json`), or
    /// a directory, of which the files are read that `from_pretrained` chooses. They may hold whole tensors, as Hugging
    /// Face's libraries write them, or chunks, as PyTorch's `HuggingFaceStorageWriter` does. They have no checksums, so
    /// loads are not verified.
    pub fn foreign(self, foreign: bool) -> Self {
        Self { foreign, ..self }
    }

    /// Copies of the checkpoint, the nearest first. A file that is missing or cut, a checksum chunk that is damaged and one
    /// on a bad sector are read from the first copy that has them whole: a warning and
    /// [`LoadReport::fallbacks`](crate::LoadReport) say so. A copy that is not of the same save is not read.
    pub fn copies(self, copies: &'a [PathBuf]) -> Self {
        Self { copies, ..self }
    }

    /// Opens the checkpoint at `path`.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], if no copy helps. With [`damaged`](Self::damaged) not for missing files and wrong lengths.
    /// With [`foreign`](Self::foreign) [`Error::NotCommitted`] also for ringstow's shards without a manifest;
    /// [`Error::Invalid`] for several variants of a model, and none without one; [`Error::Unsupported`] for a single shard of
    /// ringstow's and for weights by `torch.save`;
    /// [`Error::MissingFiles`] also for files and tensors that an index lists, and for chunks of tensors;
    /// [`Error::Format`] for files that are not safetensors.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        match self.config {
            Some(config) => while_replaced(|| self.open_once(path, config)),
            None => {
                let config = Config::found()?;
                while_replaced(|| self.open_once(path, &config))
            }
        }
    }

    /// [`OpenOptions::open`] with a configuration, without its retry on [`Error::Replaced`]: for callers that retry
    /// themselves.
    pub(crate) fn open_once(self, path: &Path, config: &Config) -> Result<Checkpoint> {
        let checkpoint = match self.foreign && !is_url(path) {
            true => Checkpoint::open_any(path, config)?,
            false => Checkpoint::open_own(path, config)?,
        };
        let checkpoint = checkpoint.beside(self.copies);
        if !self.damaged {
            checkpoint.check_files()?;
        }
        Ok(checkpoint)
    }
}

impl Checkpoint {
    /// Opens a checkpoint of ringstow's, although files may be missing.
    fn open_own(path: &Path, config: &Config) -> Result<Self> {
        config.validate()?;
        if is_url(path) {
            return Self::open_object(path, config);
        }
        let bytes = manifest::read_bytes(path).map_err(|error| explain(path, error))?;
        let bytes = bytes.ok_or_else(|| no_manifest(path))?;
        dcp_mark::refuse_newer(path)?;
        let fingerprint = Fingerprint::of(&bytes);
        let manifest = Manifest::decode(bytes, &path.join(names::MANIFEST))
            .map_err(|error| not_ringstows(path).unwrap_or(error))?;
        let shards = find_shards(path, &config.stripe, &manifest);
        if !shards.as_ref().is_ok_and(|shards| shards.faults.is_empty()) {
            // A save that committed since the manifest was read has removed its shards.
            fingerprint.map_or(Ok(()), |fingerprint| fingerprint.check(path, false))?;
        }
        let kind = CheckpointKind::Ringstow;
        Ok(Self::new(path, kind, (manifest, shards?), fingerprint, config))
    }

    /// Opens the checkpoint of a URL, although files may be missing.
    fn open_object(url: &Path, config: &Config) -> Result<Self> {
        let bucket = Bucket::at(url)?;
        let bytes = object::read_manifest(&bucket)?;
        let bytes = bytes.ok_or_else(|| object::no_manifest(&bucket))?;
        let fingerprint = Fingerprint::of(&bytes);
        let manifest = Manifest::decode(bytes, &url.join(names::MANIFEST))?;
        let listed = bucket.list().map_err(|error| Error::io("listing", url, error))?;
        let shards = object::find_shards(url, &listed.objects, &manifest);
        Ok(Self::new(url, CheckpointKind::Ringstow, (manifest, shards), fingerprint, config))
    }

    /// Opens a checkpoint of any program, although files may be missing.
    fn open_any(path: &Path, config: &Config) -> Result<Self> {
        config.validate()?;
        if !kinds::is_model_file(path)? {
            manifest::check_directory(path).map_err(|error| explain(path, error))?;
            if dir::has(&path.join(names::MANIFEST)) {
                return Self::open_own(path, config);
            }
            if stripe_owner(path)?.is_some() {
                return Err(no_manifest(path));
            }
        }
        let (manifest, files) = foreign::read(path)?;
        let shards = Shards { files, faults: Vec::new(), problem: None };
        Ok(Self::new(path, CheckpointKind::Safetensors, (manifest, shards), None, config))
    }

    fn new(
        path: &Path,
        kind: CheckpointKind,
        (manifest, shards): (Manifest, Shards),
        fingerprint: Option<Fingerprint>,
        config: &Config,
    ) -> Self {
        let by_name = NameIndex::new(manifest.tensors.iter().map(|tensor| tensor.name.as_str()));
        let manifest = Arc::new(manifest);
        let values = Arc::new(Values::new(path, &manifest));
        let (path, config) = (path.into(), config.clone());
        let Shards { files, faults, problem } = shards;
        let (by_place, copies) = Default::default();
        Self {
            path,
            kind,
            manifest,
            by_name,
            by_place,
            files,
            faults,
            problem,
            copies,
            values,
            config,
            fingerprint,
        }
    }

    /// The same checkpoint, with these copies. Files that it lacks are replaced by theirs.
    fn beside(mut self, copies: &[PathBuf]) -> Self {
        if copies.is_empty() {
            return self;
        }
        let mut copies = Copies::new(copies);
        for fault in std::mem::take(&mut self.faults) {
            // What is on another node is not lost.
            let is_lost = fault.kind != FaultKind::Elsewhere;
            let (own, open) = (&self.files[fault.file], |path: &Path| self.open_copy(path));
            let shard = is_lost.then(|| copies.shards(fault.file, own, open).next().cloned());
            let Some(shard) = shard.flatten() else {
                self.faults.push(fault);
                continue;
            };
            let why = format!("{} should be {}, is {}", fault.what, fault.expected, fault.got);
            copies.note(self.path(), &own.path, &shard.path, &why);
            let own = std::mem::replace(&mut self.files[fault.file], shard);
            if fault.kind == FaultKind::Length {
                copies.cut.insert(fault.file, own);
            }
        }
        if !self.faults.iter().any(|fault| fault.kind == FaultKind::Missing) {
            self.problem = None;
        }
        self.copies = copies;
        self
    }

    /// Which program wrote it.
    pub fn kind(&self) -> CheckpointKind {
        self.kind
    }

    /// A text that identifies this checkpoint and differs from that of any other checkpoint at the same path. `None`
    /// for another program's files.
    pub fn fingerprint(&self) -> Option<String> {
        self.fingerprint.map(|fingerprint| fingerprint.to_string())
    }

    /// The checkpoint's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its shards were found, in the order of the manifest's files.
    pub fn shard_paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The name of a file of the manifest, by its number, if the file was found under its uncommitted name: the save
    /// has not renamed it yet, or was killed after its commit.
    pub fn uncommitted_name(&self, file: usize) -> Option<String> {
        let name = self.files[file].path.file_name()?.to_str()?;
        names::is_uncommitted(name).then(|| name.to_owned())
    }

    /// The manifest: everything except the tensors' bytes.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The tensors, in the order in which they were saved.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.manifest.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.number(name).map(|number| &self.tensors()[number])
    }

    /// The tensor's number in [`Checkpoint::tensors`].
    pub fn number(&self, name: &str) -> Option<usize> {
        self.by_name.find(name, |number| &self.tensors()[number].name)
    }

    /// The values that are not tensors, and where the tensors belong among them.
    ///
    /// # Errors
    /// [`Error::Format`] if they cannot be read.
    pub fn state(&self) -> Result<Value> {
        self.values.tree().cloned()
    }

    /// The value of this name. Reads no tensor. A name is the path through nested dictionaries and lists, joined by
    /// dots: `optimizer.param_groups.0.lr`.
    ///
    /// # Errors
    /// [`Error::Keys`] if there is no such name; as for [`Checkpoint::state`].
    pub fn value(&self, name: &str) -> Result<&Value> {
        self.values.value(name)
    }

    /// Checks that the manifest is still the one that was opened; see [`Fingerprint::check`].
    ///
    /// # Errors
    /// As for [`Fingerprint::check`].
    pub(in crate::store) fn check_unchanged(&self, all_open: bool) -> Result<()> {
        self.fingerprint.map_or(Ok(()), |fingerprint| fingerprint.check(&self.path, all_open))
    }

    /// Remembers its manifest in brief; see [`summary`].
    pub(in crate::store) fn remember(&self) {
        if let Some((bytes, trailer)) = self.fingerprint.map(|fingerprint| fingerprint.parts()) {
            summary::remember(&self.path, &self.manifest, bytes, trailer);
        }
    }

    /// A copy of it; `None` if nothing can be read from there, which a warning says.
    pub(in crate::store) fn open_copy(&self, path: &Path) -> Option<OpenCopy> {
        match Self::open_own(path, &self.config) {
            Ok(copy) if is_same_save(&copy.manifest, &self.manifest) => {
                let Self { files, faults, problem, fingerprint, .. } = copy;
                return Some(OpenCopy { shards: Shards { files, faults, problem }, fingerprint });
            }
            Ok(_) => tracing::warn!(
                "nothing is read from {}: it is another checkpoint than {}",
                path.display(),
                self.path.display()
            ),
            Err(error) => tracing::warn!("nothing is read from {}: {error}", path.display()),
        }
        None
    }

    /// The configuration that it was opened with.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }
}

impl FileOwner for Checkpoint {
    /// Accepts another program's directory, which has no fingerprint, and files that were opened before the checkpoint
    /// was slimmed.
    fn check_same(&self, all_open: bool) -> Result<()> {
        let error = match self.check_unchanged(all_open) {
            Err(error @ Error::Replaced { .. }) => error,
            checked => return checked,
        };
        match manifest::read_files(&self.path)? {
            Some(now) if now.is_slimmer_than(&self.manifest) && all_open => Ok(()),
            Some(now) if now.is_slimmer_than(&self.manifest) => {
                Err(Error::Slimmed { path: self.path.clone(), dropped: now.dropped })
            }
            _ => Err(error),
        }
    }

    fn tensors_in(&self, file: usize, range: &Range<u64>) -> Vec<String> {
        self.names_in(file, range)
    }

    fn check_copies(&self, files: &[Option<&Path>]) -> Result<()> {
        self.copies.check(files, &self.files, |copy| self.open_copy(copy))
    }

    fn read_copy(
        &self,
        file: usize,
        why: &dyn Display,
        read: &mut dyn FnMut(&Path) -> bool,
    ) -> bool {
        let own = &self.files[file];
        let shards = self.copies.shards(file, own, |copy| self.open_copy(copy));
        let others = shards.filter(|shard| shard.path != own.path);
        let mut others = others.chain(self.copies.cut.get(&file));
        let Some(shard) = others.find(|shard| read(&shard.path)) else { return false };
        self.copies.note(&self.path, &own.path, &shard.path, why);
        true
    }
}

/// Whether two manifests are of one save, slimmed or not: a copy gives the files names of its own.
fn is_same_save(one: &Manifest, other: &Manifest) -> bool {
    SaveId::of(one) == SaveId::of(other)
}
