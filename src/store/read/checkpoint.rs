//! Opening a checkpoint: reads and checks the manifest, and checks that all files exist with their full length.

use crate::config::Config;
use crate::error::{Error, GO_BACK, Result, numbered, some_of};
use crate::format::{FileEntry, Manifest, TensorEntry, Value, names};
use crate::object::{Bucket, is_url};
use crate::pipeline::load::{FileOwner, ShardFile};
use crate::store::layout::manifest;
use crate::store::layout::node::OwnRanks;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::store::layout::stripes::Stripes;
use crate::store::read::dcp_mark;
use crate::store::read::diagnose::{explain, no_manifest, not_ringstows, seen_late};
use crate::store::read::fault::{Fault, PlaceIndex};
use crate::store::read::fingerprint::{Fingerprint, while_replaced};
use crate::store::read::foreign;
use crate::store::read::index::NameIndex;
use crate::store::read::object;
use crate::store::read::values::Values;
use crate::sys::{dir, file};
use std::fs::{FileType, Metadata};
use std::io;
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

/// The shards of a manifest, as they were found.
struct Shards {
    /// One for each file, under its own name if it is missing.
    files: Vec<ShardFile>,
    faults: Vec<Fault>,
    problem: Option<String>,
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
    pub(in crate::store) values: Arc<Values>,
    config: Config,
    /// The fingerprint of the manifest; `None` for another program's directory.
    fingerprint: Option<Fingerprint>,
}

impl Checkpoint {
    /// See [`Checkpoint::open`].
    #[doc(hidden)]
    pub fn open_with(path: impl AsRef<Path>, config: &Config) -> Result<Self> {
        while_replaced(|| Self::open_once(path.as_ref(), config))
    }

    /// See [`Checkpoint::open_damaged`].
    #[doc(hidden)]
    pub fn open_damaged_with(path: impl AsRef<Path>, config: &Config) -> Result<Self> {
        while_replaced(|| Self::open_damaged_once(path.as_ref(), config))
    }

    /// [`Checkpoint::open`] without its retry on [`Error::Replaced`], for callers that retry themselves.
    pub(crate) fn open_once(path: &Path, config: &Config) -> Result<Self> {
        let checkpoint = Self::open_damaged_once(path, config)?;
        checkpoint.check_files()?;
        Ok(checkpoint)
    }

    /// [`Checkpoint::open_damaged`] without its retry on [`Error::Replaced`].
    pub(in crate::store) fn open_damaged_once(path: &Path, config: &Config) -> Result<Self> {
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
        let (files, faults, problem) = object::find_shards(url, &listed.objects, &manifest);
        let shards = Shards { files, faults, problem };
        Ok(Self::new(url, CheckpointKind::Ringstow, (manifest, shards), fingerprint, config))
    }

    /// See [`Checkpoint::open_foreign`].
    #[doc(hidden)]
    pub fn open_foreign_with(path: impl AsRef<Path>, config: &Config) -> Result<Self> {
        while_replaced(|| Self::open_foreign_once(path.as_ref(), config))
    }

    /// [`Checkpoint::open_foreign`] without its retry on [`Error::Replaced`].
    pub(crate) fn open_foreign_once(path: &Path, config: &Config) -> Result<Self> {
        let checkpoint = Self::open_any_once(path, config)?;
        checkpoint.check_files()?;
        Ok(checkpoint)
    }

    /// [`Checkpoint::open_damaged`] and [`Checkpoint::open_foreign`].
    #[doc(hidden)]
    pub fn open_any_with(path: impl AsRef<Path>, config: &Config) -> Result<Self> {
        while_replaced(|| Self::open_any_once(path.as_ref(), config))
    }

    fn open_any_once(path: &Path, config: &Config) -> Result<Self> {
        if is_url(path) {
            return Self::open_damaged_once(path, config);
        }
        manifest::check_directory(path).map_err(|error| explain(path, error))?;
        if dir::has(&path.join(names::MANIFEST)) {
            return Self::open_damaged_once(path, config);
        }
        if stripe_owner(path)?.is_some() {
            return Err(no_manifest(path));
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
        let (by_place, Shards { files, faults, problem }) = (OnceLock::new(), shards);
        Self {
            path,
            kind,
            manifest,
            by_name,
            by_place,
            files,
            faults,
            problem,
            values,
            config,
            fingerprint,
        }
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
}

/// Finds all shards of a manifest, and notes which are missing or of another length.
fn find_shards(dir: &Path, stripe: &[PathBuf], manifest: &Manifest) -> Result<Shards> {
    /// So many may be missing. More than that, and more than there are, do not make a checkpoint: paths and reports of
    /// files that a manifest merely names would take far more memory than the manifest.
    const MISSING_MAX: usize = 1000;
    let stripes = Stripes::to_read(dir, stripe);
    let own = OwnRanks::of(dir, manifest);
    let (mut files, mut faults) = (Vec::with_capacity(manifest.files.len()), Vec::new());
    let mut missing = Vec::new();
    for (number, file) in manifest.files.iter().enumerate() {
        let (shard, fault) = match find_shard(&stripes, manifest, file) {
            Some((shard, There::File(len))) => (shard, Fault::of_length(number, file, len)),
            Some((shard, There::Other(kind))) => {
                (shard, Some(Fault::of_kind(number, file.bytes, kind)))
            }
            Some((shard, There::Refused(error))) => {
                let fault = Fault::of_error(number, file.bytes, &error);
                let refused = || Error::io("opening", &shard.path, error);
                let fault = Some(fault.ok_or_else(refused)?);
                (shard, fault)
            }
            None if !own.wrote(&file.name) => {
                (shard_in(dir, file), Some(Fault::of_elsewhere(number, file.bytes)))
            }
            None => {
                missing.push(file.name.as_str());
                if missing.len() == MISSING_MAX && !is_half_there(&stripes, manifest) {
                    break;
                }
                (shard_in(dir, file), Some(Fault::of_missing(number, file.bytes)))
            }
        };
        files.push(shard);
        faults.extend(fault);
    }
    let problem = (!missing.is_empty()).then(|| missing_shards(&stripes, manifest, &missing));
    if files.len() < manifest.files.len() {
        let reason = problem.unwrap_or_default();
        return Err(Error::MissingFiles { path: dir.into(), reason });
    }
    Ok(Shards { files, faults, problem })
}

/// Whether at least half of the files are there.
fn is_half_there(stripes: &Stripes, manifest: &Manifest) -> bool {
    let there =
        manifest.files.iter().filter(|file| find_shard(stripes, manifest, file).is_some()).count();
    there >= manifest.files.len() / 2
}

/// Says which files are missing and what to do.
fn missing_shards(stripes: &Stripes, manifest: &Manifest, missing: &[&str]) -> String {
    let mut ranks: Vec<u32> = missing.iter().filter_map(|name| names::shard_rank(name)).collect();
    ranks.dedup();
    let of = match manifest.world_size {
        1 => String::new(),
        n => format!(" (of {}, {n} ranks in all)", numbered("rank", &ranks)),
    };
    format!(
        "{} of {} files that its manifest lists are missing{of}: {}; {}{}",
        missing.len(), // at least: see `find_shards`
        manifest.files.len(),
        missing[..missing.len().min(20)].join(", "),
        how_to_find(stripes, manifest),
        seen_late(stripes.own())
    )
}

/// What to do about missing shards.
fn how_to_find(stripes: &Stripes, manifest: &Manifest) -> String {
    let restore = format!("restore them, or {GO_BACK}");
    if manifest.stripes.is_empty() {
        return restore;
    }
    let noted: Vec<String> = manifest.stripes.iter().map(|dir| format!("{dir:?}")).collect();
    let here = match (stripes.stripe_dirs().next(), stripes.left_out()) {
        (None, []) => "which is not configured here".to_owned(),
        (_, []) => "and they are not where it is configured here".to_owned(),
        (_, why) => format!("and here {}", why.join("; ")),
    };
    format!(
        "it was striped over {}, {here}: set `stripe` (Config.stripe, RINGSTOW_STRIPE or ringstow.toml) \
         to where these directories are now, or {restore}",
        some_of(&noted)
    )
}

/// Finds a committed shard: under its own name or, if the save has not renamed it yet or was killed before, under the
/// uncommitted name. Says what is there, too.
fn find_shard(
    stripes: &Stripes,
    manifest: &Manifest,
    file: &FileEntry,
) -> Option<(ShardFile, There)> {
    stripes.dirs().find_map(|dir| find_shard_in(dir, file)).or_else(|| {
        let (dir, refusal) =
            stripes.refused().filter(|_| !stripes.unseen(&manifest.stripes).is_empty())?;
        let refusal = io::Error::from_raw_os_error(refusal.raw_os_error()?);
        Some((shard_in(dir, file), There::Refused(refusal)))
    })
}

/// What has a shard's path.
enum There {
    /// A file of this length.
    File(u64),
    /// Something else.
    Other(FileType),
    /// The system does not say.
    Refused(io::Error),
}

fn find_shard_in(dir: &Path, file: &FileEntry) -> Option<(ShardFile, There)> {
    let mut shard = shard_in(dir, file);
    // Try its own name twice: a save may rename it between the first two tries.
    for _ in 0..3 {
        match dir::look_at(&shard.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                std::mem::swap(&mut shard.path, &mut shard.other_path);
            }
            Err(e) => return Some((shard, There::Refused(e))),
            Ok(found) if !found.is_file() => return Some((shard, There::Other(found.file_type()))),
            Ok(found) => {
                let len = length_of(&shard.path, &found, file.bytes);
                return Some((shard, len.map_or_else(There::Refused, There::File)));
            }
        }
    }
    None
}

/// The length of a shard that should be of this many bytes.
///
/// # Errors
/// The system's.
fn length_of(path: &Path, found: &Metadata, bytes: u64) -> io::Result<u64> {
    if found.len() == bytes {
        return Ok(bytes);
    }
    // A network file system may show the length that this host saw during the save, until the file is opened.
    Ok(file::look(&file::open_read(path, false)?)?.len())
}

/// A shard under its own name.
fn shard_in(dir: &Path, file: &FileEntry) -> ShardFile {
    let (path, other_path) = (dir.join(&file.name), dir.join(names::uncommitted(&file.name)));
    ShardFile { path, other_path, bytes: file.bytes, crc32: file.crc32.clone() }
}
