//! Clears up after killed saves and removals in a directory of checkpoints: where to look, and what to leave alone.
//! [`Leftovers`] clears up one checkpoint.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use crate::store::cleanup::remove::{check_parts, check_remains, lock_parts, remove_parts};
use crate::store::layout::stripes::{Stripes, stripe_owner};
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::write::leftovers::{Left, Leftovers, Swept};
use crate::sys::dir::{self, directories, file_names};
use crate::sys::lock::DirLock;
use std::path::{Path, PathBuf};

/// Removes what killed saves left in `dir`, in the directories directly under it, and in the rank checkpoints of
/// those; also such a directory, if it holds nothing else. Finishes killed removals. Leaves alone directories with
/// a save in progress, those that cannot be read, and those whose manifest is damaged, so that nobody can tell
/// which files are stale. Stripe directories are looked for in the configuration's `stripe`. The rest of a striped
/// checkpoint whose removal was killed stays unless `stripe` names all directories over which it was striped.
///
/// # Errors
/// [`Error::Io`] if `dir` cannot be listed or a file not be removed.
pub fn prune(dir: &Path, config: &Config) -> Result<Swept> {
    Pruning { stripe: &config.stripe, act: Act::CarryOut, asked: true }.all(dir)
}

/// What [`prune`] would do now. Changes nothing.
///
/// # Errors
/// [`Error::Io`] if `dir` cannot be listed.
pub fn prune_plan(dir: &Path, config: &Config) -> Result<Swept> {
    Pruning { stripe: &config.stripe, act: Act::Plan, asked: true }.all(dir)
}

impl Checkpoint {
    /// Removes what a killed save left beside this checkpoint; see [`prune`].
    ///
    /// # Errors
    /// As for [`prune`].
    pub fn prune(&self) -> Result<Swept> {
        Pruning { stripe: &self.config().stripe, act: Act::CarryOut, asked: true }.one(self.path())
    }
}

/// Removes what killed saves left in this directory, for a caller whose user did not ask for that. The directory goes
/// too if nothing else is in it.
///
/// # Errors
/// As for [`prune`].
pub(in crate::store) fn clear(dir: &Path, stripe: &[PathBuf], act: Act) -> Result<Swept> {
    let pruning = Pruning { stripe, act, asked: false };
    pruning.below(dir, Pruning::checkpoint)
}

/// Whether a clean-up is carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Act {
    CarryOut,
    Plan,
}

/// A clean-up of several directories.
#[derive(Clone, Copy)]
struct Pruning<'a> {
    stripe: &'a [PathBuf],
    act: Act,
    /// Whether the user asked for it. If not, a directory is left alone if its file system has no locks: a save may
    /// be in progress.
    asked: bool,
}

impl Pruning<'_> {
    fn all(self, dir: &Path) -> Result<Swept> {
        let mut all = self.checkpoint(dir)?;
        if all.removed.iter().any(|path| path == dir) {
            return Ok(all); // of rank checkpoints: no others are in it
        }
        for path in directories(dir)?.iter().filter(|path| names::rank_of_dir(path).is_none()) {
            all.add(self.below(path, Self::checkpoint)?);
        }
        Ok(all)
    }

    /// A directory, and the rank checkpoints in it.
    fn checkpoint(self, dir: &Path) -> Result<Swept> {
        let parts = rank_dirs::parts(dir)?;
        // Before any rank checkpoint by itself: that would remove the mark that says that all are to go.
        if rank_dirs::removal_was_interrupted(&parts) {
            return self.interrupted(dir, &parts);
        }
        let mut all = self.one(dir)?;
        for part in rank_dirs::dirs(dir)? {
            all.add(self.below(&part, Self::one)?);
        }
        Ok(all)
    }

    /// A directory in another; it goes too if `prune` empties it.
    fn below(self, dir: &Path, prune: impl Fn(Self, &Path) -> Result<Swept>) -> Result<Swept> {
        match prune(self, dir) {
            // Another process has removed it meanwhile.
            Err(error) if error.is_not_found() && !dir::leads_somewhere(dir) => {
                Ok(Swept::default())
            }
            // Not ours to look into (`lost+found`).
            Err(Error::Io { doing: "listing", cause, .. }) => {
                Ok(left(dir, format!("it cannot be listed: {cause}")))
            }
            Err(error) => Err(error),
            Ok(mut swept) => {
                if !swept.removed.is_empty() && self.remove_emptied(dir, &swept) {
                    swept.removed.push(dir.into());
                }
                Ok(swept)
            }
        }
    }

    /// A checkpoint of rank checkpoints whose removal was killed.
    fn interrupted(self, dir: &Path, parts: &[PathBuf]) -> Result<Swept> {
        let _locks = match lock_parts(parts) {
            Err(Error::Busy { .. }) => return Ok(left(dir, UNDER_WAY)),
            locks => locks?,
        };
        // Again, with the locks: a rank may have saved there in between.
        if !rank_dirs::removal_was_interrupted(parts) {
            return Ok(Swept::default());
        }
        match check_parts(dir, parts, self.stripe) {
            Err(error) if error.is_incomplete() => return Ok(left(dir, error.to_string())),
            _ => {}
        }
        if self.act == Act::CarryOut {
            remove_parts(dir, parts, self.stripe)?;
        }
        Ok(Swept { removed: vec![dir.into()], ..Swept::default() })
    }

    /// A directory by itself.
    fn one(self, dir: &Path) -> Result<Swept> {
        let stripes = Stripes::to_clear(dir, self.stripe);
        let ours =
            |name: &String| names::is_part(name) || names::is_shard(name) || name == names::RETIRED;
        if !file_names(dir)?.iter().any(ours) && stripes.stripe_dirs().next().is_none() {
            return Ok(Swept::default());
        }
        let checkpoint = match stripe_owner(dir) {
            Err(error) => return Ok(left(dir, error.to_string())),
            checkpoint => checkpoint?,
        };
        if let Some(checkpoint) = checkpoint {
            let reason = format!("it holds shards of {checkpoint}, which are cleared up with that");
            return Ok(left(dir, reason));
        }
        let lock = match DirLock::take(dir) {
            Err(Error::Busy { .. }) => return Ok(left(dir, UNDER_WAY)),
            lock => lock?,
        };
        if !self.asked && !lock.is_held() {
            return Ok(left(dir, NO_LOCKS));
        }
        if let Err(error) = check_remains(&stripes) {
            return Ok(left(dir, error.to_string()));
        }
        let leftovers = manifest::read_files(dir)
            .and_then(|listed| Leftovers::of_killed(&stripes, listed.as_ref()));
        let leftovers = match leftovers {
            Ok(leftovers) => leftovers,
            Err(error @ Error::Io { .. }) if !error.is_damage() => return Err(error),
            Err(error) => {
                return Ok(left(dir, format!("nobody can tell what is stale there: {error}")));
            }
        };
        match self.act {
            Act::CarryOut => leftovers.clear(),
            Act::Plan => Ok(leftovers.swept()),
        }
    }

    /// Removes a directory that a clean-up emptied; false if something else is in it.
    fn remove_emptied(self, dir: &Path, swept: &Swept) -> bool {
        match self.act {
            // With its lock: a save may have found the directory meanwhile.
            Act::CarryOut => DirLock::take(dir).is_ok_and(|_lock| dir::remove_if_empty(dir)),
            Act::Plan => dir::entries(dir).is_ok_and(|entries| {
                entries.iter().all(|entry| swept.removed.contains(&entry.path()))
            }),
        }
    }
}

const UNDER_WAY: &str = "a save into it is under way";
const NO_LOCKS: &str = "its file system has no locks, which would tell of a save into it that is under way; \
                        if there is none, `ringstow prune` clears it up";

fn left(dir: &Path, reason: impl Into<String>) -> Swept {
    let left = Left { path: dir.into(), reason: reason.into() };
    Swept { left: vec![left], ..Swept::default() }
}

impl Swept {
    fn add(&mut self, other: Self) {
        self.removed.extend(other.removed);
        self.renamed.extend(other.renamed);
        self.left.extend(other.left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_a_save_has_locked_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step");
        std::fs::create_dir(&dir).unwrap();
        let saver = DirLock::take(&dir).unwrap();
        let pruning = Pruning { stripe: &[], act: Act::CarryOut, asked: true };
        assert!(!pruning.remove_emptied(&dir, &Swept::default()));
        drop(saver);
        assert!(pruning.remove_emptied(&dir, &Swept::default()));
    }
}
