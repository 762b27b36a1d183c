//! Copies a checkpoint to an object store: its shards first, its manifest last. Nobody sees half of it there, and a promotion
//! that was killed goes on where it was.
//!
//! The names of shards in the store tell which checkpoint they are of. So two promotions to one URL cannot mix their
//! shards, and what is there already need not be sent again. One request creates the manifest, or replaces an older one if
//! that is wanted: of two different checkpoints one gets the URL.

mod journal;
mod parts;

use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, names};
use crate::object::Bucket;
use crate::pipeline::blocks::Blocks;
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::plan::load::BlockRead;
use crate::store::layout::node::OwnRanks;
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use crate::store::read::object::read_manifest;
use journal::Journal;
use nix::errno::Errno;
use parts::{Sending, parts_of};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How to promote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// Bytes a second at most; 0 for no limit.
    pub rate: u64,
    /// Parts that are sent at the same time. Each takes [`Promotion::part_bytes`] of memory.
    pub uploads: usize,
    /// Bytes of a part. Stores take 5 MiB at least, and 10,000 parts of one object: those of a larger file are larger.
    pub part_bytes: u64,
    /// Whether a checkpoint at the URL that was committed earlier than this one is replaced, by one request, and its shards
    /// are removed after that. Otherwise any other checkpoint there is an error.
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
    /// The URL where it is now.
    pub url: String,
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

/// Copies the checkpoint in the directory `from` to the URL `to`.
///
/// # Errors
/// As for [`Checkpoint::open`]; [`Error::Corrupt`] if a file is damaged, of which nothing is committed; [`Error::Io`] of
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if another checkpoint is at the URL; [`Error::Busy`] if another promotion
/// of it to there is in progress on this host.
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
    let bucket = Bucket::at(to)?.until(job.stop_flag());
    let checkpoint = Checkpoint::open_with(&from, runtime.config())?;
    let copy = Copy::of(&checkpoint)?;
    let file_bytes = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
    job.set_total(file_bytes);
    let files = &checkpoint.manifest().files;
    // A manifest whose shards are not all there is mended.
    let was_there = matches!(copy.place(&bucket, how)?, Place::Has)
        && copy.missing(&bucket, files)?.is_empty()
        && !Journal::is_left(&from, &bucket);
    let (sent_bytes, moved, missing) = match was_there {
        true => (0, Moved::default(), 0),
        false => copy.send(&checkpoint, &bucket, how, (runtime, job))?,
    };
    Ok(PromotionReport {
        path: from,
        url: to.to_string_lossy().into_owned(),
        files: copy.names.len(),
        file_bytes,
        sent_bytes,
        was_there,
        missing,
        moved,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// How often a promotion begins again by itself.
const ATTEMPTS: usize = 3;

/// Blocks in memory at most, however large the parts of a file must be.
const BUFFERS_MAX: usize = 1 << 13;

/// A checkpoint as it is to be in the store.
struct Copy {
    /// What tells it from other checkpoints.
    id: u64,
    /// The objects' names, in the order of the manifest's files.
    names: Vec<String>,
    manifest: Vec<u8>,
    created_unix_ms: u64,
}

/// What is at the URL.
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
        let manifest = checkpoint.manifest();
        let id = id_of(&manifest.encode()?);
        let names: Vec<String> =
            manifest.files.iter().map(|file| names::promoted(&file.name, id)).collect();
        let renamed =
            |(file, name): (&FileEntry, &String)| FileEntry { name: name.clone(), ..file.clone() };
        let files = manifest.files.iter().zip(&names).map(renamed).collect();
        let there = Manifest { files, generation: id, ..manifest.clone() };
        let there = Manifest { stripes: Vec::new(), nodes: Vec::new(), ..there };
        let created_unix_ms = there.created_unix_ms;
        Ok(Self { id, names, manifest: there.encode()?, created_unix_ms })
    }

    /// What is at the URL.
    ///
    /// # Errors
    /// Another checkpoint that is not to be replaced.
    fn place(&self, bucket: &Bucket, how: Promotion) -> Result<Place> {
        let bytes = match read_manifest(bucket)? {
            None => return Ok(Place::Free),
            Some(bytes) if bytes == self.manifest => return Ok(Place::Has),
            Some(bytes) => bytes,
        };
        if how.replace_older {
            let other = Manifest::decode_files(bytes, &bucket.url().join(names::MANIFEST))?;
            if other.created_unix_ms < self.created_unix_ms {
                return Ok(Place::Older(other.files.into_iter().map(|file| file.name).collect()));
            }
        }
        let error = Error::io("promoting to", bucket.url(), Errno::EEXIST.into());
        Err(error.hinted(
            "another checkpoint is at this URL: remove it first, or promote to another URL",
        ))
    }

    /// Sends what the store does not have, then the manifest. Returns the bytes sent, how they were read, and how many
    /// files other nodes have still to send: without them it commits nothing.
    fn send(
        &self,
        checkpoint: &Checkpoint,
        bucket: &Bucket,
        how: Promotion,
        (runtime, job): (&Runtime, &Arc<Job>),
    ) -> Result<(u64, Moved, usize)> {
        let mut sent = (0, Moved::default());
        let own = OwnRanks::of(checkpoint.path(), checkpoint.manifest());
        let is_sent =
            |&file: &usize| how.replicas || own.wrote(&checkpoint.manifest().files[file].name);
        let here: Vec<usize> = checkpoint.files_here().filter(is_sent).collect();
        for attempt in 1.. {
            let journal = Journal::open(checkpoint.path(), bucket, self.id)?;
            match self.send_missing((checkpoint, &here), bucket, how, &journal, (runtime, job)) {
                Ok((bytes, moved)) => sent = (sent.0 + bytes, moved),
                Err(error) if attempt == 1 && journal.is_worth_another() => {
                    tracing::info!(%error, "the store has dropped an upload; beginning another");
                    continue;
                }
                Err(error) => return Err(error),
            }
            let files = &checkpoint.manifest().files;
            let missing = self.missing(bucket, files)?;
            if !missing.is_empty() && !missing.iter().any(|file| here.binary_search(file).is_ok()) {
                journal.end(bucket);
                return Ok((sent.0, sent.1, missing.len()));
            }
            let is_committed = missing.is_empty() && self.commit(bucket, how)?;
            // Another host may have been removing an earlier copy of this checkpoint.
            if is_committed && self.missing(bucket, files)?.is_empty() {
                journal.end(bucket);
                break;
            }
            if attempt == ATTEMPTS {
                let error = Error::io("promoting to", bucket.url(), io::ErrorKind::Other.into());
                return Err(error.hinted(
                    "objects vanish while they are sent: does another program remove them?",
                ));
            }
        }
        Ok((sent.0, sent.1, 0))
    }

    fn send_missing(
        &self,
        (checkpoint, here): (&Checkpoint, &[usize]),
        bucket: &Bucket,
        how: Promotion,
        journal: &Journal,
        (runtime, job): (&Runtime, &Arc<Job>),
    ) -> Result<(u64, Moved)> {
        let files = &checkpoint.manifest().files;
        let mut missing = self.missing(bucket, files)?;
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
        let sending = Sending::new((bucket, &self.names), &blocks, journal, how, job);
        Ok((sending.run(parts)?, blocks.moved.clone()))
    }

    /// The files that the store does not have.
    fn missing(&self, bucket: &Bucket, files: &[FileEntry]) -> Result<Vec<usize>> {
        let listed = bucket.list().map_err(|error| Error::io("listing", bucket.url(), error))?;
        let is_missing =
            |&file: &usize| listed.objects.get(&self.names[file]) != Some(&files[file].bytes);
        Ok((0..files.len()).filter(is_missing).collect())
    }

    /// Creates the manifest. Tells whether it is there then: the store may refuse a request beside another one.
    fn commit(&self, bucket: &Bucket, how: Promotion) -> Result<bool> {
        let manifest = self.manifest.clone();
        let (put, older) = match self.place(bucket, how)? {
            Place::Has => return Ok(true),
            Place::Free => (bucket.create(names::MANIFEST, manifest), Vec::new()),
            Place::Older(shards) => (bucket.upload(names::MANIFEST, vec![manifest]), shards),
        };
        match put {
            Ok(()) => {}
            // Perhaps this request's first attempt, whose answer was lost.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let place = self.place(bucket, Promotion { replace_older: false, ..how })?;
                return Ok(matches!(place, Place::Has));
            }
            Err(error) => {
                return Err(Error::io("creating", bucket.url().join(names::MANIFEST), error));
            }
        }
        for name in older.iter().filter(|name| !self.names.contains(name)) {
            if let Err(error) = bucket.remove(name) {
                let url = bucket.url().join(name);
                tracing::warn!(url = %url.display(), %error, "a replaced shard cannot be removed");
            }
        }
        Ok(true)
    }
}

/// A number of 52 bits: as a generation it stays exact in every reader of JSON, and far above those of saves.
fn id_of(manifest: &[u8]) -> u64 {
    let hash = twox_hash::XxHash3_128::oneshot(manifest) as u64;
    hash >> 13 | 1 << 51
}
