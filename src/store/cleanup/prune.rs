//! Clears up after killed saves and removals in a directory of checkpoints. This file decides where to look, and what
//! to leave alone; [`Leftovers`] clears up one checkpoint.

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

/// See [`prune`](crate::prune()).
pub fn prune(dir: &Path, config: &Config) -> Result<Swept> {
    Pruning { stripe: &config.stripe, act: Act::CarryOut, asked: true }.all(dir)
}

/// See [`Store::prune_plan`](crate::Store::prune_plan).
pub fn prune_plan(dir: &Path, config: &Config) -> Result<Swept> {
    Pruning { stripe: &config.stripe, act: Act::Plan, asked: true }.all(dir)
}

impl Checkpoint {
    /// Removes what a killed save left in this checkpoint's directory; see [`prune`](crate::prune()).
    ///
    /// # Errors
    /// As for [`prune`](crate::prune()).
    pub fn prune(&self) -> Result<Swept> {
        Pruning { stripe: &self.config().stripe, act: Act::CarryOut, asked: true }.one(self.path())
    }
}

/// Removes what killed saves left in this directory, and the directory if it is then empty. Only if the file system
/// has locks: the user did not ask for this, and a save may be in progress.
///
/// # Errors
/// As for [`prune`].
pub(in crate::store) fn clear(dir: &Path, stripe: &[PathBuf], act: Act) -> Result<Swept> {
    let pruning = Pruning { stripe, act, asked: false };
    pruning.below(dir, Pruning::checkpoint)
}

/// Whether to carry out a clean-up, or only to plan it.
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
    /// Whether the user asked for it. If not, directories on file systems without locks are left alone: a save may be
    /// in progress.
    asked: bool,
}

impl Pruning<'_> {
    fn all(self, dir: &Path) -> Result<Swept> {
        let mut all = self.checkpoint(dir)?;
        if all.removed.iter().any(|path| path == dir) {
            return Ok(all); // `dir` held rank checkpoints, and no other checkpoints
        }
        for path in directories(dir)?.iter().filter(|path| names::rank_of_dir(path).is_none()) {
            all.add(self.below(path, Self::checkpoint)?);
        }
        Ok(all)
    }

    /// A directory, and the rank checkpoints in it.
    fn checkpoint(self, dir: &Path) -> Result<Swept> {
        let parts = rank_dirs::parts(dir)?;
        // Check before clearing one rank checkpoint, which removes the mark that all must be removed.
        if rank_dirs::removal_was_interrupted(&parts) {
            return self.interrupted(dir, &parts);
        }
        let mut all = self.one(dir)?;
        for part in rank_dirs::dirs(dir)? {
            all.add(self.below(&part, Self::one)?);
        }
        Ok(all)
    }

    /// Clears a directory in another with `prune`, and removes it if it is then empty.
    fn below(self, dir: &Path, prune: impl Fn(Self, &Path) -> Result<Swept>) -> Result<Swept> {
        match prune(self, dir) {
            // Another process removed it.
            Err(error) if error.is_not_found() && !dir::leads_somewhere(dir) => {
                Ok(Swept::default())
            }
            // Not ringstow's (`lost+found`).
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

    /// Finishes the killed removal of a checkpoint that consists of rank checkpoints.
    fn interrupted(self, dir: &Path, parts: &[PathBuf]) -> Result<Swept> {
        let _locks = match lock_parts(parts) {
            Err(Error::Busy { .. }) => return Ok(left(dir, IN_PROGRESS)),
            locks => locks?,
        };
        // Check again under the locks: a rank may have saved there meanwhile.
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

    /// Clears one directory.
    fn one(self, dir: &Path) -> Result<Swept> {
        let stripes = Stripes::to_clear(dir, self.stripe);
        let ours = |name: &String| {
            names::is_uncommitted(name) || names::is_shard(name) || name == names::REMOVAL_MARK
        };
        if !file_names(dir)?.iter().any(ours) && stripes.stripe_dirs().next().is_none() {
            return Ok(Swept::default());
        }
        let checkpoint = match stripe_owner(dir) {
            Err(error) => return Ok(left(dir, error.to_string())),
            checkpoint => checkpoint?,
        };
        if let Some(checkpoint) = checkpoint {
            let reason = format!(
                "it holds shards of {checkpoint}, which are cleared up with that checkpoint"
            );
            return Ok(left(dir, reason));
        }
        let lock = match DirLock::take(dir) {
            Err(Error::Busy { .. }) => return Ok(left(dir, IN_PROGRESS)),
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
                return Ok(left(
                    dir,
                    format!("ringstow cannot tell which of its files are stale: {error}"),
                ));
            }
        };
        match self.act {
            Act::CarryOut => leftovers.clear(),
            Act::Plan => Ok(leftovers.swept()),
        }
    }

    /// Removes a directory that a clean-up emptied. Returns false if something else is in it.
    fn remove_emptied(self, dir: &Path, swept: &Swept) -> bool {
        match self.act {
            // Take the lock: a save may be about to write into the directory.
            Act::CarryOut => DirLock::take(dir).is_ok_and(|_lock| dir::remove_if_empty(dir)),
            Act::Plan => dir::entries(dir).is_ok_and(|entries| {
                entries.iter().all(|entry| swept.removed.contains(&entry.path()))
            }),
        }
    }
}

const IN_PROGRESS: &str = "a save into it is in progress";
const NO_LOCKS: &str = "its file system has no locks, so a save into it may be in progress; if there is none, \
                        run `ringstow prune`";

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
    fn prune_keeps_directory_that_a_save_has_locked() {
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
