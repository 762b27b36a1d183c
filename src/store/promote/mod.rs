//! Copies a checkpoint to an object store or another directory: its shards first, its manifest last. Nobody sees half of it
//! there, and a promotion that was killed goes on where it was.
//!
//! The names of the copied shards tell which checkpoint they are of. So two promotions to one place cannot mix their
//! shards, and what is there already need not be sent again. One request creates the manifest, or replaces an older one if
//! that is wanted: of two different checkpoints one gets the place.

mod abandoned;
#[cfg(feature = "object-store")]
mod bucket;
mod directory;
mod journal;
mod owner;
mod parts;
mod target;

use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, names};
use crate::object::{Bucket, is_url};
use crate::pipeline::blocks::Blocks;
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::plan::load::BlockRead;
use crate::store::layout::node::OwnRanks;
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use crate::sys::dir;
pub(in crate::store) use abandoned::{Ending, end_abandoned, journals, remove_empty};
use directory::Directory;
use journal::Journal;
use nix::errno::Errno;
pub(in crate::store) use owner::two_runs;
pub use owner::{check_apart, claim, name_run, owner, take_over};
use parts::{Sending, parts_of};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use target::Target;

/// How to promote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// Bytes a second at most; 0 for no limit.
    pub rate: u64,
    /// Parts that are sent at the same time. Each takes [`Promotion::part_bytes`] of memory.
    pub uploads: usize,
    /// Bytes of a part. Stores take 5 MiB at least, and 10,000 parts of one object: those of a larger file are larger.
    pub part_bytes: u64,
    /// Whether a checkpoint there that was committed earlier than this one is replaced, by one request, and its shards are
    /// removed after that. Otherwise any other checkpoint there is an error.
    pub replace_older: bool,
    /// Whether this node also sends files of other nodes, as far as it has copies, of a checkpoint of several nodes that
    /// share no directory. Each node sends those of its own ranks anyway.
    pub replicas: bool,
}

impl Default for Promotion {
    fn default() -> Self {
        Self { rate: 0, uploads: 4, part_bytes: 16 << 20, replace_older: false, replicas: true }
    }
}

impl Promotion {
    fn check(&self) -> Result<()> {
        let why = match (self.uploads, self.part_bytes) {
            (0, _) | (65.., _) => "uploads must be from 1 to 64",
            (_, bytes) if !(parts::PART_MIN..=parts::PART_MAX).contains(&bytes) => {
                "part_bytes must be from 5 MiB to 256 MiB"
            }
            _ => return Ok(()),
        };
        Err(Error::invalid(why))
    }
}

/// What a promotion did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromotionReport {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// The URL or the directory where it is now.
    pub to: String,
    /// Its files.
    pub files: usize,
    /// Their bytes.
    pub file_bytes: u64,
    /// Bytes that this promotion sent. The others were there: an earlier one had sent them.
    pub sent_bytes: u64,
    /// Whether the whole checkpoint was there already.
    pub was_there: bool,
    /// Files that other nodes, which share no directory with this one, have still to send. The last one commits; 0 if it is
    /// committed.
    pub missing: usize,
    /// How the files were read.
    #[serde(flatten)]
    pub moved: Moved,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// Copies the checkpoint in the directory `from` to the URL or the directory `to`.
///
/// # Errors
/// As for [`Checkpoint::open`]; [`Error::Corrupt`] if a file is damaged, of which nothing is committed; [`Error::Io`] of
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if another checkpoint is there; [`Error::Busy`] if another promotion
/// of it to there is in progress on this host, or a save there.
pub fn promote(
    runtime: &Runtime,
    from: &Path,
    to: &Path,
    how: Promotion,
    job: &Arc<Job>,
) -> Result<PromotionReport> {
    how.check()?;
    let started = Instant::now();
    let from = crate::sys::path::absolute(from)?;
    let to = crate::sys::path::absolute_or_object(to)?;
    refuse_within(&from, &to)?;
    owner::check_copy(&from, &to)?;
    let target = &*target_at(&to, job)?;
    let checkpoint = Checkpoint::open_with(&from, runtime.config())?;
    let copy = Copy::of(&checkpoint)?;
    let file_bytes = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
    job.set_total(file_bytes);
    let files = &checkpoint.manifest().files;
    // A manifest whose shards are not all there is mended.
    let was_there = matches!(copy.place(target, how)?, Place::Has)
        && copy.missing(target, files)?.is_empty()
        && !Journal::is_left(&from, target);
    let (sent_bytes, moved, missing) = match was_there {
        true => (0, Moved::default(), 0),
        false => copy.send(&checkpoint, target, how, (runtime, job))?,
    };
    Ok(PromotionReport {
        path: from,
        to: to.to_string_lossy().into_owned(),
        files: copy.names.len(),
        file_bytes,
        sent_bytes,
        was_there,
        missing,
        moved,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// The place of a URL or a path from the root. Requests to it end once the job is stopped.
///
/// # Errors
/// As for [`Bucket::at`].
fn target_at(to: &Path, job: &Arc<Job>) -> Result<Box<dyn Target>> {
    match is_url(to) {
        true => store_at(to, job),
        false => Ok(Box::new(Directory::at(to, job))),
    }
}

#[cfg(feature = "object-store")]
fn store_at(url: &Path, job: &Arc<Job>) -> Result<Box<dyn Target>> {
    Ok(Box::new(Bucket::at(url)?.until(job.stop_flag())))
}

#[cfg(not(feature = "object-store"))]
fn store_at(url: &Path, _: &Arc<Job>) -> Result<Box<dyn Target>> {
    Err(Bucket::at(url).expect_err("this build reaches no object store"))
}

/// Refuses to copy a checkpoint into itself, or to the directory that it is in.
fn refuse_within(from: &Path, to: &Path) -> Result<()> {
    if !dir::are_nested(from, to) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} cannot be copied to {}: one is in the other, or they are the same; name a directory elsewhere",
        from.display(),
        to.display()
    )))
}

/// How often a promotion begins again by itself.
const ATTEMPTS: usize = 3;

/// Blocks in memory at most, however large the parts of a file must be.
const BUFFERS_MAX: usize = 1 << 13;

/// A checkpoint as it is to be there.
struct Copy {
    /// What tells it from other checkpoints.
    id: u64,
    /// The names of its files there, in the order of the manifest's.
    names: Vec<String>,
    manifest: Vec<u8>,
    created_unix_ms: u64,
}

/// What is there.
enum Place {
    Free,
    /// This checkpoint.
    Has,
    /// An older one, which is to be replaced: its shards.
    Older(Vec<String>),
}

impl Copy {
    fn of(checkpoint: &Checkpoint) -> Result<Self> {
        if checkpoint.kind() != CheckpointKind::Ringstow {
            return Err(Error::invalid("only ringstow's checkpoints are promoted"));
        }
        // Without the names of this copy: a copy of a copy is the same checkpoint.
        let id = id_of(&manifest_of(checkpoint.manifest(), 0).encode()?);
        let there = manifest_of(checkpoint.manifest(), id);
        let names = there.files.iter().map(|file| file.name.clone()).collect();
        let created_unix_ms = there.created_unix_ms;
        Ok(Self { id, names, manifest: there.encode()?, created_unix_ms })
    }

    /// What is there.
    ///
    /// # Errors
    /// Another checkpoint that is not to be replaced.
    fn place(&self, target: &dyn Target, how: Promotion) -> Result<Place> {
        let bytes = match target.manifest()? {
            None => return Ok(Place::Free),
            Some(bytes) if bytes == self.manifest => return Ok(Place::Has),
            Some(bytes) => bytes,
        };
        if how.replace_older {
            let other = match Manifest::decode_files(bytes, &target.place().join(names::MANIFEST)) {
                Err(error) if error.is_damage() => return Ok(Place::Older(Vec::new())),
                other => other?,
            };
            if !other.stripes.is_empty() {
                return Err(Error::invalid(format!(
                    "{} has a checkpoint that is striped over other disks: remove it first",
                    target.place().display()
                )));
            }
            if other.created_unix_ms < self.created_unix_ms {
                return Ok(Place::Older(other.files.into_iter().map(|file| file.name).collect()));
            }
        }
        let error = Error::io("promoting to", target.place(), Errno::EEXIST.into());
        Err(error
            .hinted("another checkpoint is there: remove it first, or promote to another place"))
    }

    /// Sends what is not there, then the manifest. Returns the bytes sent, how they were read, and how many
    /// files other nodes have still to send: without them it commits nothing.
    fn send(
        &self,
        checkpoint: &Checkpoint,
        target: &dyn Target,
        how: Promotion,
        (runtime, job): (&Runtime, &Arc<Job>),
    ) -> Result<(u64, Moved, usize)> {
        let mut sent = (0, Moved::default());
        let _held = target.hold()?;
        let own = OwnRanks::of(checkpoint.path(), checkpoint.manifest());
        let is_sent =
            |&file: &usize| how.replicas || own.wrote(&checkpoint.manifest().files[file].name);
        let here: Vec<usize> = checkpoint.files_here().filter(is_sent).collect();
        for attempt in 1.. {
            let journal = match Journal::open(checkpoint.path(), target, self.id) {
                Err(Error::Busy { .. }) => return Err(Error::Busy { path: target.place().into() }),
                journal => journal?,
            };
            match self.send_missing((checkpoint, &here), target, how, &journal, (runtime, job)) {
                Ok((bytes, moved)) => sent = (sent.0 + bytes, moved),
                Err(error) if attempt == 1 && journal.is_worth_another() => {
                    tracing::info!(%error, "the store has dropped an upload; beginning another");
                    continue;
                }
                Err(error) => return Err(error),
            }
            let files = &checkpoint.manifest().files;
            let missing = self.missing(target, files)?;
            if !missing.is_empty() && !missing.iter().any(|file| here.binary_search(file).is_ok()) {
                journal.end(target);
                return Ok((sent.0, sent.1, missing.len()));
            }
            let is_committed = missing.is_empty() && self.commit(target, how)?;
            // Another host may have been removing an earlier copy of this checkpoint.
            if is_committed && self.missing(target, files)?.is_empty() {
                journal.end(target);
                break;
            }
            if attempt == ATTEMPTS {
                let error = Error::io("promoting to", target.place(), io::ErrorKind::Other.into());
                return Err(error.hinted(
                    "files vanish while they are sent: does another program remove them?",
                ));
            }
        }
        Ok((sent.0, sent.1, 0))
    }

    fn send_missing(
        &self,
        (checkpoint, here): (&Checkpoint, &[usize]),
        target: &dyn Target,
        how: Promotion,
        journal: &Journal,
        (runtime, job): (&Runtime, &Arc<Job>),
    ) -> Result<(u64, Moved)> {
        let files = &checkpoint.manifest().files;
        let mut missing = self.missing(target, files)?;
        missing.retain(|file| here.binary_search(file).is_ok());
        let all: u64 = files.iter().map(|file| file.bytes).sum();
        let there = all - missing.iter().map(|&file| files[file].bytes).sum::<u64>();
        job.add_written(there.saturating_sub(job.progress().written)); // less what an attempt before has noted
        if missing.is_empty() {
            return Ok(Default::default());
        }
        let checksum_bytes = checkpoint.manifest().block_bytes;
        let block_bytes = parts::block_bytes(checksum_bytes);
        let parts = parts_of(files, &missing, (how.part_bytes, checksum_bytes), how.uploads);
        // One block of each file: it says which files to open.
        let block = |&file: &usize| BlockRead { file, block: 0, offset: 0, len: 1 };
        let opened: Vec<BlockRead> = missing.iter().map(block).collect();
        let largest = parts.iter().map(|part| part.blocks(block_bytes)).max().unwrap_or(1);
        let how = Promotion { uploads: how.uploads.min(BUFFERS_MAX / largest).max(1), ..how };
        let memory = (largest * how.uploads, block_bytes);
        let blocks = Blocks::open(runtime, checkpoint.reads(&opened, true), memory, job)?;
        let sending = Sending::new((target, &self.names), &blocks, journal, how, job);
        Ok((sending.run(parts)?, blocks.moved.clone()))
    }

    /// The files that are not there.
    fn missing(&self, target: &dyn Target, files: &[FileEntry]) -> Result<Vec<usize>> {
        let wanted: Vec<_> =
            self.names.iter().zip(files).map(|(name, file)| (name.as_str(), file.bytes)).collect();
        let missing = target.missing(&wanted);
        missing.map_err(|error| Error::io("listing", target.place(), error))
    }

    /// Creates the manifest. Tells whether it is there then: the store may refuse a request beside another one.
    fn commit(&self, target: &dyn Target, how: Promotion) -> Result<bool> {
        let older = match self.place(target, how)? {
            Place::Has => return target.settle(&self.names).map(|()| true),
            Place::Free => None,
            Place::Older(shards) => Some(shards),
        };
        match target.commit(self.manifest.clone(), older.is_some()) {
            Ok(()) => target.settle(&self.names)?,
            // Perhaps this request's first attempt, whose answer was lost.
            Err(error) if error.is_taken() => {
                let place = self.place(target, Promotion { replace_older: false, ..how })?;
                return Ok(matches!(place, Place::Has));
            }
            Err(error) => return Err(error),
        }
        for name in older.iter().flatten().filter(|name| !self.names.contains(name)) {
            if let Err(error) = target.remove(name) {
                let path = target.place().join(name);
                tracing::warn!(path = %path.display(), %error, "a replaced shard cannot be removed");
            }
        }
        Ok(true)
    }
}

/// The manifest of a checkpoint's copy with this id.
fn manifest_of(manifest: &Manifest, id: u64) -> Manifest {
    let promoted =
        |file: &FileEntry| FileEntry { name: names::promoted(&file.name, id), ..file.clone() };
    let files = manifest.files.iter().map(promoted).collect();
    let there = Manifest { files, generation: id, ..manifest.clone() };
    Manifest { stripes: Vec::new(), nodes: Vec::new(), ..there }
}

/// A number of 52 bits: as a generation it stays exact in every reader of JSON, and far above those of saves.
fn id_of(manifest: &[u8]) -> u64 {
    let hash = twox_hash::XxHash3_128::oneshot(manifest) as u64;
    hash >> 13 | names::PROMOTED_MIN
}
