//! Promotions that nobody will go on with, since their checkpoint is gone. What they have begun to send stays in a store, unseen
//! and billed, until somebody aborts it.

use super::copy::{Copy, clear};
use super::journal::{Left, Stale, read_left, remove_journal};
use super::patience::Patience;
use super::target::{Target, Upload};
use super::target_at;
use crate::error::{Error, Result};
use crate::format::{Manifest, names};
use crate::object::is_url;
use crate::pipeline::job::Job;
use crate::store::read::checkpoint::Checkpoint;
use crate::sys::dir;
use crate::sys::holder::Holders;
use crate::sys::lock::DirLock;
use crate::sys::open_dir::Dir;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What became of a promotion that was begun.
pub(in crate::store) enum Ending {
    /// What it has sent is freed, and its journal is removed.
    Freed,
    /// It may go on: why it is left alone.
    Left(String),
}

/// The directories of the journals of promotions from a directory of checkpoints.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn journals(run: &Path) -> Result<Vec<PathBuf>> {
    let all = run.join(names::JOURNALS);
    if dir::is_dir(&all) { dir::directories(&all) } else { Ok(Vec::new()) }
}

/// A copy that was begun and has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The checkpoint's directory.
    pub checkpoint: PathBuf,
    /// Where to: a URL or a directory.
    pub to: String,
    /// Bytes of the checkpoint's files that are there, as far as the journal says.
    pub sent_bytes: u64,
    /// The process that copies, if one of this host does.
    pub process: Option<u32>,
}

/// The copies of a directory's checkpoints that were begun here and have not ended. One may be in progress. Takes no lock.
///
/// # Errors
/// [`Error::Io`].
pub fn unfinished(run: &Path) -> Result<Vec<Unfinished>> {
    let (mut all, holders) = (Vec::new(), Holders::now());
    for journal in journals(run)? {
        let left = read_left(&journal.join(names::JOURNAL))?;
        let checkpoint = checkpoint_of(&journal);
        let process = holders.of(&journal);
        all.extend(left.map(|Left { url: to, sent_bytes, .. }| Unfinished {
            checkpoint,
            to,
            sent_bytes,
            process,
        }));
    }
    Ok(all)
}

/// Removes the directory of the journals if it is empty: a promotion was killed before it had one, or after.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn remove_empty(run: &Path) -> Result<()> {
    let all = run.join(names::JOURNALS);
    if dir::is_dir(&all) { dir::remove_if_empty(&all).map(drop) } else { Ok(()) }
}

/// Ends the promotion of a journal, if its checkpoint is gone. Without `removes`, changes nothing.
///
/// # Errors
/// What the store or the system says.
pub(in crate::store) fn end_abandoned(journal: &Path, removes: bool) -> Result<Ending> {
    let lock = match Dir::open_real(journal).and_then(|dir| DirLock::take_to_look(&dir)) {
        Err(Error::Busy { .. }) => return Ok(Ending::Left("a checkpoint is being copied".into())),
        lock => lock?,
    };
    let path = journal.join(names::JOURNAL);
    let begun = read_left(&path)?;
    if let Some(begun) = &begun {
        let checkpoint = checkpoint_of(journal);
        if is_there(&checkpoint, begun.id) {
            let (checkpoint, to) = (checkpoint.display(), &begun.url);
            return Ok(Ending::Left(format!(
                "the copy of {checkpoint} to {to} was begun and has not ended: `ringstow promote {checkpoint} --to {to}` \
                 goes on with it"
            )));
        }
    }
    if removes {
        begun.as_ref().map_or(Ok(()), abort)?;
        remove_journal(&path)?;
        lock.remove_dir()?;
        journal.parent().map_or(Ok(false), dir::remove_if_empty)?;
    }
    Ok(Ending::Freed)
}

/// Frees what a promotion has begun to send. An upload that cannot be freed keeps no other.
fn abort(begun: &Left) -> Result<()> {
    let to = Path::new(&begun.url);
    let job = Arc::<Job>::default();
    let target = target_at(to, Patience::new(to, Duration::ZERO, &job), &job)?;
    if !is_url(to) && to.parent().is_some_and(dir::is_gone) {
        let error = Error::io("looking for", to, std::io::ErrorKind::NotFound.into());
        return Err(error.hinted("is its disk not mounted?"));
    }
    let mut failure = None;
    for (name, id) in &begun.uploads {
        let upload = Upload { name: name.clone(), id: id.clone() };
        if let Err(error) = target.abort(&upload) {
            failure.get_or_insert(Error::io("aborting an upload to", to.join(name), error));
        }
    }
    failure.map_or(Ok(()), Err)?;
    clear_earlier(&*target, begun)
}

/// Removes what checkpoints that had the place before have left there, except what the manifest there lists.
fn clear_earlier(target: &dyn Target, begun: &Left) -> Result<()> {
    if begun.stale == Stale::default() {
        return Ok(());
    }
    let path = target.place().join(names::MANIFEST);
    let kept = match target.manifest()? {
        Some(seen) => Manifest::decode_files(seen.manifest, &path)?.files,
        None => Vec::new(),
    };
    let kept: Vec<String> = kept.into_iter().map(|file| file.name).collect();
    let cleared = clear(target, &begun.stale, &kept);
    cleared.map_err(|error| Error::io("removing replaced shards from", target.place(), error))
}

/// The checkpoint's directory, from that of its journal.
fn checkpoint_of(journal: &Path) -> PathBuf {
    let name = journal.file_name().unwrap_or_default().to_string_lossy();
    let run = journal.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    run.join(name.rsplit_once('-').map_or(&*name, |(name, _)| name))
}

/// Whether the directory still holds the checkpoint with this id. Also true if its manifest cannot be read.
fn is_there(checkpoint: &Path, id: u64) -> bool {
    match Checkpoint::open(checkpoint).and_then(|checkpoint| Copy::of(&checkpoint)) {
        Ok(copy) => copy.id == id,
        Err(Error::NoCheckpoint { .. } | Error::NotCommitted { .. }) => false,
        Err(error) => dir::has(checkpoint) && !error.is_not_found(),
    }
}
