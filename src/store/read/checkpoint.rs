//! Opening a checkpoint: reads and checks the manifest, and checks that all files exist with their full length.

use crate::config::Config;
use crate::error::{Error, Result, numbered, some_of};
use crate::format::{FileEntry, Manifest, TensorEntry, Value, names};
use crate::pipeline::load::{FileOwner, ShardFile};
use crate::store::layout::manifest;
use crate::store::layout::stripes::{Stripes, stripe_owner};
use crate::store::read::dcp_mark;
use crate::store::read::diagnose::{explain, no_manifest};
use crate::store::read::fingerprint::{Fingerprint, while_replaced};
use crate::store::read::foreign;
use crate::store::read::index::NameIndex;
use crate::store::read::values::Values;
use crate::sys::{dir, file};
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    pub(in crate::store) files: Vec<ShardFile>,
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

    /// [`Checkpoint::open`] without its retry on [`Error::Replaced`], for callers that retry themselves.
    pub(crate) fn open_once(path: &Path, config: &Config) -> Result<Self> {
        config.validate()?;
        let bytes = manifest::read_bytes(path).map_err(|error| explain(path, error))?;
        let bytes = bytes.ok_or_else(|| no_manifest(path))?;
        dcp_mark::refuse_newer(path)?;
        let fingerprint = Fingerprint::of(&bytes);
        let manifest = Manifest::decode(bytes, &path.join(names::MANIFEST))?;
        match find_shards(path, &config.stripe, &manifest) {
            Ok(files) => Ok(Self::new(
                path,
                CheckpointKind::Ringstow,
                (manifest, files),
                fingerprint,
                config,
            )),
            Err(error) => {
                // A save that committed since the manifest was read has removed its shards.
                fingerprint.map_or(Ok(()), |fingerprint| fingerprint.check(path, false))?;
                Err(error)
            }
        }
    }

    /// See [`Checkpoint::open_foreign`].
    #[doc(hidden)]
    pub fn open_foreign_with(path: impl AsRef<Path>, config: &Config) -> Result<Self> {
        let path = path.as_ref();
        manifest::check_directory(path).map_err(|error| explain(path, error))?;
        if dir::has(&path.join(names::MANIFEST)) {
            return Self::open_with(path, config);
        }
        if stripe_owner(path)?.is_some() {
            return Err(no_manifest(path));
        }
        Ok(Self::new(path, CheckpointKind::Safetensors, foreign::read(path)?, None, config))
    }

    fn new(
        path: &Path,
        kind: CheckpointKind,
        (manifest, files): (Manifest, Vec<ShardFile>),
        fingerprint: Option<Fingerprint>,
        config: &Config,
    ) -> Self {
        let by_name = NameIndex::new(manifest.tensors.iter().map(|tensor| tensor.name.as_str()));
        let manifest = Arc::new(manifest);
        let values = Arc::new(Values::new(path, &manifest));
        let (path, config) = (path.into(), config.clone());
        Self { path, kind, manifest, by_name, files, values, config, fingerprint }
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
    pub(in crate::store) fn number(&self, name: &str) -> Option<usize> {
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

    /// The configuration that it was opened with.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }
}

impl FileOwner for Checkpoint {
    /// Accepts another program's directory, which has no fingerprint.
    fn check_same(&self, all_open: bool) -> Result<()> {
        self.fingerprint.map_or(Ok(()), |fingerprint| fingerprint.check(&self.path, all_open))
    }
}

/// Finds all shards of a manifest and checks their length.
fn find_shards(dir: &Path, stripe: &[PathBuf], manifest: &Manifest) -> Result<Vec<ShardFile>> {
    let stripes = Stripes::to_read(dir, stripe);
    let (mut found, mut missing) = (Vec::with_capacity(manifest.files.len()), Vec::new());
    for file in &manifest.files {
        match find_shard(&stripes, file)? {
            Some(shard) => found.push(shard),
            None => missing.push(file.name.as_str()),
        }
    }
    if missing.is_empty() { Ok(found) } else { Err(missing_shards(&stripes, manifest, &missing)) }
}

fn missing_shards(stripes: &Stripes, manifest: &Manifest, missing: &[&str]) -> Error {
    let mut ranks: Vec<u32> = missing.iter().filter_map(|name| names::shard_rank(name)).collect();
    ranks.dedup();
    let of = match manifest.world_size {
        1 => String::new(),
        n => format!(" (of {}, {n} ranks in all)", numbered("rank", &ranks)),
    };
    let reason = format!(
        "{} of {} files that its manifest lists are missing{of}: {}; {}",
        missing.len(),
        manifest.files.len(),
        missing[..missing.len().min(20)].join(", "),
        how_to_find(stripes, manifest)
    );
    Error::MissingFiles { path: stripes.own().into(), reason }
}

/// What to do about missing shards.
fn how_to_find(stripes: &Stripes, manifest: &Manifest) -> String {
    const RESTORE: &str = "restore them, or go back to an earlier checkpoint: `latest(dir, verify=True)` \
                           finds the newest that is intact";
    if manifest.stripes.is_empty() {
        return RESTORE.into();
    }
    let noted: Vec<String> = manifest.stripes.iter().map(|dir| format!("{dir:?}")).collect();
    let here = match (stripes.stripe_dirs().next(), stripes.left_out()) {
        (None, []) => "which is not configured here".to_owned(),
        (_, []) => "and they are not where it is configured here".to_owned(),
        (_, why) => format!("and here {}", why.join("; ")),
    };
    format!(
        "it was striped over {}, {here}: set `stripe` (Config.stripe, RINGSTOW_STRIPE or ringstow.toml) \
         to where these directories are now, or {RESTORE}",
        some_of(&noted)
    )
}

/// Finds a committed shard: under its own name or, if the save has not renamed it yet or was killed before, under the
/// uncommitted name.
fn find_shard(stripes: &Stripes, file: &FileEntry) -> Result<Option<ShardFile>> {
    for dir in stripes.dirs() {
        if let Some(found) = find_shard_in(dir, file)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn find_shard_in(dir: &Path, file: &FileEntry) -> Result<Option<ShardFile>> {
    let (own, part) = (dir.join(&file.name), dir.join(names::uncommitted(&file.name)));
    // Try its own name twice: a save may rename it between the first two tries.
    for (path, other_path) in [(&own, &part), (&part, &own), (&own, &part)] {
        match dir::look_at(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(Error::io("opening", path, e)),
            Ok(found) => {
                check_shard(path, &found, file.bytes)?;
                let (path, other_path) = (path.clone(), other_path.clone());
                let (bytes, crc32) = (file.bytes, file.crc32.clone());
                return Ok(Some(ShardFile { path, other_path, bytes, crc32 }));
            }
        }
    }
    Ok(None)
}

/// Checks that a shard is a regular file of its full length.
fn check_shard(path: &Path, found: &Metadata, bytes: u64) -> Result<()> {
    if !found.is_file() {
        let reason = "is not a regular file: ringstow refuses shards that are links or devices";
        return Err(Error::format(path, reason));
    }
    if found.len() == bytes {
        return Ok(());
    }
    // A network file system may show the length that this host saw during the save, until the file is opened.
    let opened = file::open_read(path, false).and_then(|file| file::look(&file));
    let len = opened.map_err(|e| Error::io("opening", path, e))?.len();
    if len == bytes {
        return Ok(());
    }
    Err(Error::Corrupt {
        path: path.into(),
        offset: len.min(bytes),
        what: "length in bytes".into(),
        expected: bytes.to_string(),
        got: len.to_string(),
    })
}
