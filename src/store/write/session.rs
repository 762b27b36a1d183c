//! The coordinator's side of a save by several ranks.

use crate::config::Config;
use crate::error::{Error, Result, numbered};
use crate::format::receipt::{self, Merged, Write};
use crate::format::{FileEntry, Manifest, Metrics, Node, RankShare, Receipt, metrics, names};
use crate::pipeline::job::Job;
use crate::store::layout::session_note::{Note, is_of_session};
use crate::store::write::transaction::Transaction;
use crate::sys::chance::unique;
use crate::sys::{dir, file, late};
use serde::Serialize;
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A save by several ranks, on the coordinator. It begins before any rank writes and ends with the commit. Dropping it
/// without a commit removes what the ranks wrote; an earlier checkpoint stays.
///
/// The trainer sends the receipts to the coordinator: by MPI, `torch.distributed`, a file.
///
/// ```no_run
/// # fn all_ranks<T>(_: T) -> Vec<T> { Vec::new() }
/// # fn main() -> ringstow::Result<()> {
/// # let (rank, world_size, state) = (0, 2, ringstow::StateDict::new());
/// use ringstow::{Store, Value};
/// let store = Store::found()?;
/// let session = match rank {
///     0 => Some(store.begin("ckpt/step-7", world_size)?),
///     _ => None,
/// };
/// // A barrier belongs here.
/// let (receipt, _) = store.write_rank(&state, rank, "ckpt/step-7")?;
/// let receipts = all_ranks(receipt); // gathered to the coordinator
/// if let Some(session) = session {
///     session.commit(receipts, Value::Dict(Vec::new()).to_json()?)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Session {
    transaction: Transaction,
    /// The session that each receipt must name.
    id: String,
    world_size: u32,
    part_of: Option<RankShare>,
    step: Option<u64>,
    metrics: Metrics,
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Committed {
    /// Saves into this directory that came before; more on a file system that hosts share.
    pub generation: u64,
    /// Shards of all ranks.
    pub files: usize,
    /// Their bytes, headers included.
    pub file_bytes: u64,
    /// Tensors and objects.
    pub tensors: usize,
    /// Time from the receipts to the last sync.
    pub seconds: f64,
}

/// What a rank needs to know about its session.
#[derive(Debug)]
pub(in crate::store) struct UnderWay {
    /// The session's id.
    pub session: String,
    /// The generation in the shards' names.
    pub generation: u64,
}

/// The session that has begun in a directory.
///
/// # Errors
/// [`Error::Invalid`] if there is none; [`Error::Io`].
pub(in crate::store) fn under_way(dir: &Path) -> Result<UnderWay> {
    // Listing the directory makes a network file system look for the note again.
    let note = match dir::entries(dir) {
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error),
        Ok(_) => Note::read(dir)?,
    };
    match note {
        Some(Note { session: Some(session), generation: Some(generation), .. }) => {
            Ok(UnderWay { session, generation })
        }
        _ => Err(Error::invalid(format!(
            "no save by several ranks is in progress in {}: the coordinator begins its Session there before \
             any rank writes; do all ranks save to one path on one shared file system? (If each node has its own, say so: \
             nodes=Nodes() in Python)",
            dir.display()
        ))),
    }
}

/// [`under_way`], once this host sees the session, unless the job is stopped before.
///
/// # Errors
/// As for [`under_way`].
pub(in crate::store) fn await_under_way(dir: &Path, job: &Job) -> Result<UnderWay> {
    let is_seen = |found: &Result<_>| !matches!(found, Err(Error::Invalid { .. }));
    let mut found = under_way(dir);
    if !is_seen(&found) {
        let what = "the save that the coordinator has begun";
        late::awaited(
            dir,
            what,
            || !job.stopped(),
            || {
                found = under_way(dir);
                is_seen(&found)
            },
        );
    }
    found
}

/// Waits while `goes_on` until this host sees what all ranks have written: `sees` looks.
pub fn await_all_written(dir: &Path, goes_on: impl FnMut() -> bool, sees: impl FnMut() -> bool) {
    late::awaited(dir, "all that the ranks have written", goes_on, sees);
}

impl Session {
    /// Creates the directory if it is missing, locks it, cleans up after a killed save, and notes how many ranks will
    /// write. The ranks must write with the same `stripe`.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) if another save there is in progress;
    /// [`Error::Invalid`](crate::Error::Invalid) if it holds safetensors files that ringstow did not write, or if
    /// `world_size` is 0; [`Error::Unsupported`](crate::Error::Unsupported) if it holds a checkpoint of a newer version;
    /// [`Error::Io`](crate::Error::Io).
    pub fn begin(dir: impl AsRef<Path>, world_size: u32, config: &Config) -> Result<Self> {
        Self::begin_as(dir.as_ref(), (world_size, unique()), config, |_| {})
    }

    /// [`Session::begin`] in the directory of one of several nodes. `id` is the session's on all of them. No file has
    /// a name that another node may have given to another file: their directories' generations differ.
    pub(super) fn begin_apart(
        dir: &Path,
        world_size: u32,
        id: &str,
        config: &Config,
    ) -> Result<Self> {
        Self::begin_as(dir, (world_size, id.into()), config, Transaction::leap)
    }

    fn begin_as(
        dir: &Path,
        (world_size, id): (u32, String),
        config: &Config,
        set: impl FnOnce(&mut Transaction),
    ) -> Result<Self> {
        config.validate()?;
        config.refuse_tiers()?;
        if world_size == 0 {
            return Err(Error::invalid("a save by no ranks: world_size is 0"));
        }
        let mut transaction = Transaction::begin(dir, &config.stripe)?;
        transaction.recycle(config.recycle);
        set(&mut transaction);
        let path = dir.join(names::UNCOMMITTED_MANIFEST);
        let generation = transaction.generation();
        transaction.begin_ranks(&id);
        let note = Note { world_size, session: Some(id.clone()), generation: Some(generation) };
        file::write(&path, serde_json::json!(note).to_string().as_bytes())?;
        Ok(Self { transaction, id, world_size, part_of: None, step: None, metrics: Metrics::new() })
    }

    /// Makes this the rank checkpoint of one rank, in [`rank_dir`](crate::rank_dir) below the checkpoint's directory.
    /// The checkpoint is committed once those of all ranks are, and all belong to one save.
    pub fn rank_share(self, part_of: RankShare) -> Self {
        Self { part_of: Some(part_of), ..self }
    }

    /// Saves the checkpoint as a step of training. The [`StateDict::step`](crate::StateDict::step) of the ranks' states
    /// is ignored.
    pub fn step(self, step: u64) -> Self {
        Self { step: Some(step), ..self }
    }

    /// As [`StateDict::metrics`](crate::StateDict::metrics). Those of the ranks' states are ignored.
    ///
    /// # Errors
    /// As for [`StateDict::metrics`](crate::StateDict::metrics); then the session has ended.
    pub fn metrics<K: Into<String>>(
        self,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<Self> {
        let metrics = metrics::with(self.metrics.clone(), metrics)?;
        Ok(Self { metrics, ..self })
    }

    /// The checkpoint's directory.
    pub fn path(&self) -> &Path {
        self.transaction.dir()
    }

    /// Commits what all ranks wrote as one checkpoint, with `state` as its tree of values. On a network file system, waits up to
    /// 90 s until this host sees what they wrote.
    ///
    /// # Errors
    /// - [`Error::Invalid`] for receipts that are missing, from an earlier save, inconsistent, or do not cover a tensor;
    ///   for a part that the ranks set apart and that the state does not have.
    /// - [`Error::MissingShare`] for a file that the coordinator does not see.
    /// - [`Error::Io`].
    ///
    /// In each case nothing is committed, and what the ranks wrote is removed. [`Error::NotDurable`] if it is committed,
    /// and may not survive a crash.
    pub fn commit(self, receipts: Vec<Receipt>, state: Box<RawValue>) -> Result<Committed> {
        self.commit_names(receipts, state, &[])
    }

    /// [`Session::commit`], refusing to commit a checkpoint that lacks one of `names`.
    ///
    /// # Errors
    /// As for [`Session::commit`]; [`Error::Keys`] listing all names that no rank has written.
    pub fn commit_names(
        self,
        receipts: Vec<Receipt>,
        state: Box<RawValue>,
        names: &[String],
    ) -> Result<Committed> {
        let merged = receipt::merge(&receipts)?;
        await_all_written(self.path(), || true, || self.sees(&merged));
        self.commit_merged(merged, state, names)
    }

    /// [`Session::commit_names`] of receipts that have been merged, without waiting.
    ///
    /// # Errors
    /// As for [`Session::commit_names`].
    #[doc(hidden)]
    pub fn commit_merged(
        mut self,
        parts: Merged,
        state: Box<RawValue>,
        names: &[String],
    ) -> Result<Committed> {
        let (started, mut parts) = (Instant::now(), parts);
        let mut manifest = self.manifest(&mut parts, (state, names), Vec::new())?;
        let found = self.adopt_files(&parts.writes, &manifest.files)?;
        manifest.stripes = self.transaction.stripes().noted(found.iter().map(PathBuf::as_path));
        let committed = Committed {
            generation: manifest.generation,
            files: manifest.files.len(),
            file_bytes: manifest.files.iter().map(|file| file.bytes).sum(),
            tensors: manifest.tensors.len(),
            seconds: 0.0,
        };
        self.transaction.prepare(&manifest, &manifest.files)?;
        self.transaction.rename(&manifest)?;
        self.transaction.clear_replaced(&manifest.files);
        self.clear_marks();
        Ok(Committed { seconds: started.elapsed().as_secs_f64(), ..committed })
    }

    /// The manifest of what all ranks wrote on these nodes; on none if they share one directory. Takes files and tensors
    /// from `parts`.
    pub(super) fn manifest(
        &self,
        parts: &mut Merged,
        (state, names): (Box<RawValue>, &[String]),
        nodes: Vec<Node>,
    ) -> Result<Manifest> {
        self.check_ranks(&parts.writes)?;
        if let Some(stale) = parts.writes.iter().find(|write| write.session != self.id) {
            return Err(self.stale(stale.rank));
        }
        let mut manifest = Manifest::new(
            self.transaction.generation(),
            self.world_size,
            parts.block_bytes,
            std::mem::take(&mut parts.files),
            std::mem::take(&mut parts.tensors),
            state,
        );
        manifest.part_of.clone_from(&self.part_of);
        manifest.step = self.step;
        manifest.take_place(self.transaction.dir());
        manifest.metrics.clone_from(&self.metrics);
        manifest.nodes = nodes;
        manifest.check().map_err(|reason| {
            Error::invalid(format!("what the ranks wrote is not a checkpoint: {reason}"))
        })?;
        self.check_names(&manifest, names)?;
        manifest.check_apart(&parts.apart)?;
        Ok(manifest)
    }

    /// Finds the files of these writes, and renames them to the uncommitted paths, where readers look once the manifest is
    /// in place. Before, only the rank's own write used the files; from now on, only the holder of the lock does. Returns
    /// where they were.
    pub(super) fn adopt_files(
        &self,
        writes: &[Write],
        files: &[FileEntry],
    ) -> Result<Vec<PathBuf>> {
        let mut found = Vec::with_capacity(files.len());
        writes.iter().try_for_each(|write| self.check_mark(write))?;
        writes.iter().try_for_each(|write| self.find_files(write, files, &mut found))?;
        for (file, path) in files.iter().zip(&found) {
            dir::rename_new(path, &path.with_file_name(names::uncommitted(&file.name)))?;
        }
        Ok(found)
    }

    pub(super) fn transaction(&mut self) -> &mut Transaction {
        &mut self.transaction
    }

    /// Removes the marks of the ranks, once this has committed.
    pub(super) fn clear_marks(&self) {
        let path = self.transaction.dir();
        // The clean-up after a commit lists the directory, which on a network file system may be late.
        for mark in (0..self.world_size).map(|rank| path.join(names::done(rank))) {
            if is_of_session(&mark, &self.id)
                && let Err(error) = dir::remove(&mark)
            {
                tracing::warn!(%error, "left after a commit; the next save or `ringstow prune` removes it");
            }
        }
    }

    /// Whether this host sees all that the ranks say they have written for this session. On a network file system it may
    /// see that late, and a commit until then fails.
    #[doc(hidden)]
    pub fn sees(&self, parts: &Merged) -> bool {
        let mut own = parts.writes.iter().filter(|write| write.session == self.id);
        own.all(|write| {
            self.check_mark(write).is_ok()
                && self.find_files(write, &parts.files, &mut Vec::new()).is_ok()
        })
    }

    /// Checks that there are as many receipts as ranks. Merging the receipts finds duplicates.
    fn check_ranks(&self, writes: &[Write]) -> Result<()> {
        if writes.len() == self.world_size as usize {
            return Ok(());
        }
        let ranks: Vec<u32> = writes.iter().map(|write| write.rank).collect();
        Err(Error::invalid(format!(
            "{} ranks were to save into {}, but receipts came from {} ({})",
            self.world_size,
            self.path().display(),
            ranks.len(),
            numbered("rank", &ranks)
        )))
    }

    /// Checks that the checkpoint holds all of `names`.
    fn check_names(&self, manifest: &Manifest, names: &[String]) -> Result<()> {
        let there: HashSet<&str> = manifest.tensors.iter().map(|t| t.name.as_str()).collect();
        let missing: Vec<String> =
            names.iter().filter(|name| !there.contains(name.as_str())).cloned().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let path = self.path().into();
        Err(Error::Keys { path, missing, unexpected: Vec::new(), mismatched: Vec::new() })
    }

    /// Finds a rank's files, and appends their paths. The coordinator must see them: the ranks write to the same file
    /// systems.
    fn find_files(
        &self,
        write: &Write,
        files: &[FileEntry],
        paths: &mut Vec<PathBuf>,
    ) -> Result<()> {
        for file in &files[write.files.clone()] {
            let name = names::uncommitted_write(&file.name, &write.write);
            let part = self.transaction.stripes().find(&name)?;
            let part = part.unwrap_or_else(|| self.path().join(&name));
            let found = dir::look(&part).map(|found| found.len());
            let wrong = match found {
                Ok(len) if len == file.bytes => {
                    paths.push(part);
                    continue;
                }
                Ok(len) => format!("has {len} bytes there, not {}", file.bytes),
                Err(error) => error.to_string(),
            };
            return Err(Error::MissingShare {
                path: self.path().into(),
                reason: format!(
                    "rank {} has written {}, but the coordinator does not see it ({wrong}): do all \
                     ranks save to one path on one shared file system, with one Config.stripe?",
                    write.rank,
                    part.display()
                ),
            });
        }
        Ok(())
    }

    /// Checks that a receipt is from its rank's last write.
    fn check_mark(&self, Write { rank, mark, .. }: &Write) -> Result<()> {
        let there = file::read_start(&self.path().join(names::done(*rank)), mark.len() as u64 + 1);
        match there.is_ok_and(|there| there == mark.as_bytes()) {
            true => Ok(()),
            false => Err(self.stale(*rank)),
        }
    }

    fn stale(&self, rank: u32) -> Error {
        Error::invalid(format!(
            "the receipt of rank {rank} is not from its last write into {}: it is from an earlier save, or the \
             rank has begun to write again",
            self.path().display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::layout::stripes::Stripes;
    use crate::store::write::leftovers::Leftovers;
    use crate::store::write::scope::Scope;
    use crate::sys::seam::{Call, Outcome, on_thread};

    #[test]
    fn rank_that_outlives_its_session_in_a_stripe_directory_is_cleared_up() {
        let root = tempfile::tempdir().unwrap();
        let (dir, disk) = (root.path().join("run/step-1"), root.path().join("disk"));
        std::fs::create_dir(&disk).unwrap();
        let config = Config { stripe: vec![disk.clone()], ..Config::default() };
        let session = Session::begin(&dir, 1, &config).unwrap();
        let (stripe, marker) =
            (disk.join("step-1"), disk.join("step-1").join(names::STRIPE_MARKER));
        let late = stripe.join(names::uncommitted_write(&names::shard(0, 0, 0), &unique()));
        let watch = on_thread(move |_, call, path| {
            if call == Call::Remove && path == marker {
                std::fs::write(&late, "x").unwrap();
            }
            Outcome::Pass
        });
        drop(session);
        drop(watch);
        let stripes = Stripes::to_clear(&dir, &config.stripe).unwrap();
        let own = crate::sys::open_dir::Dir::open(&dir).unwrap();
        let left = Leftovers::of_killed(&stripes, &own, None, &Scope::Everything).unwrap();
        assert_eq!(left.clear().unwrap().removed.len(), 2, "the shard, and the directory");
        assert!(!stripe.exists());
        // Without the marker, the shard would keep every save away.
        drop(Session::begin(&dir, 1, &config).unwrap());
    }
}
