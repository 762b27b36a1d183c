//! Copies a checkpoint to an object store or another directory: its shards first, its manifest last. Nobody sees half of it
//! there, and a promotion that was killed goes on where it was.
//!
//! The names of the copied shards tell which checkpoint they are of. So two promotions to one place cannot mix their
//! shards, and what is there already need not be sent again. One request creates the manifest, or replaces an older one if
//! that is wanted: of two different checkpoints one gets the place.

mod abandoned;
#[cfg(feature = "object-store")]
mod bucket;
mod copy;
mod directory;
mod journal;
mod owner;
mod parts;
mod patience;
mod room;
mod target;

use crate::error::{Error, Result};
use crate::format::manifest::Listed;
use crate::format::{FileEntry, Manifest, SaveId, names};
use crate::object::{Bucket, is_url};
use crate::pipeline::blocks::Blocks;
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::plan::load::BlockRead;
use crate::store::layout::node::OwnRanks;
use crate::store::read::checkpoint::{Checkpoint, OpenOptions};
use crate::sys::dir;
#[cfg(feature = "cli")]
pub use abandoned::Unfinished;
pub use abandoned::unfinished;
pub(in crate::store) use abandoned::{Ending, end_abandoned, journals, remove_empty};
use copy::{Commit, Copy, Place};
use directory::Directory;
use journal::Journal;
pub(in crate::store) use owner::{Owner, note_taking, noted, two_runs};
pub use owner::{check_apart, claim, claim_for, is_one_run, name_run, owner};
use parts::{AGAIN, Sending, parts_of};
use patience::{Patience, is_passing};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use target::Target;

/// How to promote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// Bytes a second at most; 0 for no limit.
    pub rate: u64,
    /// Parts that are sent at the same time, 64 at most. Each takes its bytes of memory: fewer are sent if they would take more
    /// than 1 GiB together.
    pub uploads: usize,
    /// Bytes of a part. Stores take 5 MiB at least, and 10,000 parts of one object: those of a larger file are larger.
    pub part_bytes: u64,
    /// Whether a checkpoint there that was committed earlier than this one is replaced, by one request, and its shards are
    /// removed after that. Otherwise any other checkpoint there is an error.
    pub replace_older: bool,
    /// Whether a symbolic link at the last name of the place is refused. For names that a program makes, such as those of the
    /// steps in a tier: what a link there leads to is not the run's.
    pub refuse_link: bool,
    /// Whether this node also sends files of other nodes, as far as it has copies, of a checkpoint of several nodes that
    /// share no directory. Each node sends those of its own ranks anyway.
    pub replicas: bool,
    /// How long a request goes on while a store does not answer, before the promotion fails. The next one goes on where it was.
    pub patience: Duration,
}

impl Default for Promotion {
    fn default() -> Self {
        let (rate, uploads, part_bytes) = (0, 4, 16 << 20);
        let patience = Duration::from_secs(180);
        let (replace_older, refuse_link, replicas) = (false, false, true);
        Self { rate, uploads, part_bytes, replace_older, refuse_link, replicas, patience }
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
    /// Its step, if it has one.
    pub step: Option<u64>,
    /// When it was committed, in milliseconds since 1970-01-01 UTC: a step that is saved again is another checkpoint.
    pub created_unix_ms: u64,
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
    let promoted = promote_once(runtime, from, to, how, job);
    promoted.map_err(|error| match &error {
        Error::Io { cause, hint, .. } if hint.is_empty() && is_passing(cause) => {
            error.hinted(AGAIN)
        }
        _ => error,
    })
}

fn promote_once(
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
    if how.refuse_link {
        refuse_link(&to)?;
    }
    let patience = Patience::new(&to, how.patience, job);
    patience.ask(|| owner::check_copy(&from, &to, job))?;
    let target = &*target_at(&to, patience, job)?;
    let checkpoint = OpenOptions::of(runtime.config()).open(&from)?;
    let copy = Copy::of(&checkpoint)?;
    let file_bytes = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
    job.set_total(file_bytes);
    let files = &checkpoint.manifest().files;
    // A manifest whose shards are not all there is mended.
    let was_there = match copy.place(target, how)? {
        Place::Taken(error) => return Err(error),
        Place::HasWhole(there) => match has_all(target, &there)? {
            true => true,
            false => return Err(copy::lacks_files(target)),
        },
        Place::Has => copy.missing(target, files)?.is_empty() && !Journal::is_left(&from, target),
        Place::Free | Place::Older(..) => false,
    };
    let (sent_bytes, moved, missing) = match was_there {
        true => (0, Moved::default(), 0),
        false => copy.send(&checkpoint, target, how, (runtime, job))?,
    };
    Ok(PromotionReport {
        path: from,
        to: to.to_string_lossy().into_owned(),
        step: checkpoint.manifest().step,
        created_unix_ms: checkpoint.manifest().created_unix_ms,
        files: copy.names.len(),
        file_bytes,
        sent_bytes,
        was_there,
        missing,
        moved,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Whether all of these files are there.
fn has_all(target: &dyn Target, files: &[FileEntry]) -> Result<bool> {
    let files: Vec<_> = files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    Ok(copy::missing(target, &files)?.is_empty())
}

/// Why a place does not have all that a checkpoint has, as its manifest and the lengths of its files tell; `None` if it does.
/// Takes the checkpoint and its manifest. Asks once: the caller repeats the look when it needs it again.
///
/// # Errors
/// What the store or the system says: nobody knows what is there.
pub(in crate::store) fn lacks(
    (checkpoint, here): (&Path, &Listed),
    place: &Path,
    job: &Arc<Job>,
) -> Result<Option<String>> {
    if !is_url(place) && dir::is_link(place) {
        return Ok(Some("is a link, which is no copy".into()));
    }
    if dir::is_same(checkpoint, place) {
        return Ok(Some("is the checkpoint itself, and no copy".into()));
    }
    let target = &*target_at(place, Patience::new(place, Duration::ZERO, job), job)?;
    let Some(seen) = target.manifest()? else { return Ok(Some("is not there".into())) };
    let there = match Manifest::decode_files(seen.manifest, &place.join(names::MANIFEST)) {
        Err(error) if error.is_damage() => return Ok(Some(format!("is damaged ({error})"))),
        there => there?,
    };
    if SaveId::of(&there) != SaveId::of(here) {
        return Ok(Some("is another save of this step".into()));
    }
    if there.dropped.iter().any(|name| !here.dropped.contains(name)) {
        return Ok(Some(format!(
            "lacks {}, which `slim` has dropped",
            there.dropped.join(" and ")
        )));
    }
    let is_whole = has_all(target, &there.files)?;
    Ok((!is_whole).then(|| "lacks files".into()))
}

/// The place of a URL or a path from the root. Requests to it end once the job is stopped.
///
/// # Errors
/// As for [`Bucket::at`].
fn target_at(to: &Path, patience: Patience, job: &Arc<Job>) -> Result<Box<dyn Target>> {
    match is_url(to) {
        true => store_at(to, patience, job),
        false => Ok(Box::new(Directory::at(to, job))),
    }
}

#[cfg(feature = "object-store")]
fn store_at(url: &Path, patience: Patience, job: &Arc<Job>) -> Result<Box<dyn Target>> {
    let bucket = Bucket::retried_by_caller(url)?.until(job.stop_flag());
    Ok(Box::new(bucket::PatientBucket { bucket, patience }))
}

#[cfg(not(feature = "object-store"))]
fn store_at(url: &Path, _: Patience, _: &Arc<Job>) -> Result<Box<dyn Target>> {
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

/// Refuses a link in the place of a step: a copy would replace, and a removal would remove, what is not the run's.
fn refuse_link(to: &Path) -> Result<()> {
    if is_url(to) || !dir::is_link(to) {
        return Ok(());
    }
    let leads = dir::try_real(to).map_or("nothing".into(), |to| to.display().to_string());
    Err(Error::invalid(format!(
        "{} is a symbolic link to {leads}, where a directory was expected: a copy would replace what is there; move the \
         link away",
        to.display()
    )))
}

/// How often a promotion begins again by itself.
const ATTEMPTS: usize = 3;

impl Copy {
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
            // What it had sent is gone: a newer checkpoint may have replaced it.
            if attempt > 1
                && let Place::Taken(error) = self.place(target, how)?
            {
                self.withdraw(target, journal);
                return Err(error);
            }
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
            let commit = match missing.is_empty() {
                true => self.commit(target, how, &journal)?,
                false => Commit::Refused,
            };
            match commit {
                Commit::Lost(error) => {
                    self.withdraw(target, journal);
                    return Err(error);
                }
                // Another host may have been removing an earlier copy, and a store may not compare what it removes.
                Commit::Done if self.is_there(target, files)? => {
                    if self.clear(target, &journal) {
                        journal.end(target);
                    }
                    break;
                }
                Commit::Done | Commit::Refused => {}
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
        let wanted = self.files_of(files, &missing);
        room::check(target, &wanted, journal)?;
        let checksum_bytes = checkpoint.manifest().block_bytes;
        let block_bytes = parts::block_bytes(checksum_bytes);
        let parts = parts_of(files, &missing, (how.part_bytes, checksum_bytes), how.uploads);
        // One block of each file: it says which files to open.
        let block = |&file: &usize| BlockRead { file, block: 0, offset: 0, len: 1 };
        let opened: Vec<BlockRead> = missing.iter().map(block).collect();
        let (uploads, buffers) = parts::at_once(&parts, how.uploads, block_bytes);
        let how = Promotion { uploads, ..how };
        let reads = checkpoint.reads(&opened, true);
        let blocks = Blocks::open(runtime, reads, (buffers, block_bytes), job)?;
        let sending = Sending::new((target, &self.names), &blocks, journal, how, job);
        match sending.run(parts) {
            Ok(sent) => Ok((sent, blocks.moved.clone())),
            Err(error) => Err(room::explained(error, target, &wanted, journal)),
        }
    }
}
