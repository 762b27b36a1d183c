//! Clears up after killed saves and removals in a directory of checkpoints. This file decides where to look, and what
//! to leave alone; [`Leftovers`] clears up one checkpoint.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use crate::store::cleanup::orphans::{self, Orphan};
use crate::store::cleanup::remove::{check_parts, check_remains, lock_parts, remove_parts};
use crate::store::layout::published::uncommitted_labels;
use crate::store::layout::recycled::everywhere;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::store::layout::stripes::Stripes;
use crate::store::layout::{manifest, node, rank_dirs};
use crate::store::promote::{Ending, end_abandoned, journals, remove_empty};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::write::leftovers::Leftovers;
use crate::store::write::scope::Scope;
use crate::store::write::stripe_dir::remove_stripe_dir;
use crate::store::write::swept::{Left, Swept};
use crate::stream::part::{self, Clearing};
use crate::sys::dir::{self, directories};
use crate::sys::file;
use crate::sys::file_system::Reach;
use crate::sys::lock::{self, DirLock};
use crate::sys::open_dir::Dir;
use crate::sys::removal_note;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How [`Store::prune_with`](crate::Store::prune_with) cleans up.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Pruning {
    /// No other process saves into these directories, on this host or another. Without this promise, directories stay as
    /// they are if a lock does not keep out all other processes: on most network file systems, and where the file
    /// system cannot lock.
    pub no_other_writers: bool,
    /// Only report what would be done. Changes nothing.
    pub dry_run: bool,
    /// Also remove recycled files, which the next saves would write over.
    pub recycled: bool,
}

/// See [`prune`](crate::prune()).
pub fn prune(dir: &Path, config: &Config) -> Result<Swept> {
    prune_with(dir, Pruning::default(), config)
}

/// See [`Store::prune_plan`](crate::Store::prune_plan).
pub fn prune_plan(dir: &Path, config: &Config) -> Result<Swept> {
    prune_with(dir, Pruning { dry_run: true, ..Pruning::default() }, config)
}

/// See [`Store::prune_with`](crate::Store::prune_with).
pub fn prune_with(dir: &Path, pruning: Pruning, config: &Config) -> Result<Swept> {
    let Pruning { no_other_writers, dry_run, recycled } = pruning;
    let act = if dry_run { Act::Plan } else { Act::CarryOut };
    let clean_up = CleanUp { stripe: &config.stripe, act, no_other_writers, takes_prepared: false };
    let mut swept = clean_up.all(dir)?;
    if recycled {
        clean_up.recycled(dir, config, &mut swept);
    }
    Ok(swept)
}

impl Checkpoint {
    /// Removes what a killed save left in this checkpoint's directory; see [`prune`](crate::prune()).
    ///
    /// # Errors
    /// As for [`prune`](crate::prune()).
    pub fn prune(&self) -> Result<Swept> {
        let (stripe, act) = (&*self.config().stripe, Act::CarryOut);
        let clean_up = CleanUp { stripe, act, no_other_writers: false, takes_prepared: false };
        clean_up.one(&Dir::open(self.path())?)
    }
}

/// Removes what killed saves left in this directory, before which a later step was committed, and the directory if it is then
/// empty.
pub(in crate::store) fn clear(dir: &Path, stripe: &[PathBuf], act: Act) -> Swept {
    let clean_up = CleanUp { stripe, act, no_other_writers: false, takes_prepared: true };
    clean_up.below((None, dir), CleanUp::checkpoint)
}

/// Whether to carry out a clean-up, or only to plan it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Act {
    CarryOut,
    Plan,
}

/// A clean-up of several directories.
#[derive(Clone, Copy)]
struct CleanUp<'a> {
    stripe: &'a [PathBuf],
    act: Act,
    no_other_writers: bool,
    /// Whether it removes what nodes that share no directory had prepared, and may have committed elsewhere.
    takes_prepared: bool,
}

impl CleanUp<'_> {
    /// Streams come last: a directory in which nothing else was stays, since ringstow did not create it.
    fn all(self, dir: &Path) -> Result<Swept> {
        let mut all = self.checkpoints(dir)?;
        let below = directories(dir).unwrap_or_default();
        let below = below.iter().map(|dir| (dir.as_path(), Dir::open_real(dir)));
        for (dir, open) in std::iter::once((dir, Dir::open(dir))).chain(below) {
            match open.map_err(as_listing).and_then(|dir| self.streams(&dir)) {
                Err(error) if is_denied(&error) => {} // not ringstow's (`lost+found`)
                streams => {
                    if let Some(streams) = all.or_left(dir, streams) {
                        all.add(streams);
                    }
                }
            }
        }
        for label in all.or_left(dir, uncommitted_labels(dir)).unwrap_or_default() {
            let removed = if self.act == Act::CarryOut { dir::remove(&label) } else { Ok(()) };
            if all.or_left(&label, removed).is_some() {
                all.removed.push(label);
            }
        }
        // After the checkpoints: nobody goes on with a copy of one that is removed.
        for journal in all.or_left(dir, journals(dir)).unwrap_or_default() {
            let ended = end_abandoned(&journal, self.act == Act::CarryOut);
            match all.or_left(&journal, ended) {
                Some(Ending::Freed) => all.removed.push(journal),
                Some(Ending::Left(reason)) => all.left.push(Left::alone(journal, reason)),
                None => {}
            }
        }
        if self.act == Act::CarryOut {
            all.or_left(dir, remove_empty(dir));
        }
        Ok(all)
    }

    /// Removes what killed writers of streams left in a directory.
    fn streams(self, dir: &Dir) -> Result<Swept> {
        let (removes, no_other_writers) = (self.act == Act::CarryOut, self.no_other_writers);
        let found = part::clear(dir, Clearing { of: None, removes, no_other_writers })?;
        let left = found.left.into_iter().map(|(path, reason)| Left::alone(path, reason));
        Ok(Swept { removed: found.stale, left: left.collect(), ..Swept::default() })
    }

    fn checkpoints(self, dir: &Path) -> Result<Swept> {
        let mut all = match Dir::open(dir).and_then(|dir| self.checkpoint(&dir)) {
            // If it cannot be listed, nothing below it can be cleared up.
            Err(error) => directories(dir).map(|_| Left::failed(dir, &error).into())?,
            Ok(swept) => swept,
        };
        if all.removed.iter().any(|path| path == dir) {
            return Ok(all); // `dir` held rank checkpoints, and no other checkpoints
        }
        let below = all.or_left(dir, directories(dir)).unwrap_or_default();
        for path in below.iter().filter(|path| names::rank_of_dir(path).is_none()) {
            all.add(self.below((None, path), Self::checkpoint));
        }
        let Some(root) = all.or_left(dir, dir::real(dir)) else { return Ok(all) };
        for stripe in self.stripe.iter().filter(|stripe| dir::is_dir(stripe)) {
            let orphans = self.orphans(stripe, &root);
            let orphans = all.or_left(stripe, orphans).unwrap_or_default();
            all.add(orphans);
        }
        Ok(all)
    }

    /// Removes the recycled files of the checkpoints in `dir`.
    fn recycled(self, dir: &Path, config: &Config, swept: &mut Swept) {
        let Some(all) = swept.or_left(dir, everywhere(dir, config)) else { return };
        for files in all {
            let done = match self.act {
                Act::CarryOut => files.clear_but(std::iter::empty(), &mut swept.removed),
                Act::Plan => {
                    files.all_but(std::iter::empty()).map(|found| swept.removed.extend(found))
                }
            };
            swept.or_left(files.dir(), done);
        }
    }

    /// The stripe directories on one disk that no checkpoint in `root` leads to.
    fn orphans(self, stripe: &Path, root: &Path) -> Result<Swept> {
        let mut all = Swept::default();
        for dir in directories(stripe)? {
            let outcome = match self.orphan(&dir, root) {
                // Not ringstow's: another user's, or `lost+found`.
                Err(error) if is_denied(&error) => continue,
                outcome => outcome,
            };
            if let Some(swept) = all.or_left(&dir, outcome) {
                all.add(swept);
            }
        }
        Ok(all)
    }

    fn orphan(self, dir: &Path, root: &Path) -> Result<Swept> {
        match orphans::find(dir, root)? {
            None => return Ok(Swept::default()),
            Some(Orphan::Shards(checkpoint)) => return Ok(unclaimed(dir, &checkpoint).into()),
            Some(Orphan::Unmarked) => return Ok(self.below((None, dir), Self::one)),
            Some(Orphan::Markers(_)) => {}
        }
        let open = Dir::open_real(dir)?;
        let lock = match self.lock(&open) {
            Err(Error::Busy { .. }) => return Ok(Left::alone(dir, IN_PROGRESS).into()),
            lock => lock?,
        };
        // Look again under the lock: a save may have begun meanwhile.
        let Some(Orphan::Markers(mut removed)) = orphans::find(dir, root)? else {
            return Ok(Swept::default());
        };
        if let Some(reason) = self.why_not(&lock) {
            return Ok(Left::alone(dir, reason).into());
        }
        if self.act == Act::CarryOut {
            // If something else is in it by now, the marker stays.
            return remove_stripe_dir(&open, Some(lock), true);
        }
        removed.push(dir.into());
        Ok(Swept { removed, ..Swept::default() })
    }

    /// A directory, and the rank checkpoints in it.
    fn checkpoint(self, open: &Arc<Dir>) -> Result<Swept> {
        let dir = open.path();
        let parts = rank_dirs::parts(dir)?;
        // Check before clearing one rank checkpoint, which removes the mark that all must be removed.
        if rank_dirs::removal_was_interrupted(&parts) {
            return self.interrupted(open, &parts);
        }
        let mut all = self.one(open)?;
        for part in all.or_left(dir, rank_dirs::dirs(dir)).unwrap_or_default() {
            all.add(self.below((Some(open), &part), Self::one));
        }
        Ok(all)
    }

    /// Clears a directory in another, which is open perhaps, with `prune`, and removes it if it is then empty. If it cannot,
    /// the report says why.
    fn below(
        self,
        (above, dir): (Option<&Arc<Dir>>, &Path),
        prune: impl Fn(Self, &Arc<Dir>) -> Result<Swept>,
    ) -> Swept {
        let opened = match above {
            Some(above) => above.open_in(dir),
            None => Dir::open_real(dir),
        };
        let done = opened
            .map_err(as_listing)
            .and_then(|open| prune(self, &open).map(|swept| (swept, open)));
        let (mut swept, open) = match done {
            Ok((swept, open)) => (swept, open),
            // Another process removed it.
            Err(error) if error.is_not_found() && !dir::leads_somewhere(dir) => {
                return Swept::default();
            }
            // Not ringstow's (`lost+found`).
            Err(error) if is_denied(&error) => return Left::alone(dir, error.to_string()).into(),
            Err(error) => return Left::failed(dir, &error).into(),
        };
        // After a failure it stays: it leads to what is left in its stripe directories.
        let is_done = !swept.left.iter().any(|left| left.failed);
        if is_done && (!swept.removed.is_empty() || removal_note::is_left_empty(dir)) {
            match self.remove_emptied(&open, &swept) {
                Ok(true) => swept.removed.push(dir.into()),
                Ok(false) => {}
                Err(error) => swept.left.push(Left::emptied(dir, &error)),
            }
        }
        swept
    }

    /// Finishes the killed removal of a checkpoint that consists of rank checkpoints.
    fn interrupted(self, open: &Arc<Dir>, parts: &[PathBuf]) -> Result<Swept> {
        let dir = open.path();
        let locks = match lock_parts(open, parts, |part| self.lock(part)) {
            Err(Error::Busy { .. }) => return Ok(Left::alone(dir, IN_PROGRESS).into()),
            locks => locks?,
        };
        if let Some(reason) = locks.iter().find_map(|lock| self.why_not(lock)) {
            return Ok(Left::alone(dir, reason).into());
        }
        // Check again under the locks: a rank may have saved there meanwhile.
        if !rank_dirs::removal_was_interrupted(parts) {
            return Ok(Swept::default());
        }
        match check_parts(dir, parts, self.stripe) {
            Err(error) if error.is_incomplete() => {
                return Ok(Left::alone(dir, error.to_string()).into());
            }
            Err(error @ Error::Io { .. }) => return Ok(Left::failed(dir, &error).into()),
            _ => {}
        }
        let mut swept = Swept::default();
        if self.act == Act::CarryOut {
            let locks = (locks, self.no_other_writers);
            let done = remove_parts(open, parts, locks, self.stripe, &mut swept);
            swept.or_left(dir, done);
            if dir::has(dir) {
                // Other programs' files are in it, or the system failed.
                swept.removed.extend(parts.iter().filter(|part| dir::is_gone(part)).cloned());
                return Ok(swept);
            }
        }
        Ok(Swept { removed: vec![dir.into()], ..swept })
    }

    /// Clears one directory.
    fn one(self, open: &Arc<Dir>) -> Result<Swept> {
        let dir = open.path();
        let stripes = match Stripes::to_clear(dir, self.stripe) {
            // Nobody knows whether a stripe directory is this checkpoint's: everything stays.
            Err(error) if dir::has(dir) => return Ok(Left::failed(dir, &error).into()),
            stripes => stripes?,
        };
        let is_saved = |name: &String| names::is_uncommitted(name) || names::is_shard(name);
        let ours = |name: &String| {
            is_saved(name) || [names::REMOVAL_MARK, names::STRIPE_MARKER].contains(&name.as_str())
        };
        let present = open.file_names()?;
        if !present.iter().any(ours) && stripes.stripe_dirs().next().is_none() {
            return Ok(Swept::default());
        }
        let checkpoint = match stripe_owner(dir) {
            Err(error) => return Ok(Left::failed(dir, &error).into()),
            checkpoint => checkpoint?,
        };
        if let Some(checkpoint) = checkpoint {
            let reason = match present.iter().any(is_saved) {
                true => format!(
                    "it holds shards of {checkpoint}, which are cleared up with that checkpoint"
                ),
                false => format!(
                    "it holds only the marker of {checkpoint}: if that is removed and no process saves it, remove \
                     the directory yourself"
                ),
            };
            return Ok(Left::alone(dir, reason).into());
        }
        let lock = match self.lock(open) {
            Err(Error::Busy { .. }) => return Ok(Left::alone(dir, IN_PROGRESS).into()),
            lock => lock?,
        };
        if !self.takes_prepared && node::is_prepared(dir) {
            return Ok(Left::alone(dir, PREPARED).into());
        }
        if let Err(error) = check_remains(&stripes) {
            return Ok(Left::alone(dir, error.to_string()).into());
        }
        let leftovers = manifest::read_files(dir).and_then(|listed| {
            Leftovers::of_killed(&stripes, open, listed.as_ref(), &Scope::Everything)
        });
        let leftovers = match leftovers {
            Ok(leftovers) => leftovers,
            Err(error @ Error::Io { .. }) if !tells_of_content(&error) => return Err(error),
            Err(error) => {
                let reason = format!("ringstow cannot tell which of its files are stale: {error}");
                return Ok(Left::alone(dir, reason).into());
            }
        };
        if let Some(reason) = self.why_not(&lock).filter(|_| leftovers.changes_anything()) {
            return Ok(Left::alone(dir, reason).into());
        }
        if self.act == Act::Plan {
            return Ok(leftovers.swept());
        }
        let mut swept = Swept::default();
        let done = leftovers.carry_out(&mut swept);
        swept.or_left(dir, done);
        Ok(swept)
    }

    fn lock(self, dir: &Arc<Dir>) -> Result<DirLock> {
        match self.act {
            Act::CarryOut => DirLock::take_open(dir),
            Act::Plan => DirLock::take_to_look(dir),
        }
    }

    /// Removes a directory that a clean-up emptied. Returns false if something else is in it.
    ///
    /// # Errors
    /// [`Error::Io`] if it is empty and the system refuses.
    fn remove_emptied(self, dir: &Arc<Dir>, swept: &Swept) -> Result<bool> {
        match self.act {
            Act::CarryOut => lock::remove_if_empty(dir),
            Act::Plan => Ok(dir::entries(dir.path()).is_ok_and(|entries| {
                let goes =
                    |path: PathBuf| swept.removed.contains(&path) || path.ends_with(lock::FILE);
                entries.iter().all(|entry| goes(entry.path()))
            })),
        }
    }

    /// Why another process may be writing what would be removed, in spite of this lock.
    fn why_not(self, lock: &DirLock) -> Option<String> {
        let may_be = lock.reach() == Reach::ThisHost && !self.no_other_writers;
        may_be.then(|| {
            format!(
                "a save from elsewhere may be writing to it, and no lock would show that ({}); if no other process \
                 or host saves there, run `ringstow prune --no-other-writers`",
                lock.why()
            )
        })
    }
}

/// Whether an error says what a manifest is: damaged, or a directory, FIFO or device of that name.
fn tells_of_content(error: &Error) -> bool {
    error.is_damage() || error.io_error().is_some_and(file::is_no_file)
}

/// A directory that this process may not open is one that it may not list.
fn as_listing(error: Error) -> Error {
    match error {
        Error::Io { path, cause, .. } => Error::io("listing", path, cause),
        error => error,
    }
}

/// Whether this process may not list a directory.
fn is_denied(error: &Error) -> bool {
    matches!(error, Error::Io { doing: "listing", cause, .. } if cause.kind() == ErrorKind::PermissionDenied)
}

/// Shards of a cancelled session, or of a checkpoint that somebody moved.
fn unclaimed(dir: &Path, checkpoint: &str) -> Left {
    let reason = format!(
        "its marker says that its files belong to {checkpoint}, which is gone: remove it yourself, unless that \
         checkpoint was moved or renamed"
    );
    Left::alone(dir, reason)
}

const PREPARED: &str = "this node had written all of it, and other nodes may have committed it: the next restore on all nodes commits it \
                        here if so; `retain` removes it once a later step is committed";

const IN_PROGRESS: &str = "a save into it is in progress";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::seam::{Outcome, on_thread};

    #[test]
    fn prune_keeps_directory_that_a_save_has_locked() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step");
        std::fs::create_dir(&dir).unwrap();
        let dir = Dir::open_real(&dir).unwrap();
        let saver = DirLock::take(dir.path()).unwrap();
        let clean_up = CleanUp {
            stripe: &[],
            act: Act::CarryOut,
            no_other_writers: false,
            takes_prepared: false,
        };
        assert!(!clean_up.remove_emptied(&dir, &Swept::default()).unwrap());
        drop(saver);
        assert!(clean_up.remove_emptied(&dir, &Swept::default()).unwrap());
    }

    #[test]
    fn directory_that_another_process_removes_meanwhile_is_no_failure() {
        for n in 1.. {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("step");
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join("rank00000-0.safetensors.part"), "").unwrap();
            let gone = dir.clone();
            let watch = on_thread(move |number, _, _| {
                if number == n {
                    std::fs::remove_dir_all(&gone).unwrap();
                }
                Outcome::Pass
            });
            let swept = clear(&dir, &[], Act::CarryOut);
            let calls = watch.take().len() as u64;
            drop(watch);
            assert!(swept.left.is_empty(), "call {n}: {swept:?}");
            if calls < n {
                break;
            }
        }
    }
}
