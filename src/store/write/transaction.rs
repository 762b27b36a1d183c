//! The transaction that makes a checkpoint appear whole or not at all.
//!
//! 1. The save writes shards to uncommitted paths (`.part`) and syncs them, and the directories that they are in.
//! 2. It writes the manifest to an uncommitted path, syncs it, renames it into place and syncs the directory.
//!    The rename is the commit. Readers find the earlier checkpoint before it, and the new one after it: they also
//!    look for shards at their uncommitted paths.
//! 3. It removes or recycles the earlier checkpoint's shards, renames the new ones to their final names, and syncs the
//!    directories. It also removes recycled files that no shard of this save could have claimed. If the process is
//!    killed before step 3 ends, the next save into the directory or `prune` finishes it.
//!
//! Where other hosts may save to the directory, too, no two saves have a name in common, and a save whose lock does not
//! keep them out clears up within its own [`Scope`].

use crate::engine::fallback::Fallback;
use crate::error::{Error, Result};
use crate::format::manifest::Listed;
use crate::format::{FileEntry, Manifest, names};
use crate::store::layout::manifest::{read_files, refuse_foreign};
use crate::store::layout::recycled;
use crate::store::layout::stripes::Stripes;
use crate::store::write::leftovers::Leftovers;
use crate::store::write::make_dirs::make_stripe_dirs;
use crate::store::write::rollback::Rollback;
use crate::store::write::scope::{Own, Scope};
use crate::store::write::swept::{Left, Swept};
use crate::sys::chance::{random_step, unique};
use crate::sys::dir;
use crate::sys::file;
use crate::sys::file_system::Reach;
use crate::sys::open_dir::Dir;
use serde::Serialize;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A save into a directory. Dropping it without a commit removes what it created.
#[derive(Debug)]
pub(crate) struct Transaction {
    stripes: Stripes,
    generation: u64,
    /// What the save may remove.
    scope: Scope,
    /// The manifest's uncommitted name.
    uncommitted_manifest: String,
    /// Set by [`Transaction::begin_ranks`]: every uncommitted file in the directories is this save's.
    ranks: bool,
    /// Whether the shards of the replaced checkpoint are recycled.
    recycle: bool,
    /// Whether the commit refuses to replace a checkpoint.
    only_new: bool,
    /// Kept from the commit on.
    rollback: Rollback,
}

impl Transaction {
    /// Creates the directory if it is missing, locks it, clears up after a killed save if its scope allows that, and
    /// creates its stripe directories in `stripe`.
    ///
    /// # Errors
    /// As for [`Session::begin`](crate::Session::begin); [`Error::Invalid`] also if the checkpoint cannot be striped, and
    /// for a manifest of another program.
    pub fn begin(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        let mut rollback = Rollback::begin(dir)?;
        let stripes = Stripes::to_save(dir, stripe)?;
        let (clears_up, is_shared) = {
            let lock = rollback.held();
            (lock.reach() == Reach::EveryHost, lock.is_shared())
        };
        let mut generation = 0;
        match read_files(dir) {
            // The save replaces a damaged checkpoint, and does not touch it before the commit.
            Err(error) if error.is_damage() => {
                refuse_foreign(dir)?;
                tracing::warn!(%error, "the checkpoint to be replaced is damaged");
            }
            listed => {
                let listed = listed?;
                if clears_up {
                    let all = Scope::Everything;
                    let own = rollback.held().dir();
                    Leftovers::of_killed(&stripes, own, listed.as_ref(), &all)?.clear()?;
                }
                generation = listed.map_or(0, |listed| listed.next_generation());
            }
        }
        let mut generation = next_generation(&stripes)?.max(generation);
        let mut uncommitted_manifest = names::UNCOMMITTED_MANIFEST.to_owned();
        if is_shared {
            generation = generation.saturating_add(random_step());
            uncommitted_manifest = names::unique_manifest(&unique());
        }
        let scope = Scope::of_save(rollback.held(), generation);
        // Only the checkpoint's own directory leads to its stripe directories. A crash must not leave them without it.
        rollback.sync_parents()?;
        make_stripe_dirs(&stripes, &mut rollback)?;
        Ok(Self {
            stripes,
            generation,
            scope,
            uncommitted_manifest,
            ranks: false,
            recycle: false,
            only_new: false,
            rollback,
        })
    }

    /// Begins to change a committed checkpoint, whose files stay and whose directory is locked. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the lock does not keep out other hosts: one of them may be replacing the checkpoint.
    pub fn begin_change(rollback: Rollback, stripes: Stripes) -> Result<Self> {
        let lock = rollback.held();
        let dir = lock.dir().path();
        if lock.reach() != Reach::EveryHost {
            return Err(Error::Unsupported {
                what: format!(
                    "changing {}, where nobody can know whether another host is saving ({})",
                    dir.display(),
                    lock.why()
                ),
                remedy: "save it again without that part, and remove this one".into(),
            });
        }
        // No save has this name, and a clean-up elsewhere finds it.
        let uncommitted_manifest = names::unique_manifest(&unique());
        let scope = match lock.is_shared() {
            false => Scope::Everything,
            true => Scope::Own(Own::default()),
        };
        Ok(Self {
            stripes,
            generation: 0,
            scope,
            uncommitted_manifest,
            ranks: false,
            recycle: false,
            only_new: false,
            rollback,
        })
    }

    /// The number in the shards' names. At least as many as saves into this directory came before, by its manifest and
    /// files.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Leaves so many generations out that no other directory's save gets the same.
    pub fn leap(&mut self) {
        // On a file system that hosts share, it has.
        if !self.rollback.held().is_shared() {
            self.generation = self.generation.saturating_add(random_step());
        }
    }

    /// Notes files that the save will write, to remove them if it does not commit.
    pub fn begin_files(&mut self, files: &[PathBuf]) {
        self.rollback.files.extend_from_slice(files);
    }

    /// Notes that the ranks of a session will write, to remove everything they wrote if the save does not commit.
    pub fn begin_ranks(&mut self, session: &str) {
        self.ranks = true;
        if let Scope::Own(own) = &mut self.scope {
            own.session = Some(session.into());
        }
    }

    /// See [`Rollback::disown`].
    pub fn disown(&mut self, error: &Error) {
        self.rollback.disown(error);
    }

    /// How the save creates its files. Where other hosts save, too, it never removes what has the name already.
    pub fn create(&self) -> fn(&Path, bool) -> io::Result<File> {
        if self.rollback.held().is_shared() { file::create_new } else { file::create }
    }

    /// Sets whether the shards of the replaced checkpoint are recycled.
    pub fn recycle(&mut self, recycle: bool) {
        self.recycle = recycle;
    }

    /// Refuses to replace a checkpoint: now, and at the commit.
    ///
    /// # Errors
    /// [`Error::Io`] of [`io::ErrorKind::AlreadyExists`] if one is there.
    pub fn only_new(&mut self) -> Result<()> {
        self.only_new = true;
        let manifest = self.dir().join(names::MANIFEST);
        if dir::has(&manifest) {
            let exists = io::Error::from_raw_os_error(nix::libc::EEXIST);
            return Err(Error::io("saving to", manifest, exists));
        }
        Ok(())
    }

    /// The checkpoint's directory.
    pub fn dir(&self) -> &Path {
        self.stripes.own()
    }

    /// The checkpoint's directory, which this save has locked.
    fn own(&self) -> &Arc<Dir> {
        self.rollback.held().dir()
    }

    /// Its directories that exist, open.
    ///
    /// # Errors
    /// As for [`Stripes::opened`].
    pub fn opened(&self) -> Result<Vec<Arc<Dir>>> {
        self.stripes.opened(self.own())
    }

    /// Where its files are.
    pub fn stripes(&self) -> &Stripes {
        &self.stripes
    }

    /// Commits. All shards of `manifest` must be durable at their uncommitted paths. Returns why a file of the replaced
    /// checkpoint was not recycled.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Invalid`] if a shard is gone, or a file already has its final name. Then nothing is
    /// committed.
    /// [`Error::NotDurable`] if the sync after the commit fails. If the rename fails and the manifest cannot be read, the
    /// error says that either checkpoint may be committed.
    pub fn commit<T: Serialize, S: Serialize>(
        mut self,
        manifest: &Manifest<T, S>,
    ) -> Result<Option<Fallback>> {
        self.prepare(manifest, &manifest.files)?;
        self.conclude(manifest)
    }

    /// The commit up to its rename: writes the manifest under its uncommitted name. `here` are those of its files that
    /// this save has written.
    ///
    /// # Errors
    /// As for [`Transaction::commit`]. Then nothing is committed.
    pub fn prepare<T: Serialize, S: Serialize>(
        &mut self,
        manifest: &Manifest<T, S>,
        here: &[FileEntry],
    ) -> Result<()> {
        self.check_free(here)?;
        self.write_manifest(manifest, None)?;
        self.check_there(here)
    }

    /// Commits a manifest that was [prepared](Transaction::prepare). Returns why a file of the replaced checkpoint was not
    /// recycled.
    ///
    /// # Errors
    /// As for [`Transaction::commit`].
    pub fn conclude<T, S>(mut self, manifest: &Manifest<T, S>) -> Result<Option<Fallback>> {
        self.rename(manifest)?;
        Ok(self.clear_replaced(&manifest.files))
    }

    /// The rename of a [prepared](Transaction::prepare) manifest alone: the files of the replaced checkpoint stay until
    /// [`Transaction::clear_replaced`], or until the next save or clean-up finds them.
    ///
    /// # Errors
    /// As for [`Transaction::commit`].
    pub fn rename<T, S>(&mut self, manifest: &Manifest<T, S>) -> Result<()> {
        if let Scope::Own(own) = &mut self.scope {
            // Another host may have committed since this save began. If its manifest is damaged, its files stay.
            let replaced = read_files(self.stripes.own()).unwrap_or_default();
            own.replaces(replaced.as_ref().map_or(&[], |listed| &listed.files));
        }
        self.publish(manifest)
    }

    /// Removes or recycles the files of the replaced checkpoint, and gives those of the new one their final names. Returns
    /// why one was not recycled.
    pub fn clear_replaced(&mut self, files: &[FileEntry]) -> Option<Fallback> {
        self.settle(files).unwrap_or_else(|error| {
            // The checkpoint is committed: readers find the shards under either name.
            tracing::warn!(%error, "the checkpoint is committed, but old files could not be removed; the next save into the directory or `ringstow prune` removes them");
            None
        })
    }

    /// Keeps what this save has written, although it has not committed: others may commit it.
    pub fn keep(&mut self) {
        self.rollback.keep();
    }

    /// Commits a manifest that lists some of the committed checkpoint's files, without `dropped`, and removes those. The
    /// manifest keeps its file's owner, mode and time, by which others tell who saved last. `is_unchanged` checks that
    /// the committed manifest is still the one that this was made from.
    ///
    /// # Errors
    /// As for [`Transaction::commit`].
    pub fn commit_change<T: Serialize, S: Serialize>(
        mut self,
        manifest: &Manifest<T, S>,
        dropped: &[FileEntry],
        is_unchanged: impl Fn() -> Result<()>,
    ) -> Result<Swept> {
        self.write_manifest(manifest, Some(&self.dir().join(names::MANIFEST)))?;
        is_unchanged()?;
        self.publish(manifest)?;
        if let Scope::Own(own) = &mut self.scope {
            own.replaces(dropped);
        }
        Ok(self.clear_but(&manifest.files))
    }

    /// Removes what is not listed of a committed checkpoint.
    pub fn clear_but(&self, listed: &[FileEntry]) -> Swept {
        let mut swept = Swept::default();
        let cleared = Leftovers::find(&self.stripes, self.own(), Some(listed), &self.scope)
            .and_then(|leftovers| leftovers.carry_out(&mut swept));
        if let Err(error) = cleared {
            tracing::warn!(%error, "no manifest lists them, but files could not be removed; the next save into the directory or `ringstow prune` removes them");
            let at = if let Error::Io { path, .. } = &error { path } else { self.dir() };
            swept.left.push(Left::failed(at, &error));
        }
        swept
    }

    /// Checks that no file has the final name of a shard: readers would take it for the shard. Looks at each path,
    /// since a network file system may show an old listing.
    fn check_free(&self, files: &[FileEntry]) -> Result<()> {
        for path in
            files.iter().flat_map(|file| self.stripes.dirs().map(|dir| dir.join(&file.name)))
        {
            match dir::look_at(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io("opening", path, e)),
                Ok(_) => {
                    return Err(Error::invalid(format!(
                        "{} already exists, and nothing was committed: another program saves to this \
                         directory, or its file system did not show the file when the save began; save again",
                        path.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks that each shard is still there, with its length: on a file system that hosts share, a clean-up elsewhere
    /// may have removed it, and this process may have lost its lock.
    fn check_there(&self, files: &[FileEntry]) -> Result<()> {
        for file in files {
            let name = names::uncommitted(&file.name);
            let mut found = None;
            for path in self.stripes.dirs().map(|dir| dir.join(&name)) {
                match dir::look_at(&path) {
                    Ok(there) => found = found.or(Some(there.len())),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(Error::io("opening", path, e)),
                }
            }
            if found != Some(file.bytes) {
                let found = found.map_or("is gone".into(), |len| format!("has {len} bytes now"));
                return Err(Error::invalid(format!(
                    "{name}, which this save has written into {}, {found}, and should have {} bytes: another \
                     process has changed it; nothing was committed, save again",
                    self.dir().display(),
                    file.bytes
                )));
            }
        }
        Ok(())
    }

    /// The end of step 1 and step 2 up to the rename.
    fn write_manifest<T: Serialize, S: Serialize>(
        &mut self,
        manifest: &Manifest<T, S>,
        like: Option<&Path>,
    ) -> Result<()> {
        self.stripes.sync_stripe_dirs()?;
        let path = self.dir().join(&self.uncommitted_manifest);
        self.rollback.files.push(path.clone());
        let own = self.own();
        let write = || {
            file::write_durably(own.at(&path), |file| {
                manifest.write(file)?;
                like.map_or(Ok(()), |like| file::take_after(file, like))
            })?;
            own.sync()
        };
        match write() {
            // A checkpoint is worth more than recycled files.
            Err(error) if error.is_disk_full() && recycled::give_up(&self.opened()?)? > 0 => {
                tracing::warn!(%error, "the disk is full: removed recycled files to make space for the manifest");
                write()
            }
            written => written,
        }
    }

    /// The commit.
    fn publish<T, S>(&mut self, manifest: &Manifest<T, S>) -> Result<()> {
        // Its shards were written by its path.
        self.own().check()?;
        self.rename_manifest(manifest)?;
        // Keep everything, even if the sync fails: if a crash does not undo the rename, the shards must exist.
        self.rollback.keep();
        let not_durable = |cause| Error::NotDurable { path: self.dir().into(), cause };
        self.own().try_sync().map_err(not_durable)
    }

    /// Renames the manifest. On a network file system a rename may fail and have taken effect: the server's answer was
    /// lost, or the file system copies and then removes. Then the manifest says what is committed.
    fn rename_manifest<T, S>(&mut self, written: &Manifest<T, S>) -> Result<()> {
        let [from, to] =
            [&*self.uncommitted_manifest, names::MANIFEST].map(|name| self.dir().join(name));
        let [from, to] = [&from, &to].map(|path| self.own().at(path));
        let renamed = match self.only_new {
            true => dir::rename_to_free(from, to),
            false => dir::rename(from, to),
        };
        let Err(error) = renamed else { return Ok(()) };
        match read_files(self.dir()) {
            _ if error.is_taken() && dir::has(from) => Err(error),
            Ok(Some(there)) if is_same(&there, written) => Ok(()),
            // Removed, it can no longer be renamed: not by a server that gets to it only now either.
            Ok(_) if dir::has(from) && matches!(dir::try_remove(from), Ok(true)) => Err(error),
            // Whichever is committed, its shards stay.
            _ => {
                self.rollback.keep();
                Err(error.hinted(UNKNOWN))
            }
        }
    }

    /// Step 3.
    fn settle(&mut self, files: &[FileEntry]) -> Result<Option<Fallback>> {
        let mut leftovers = Leftovers::find(&self.stripes, self.own(), Some(files), &self.scope)?;
        if self.recycle {
            leftovers = leftovers.recycle()?;
        }
        let refused = leftovers.refused.take();
        leftovers.clear()?;
        recycled::drop_unfit(&self.opened()?, files).map(|()| refused)
    }
}

impl Transaction {
    /// Removes what the ranks wrote.
    fn clear_ranks(&self) -> Result<()> {
        let listed = read_files(self.dir())?;
        let (own, listed) = (self.own(), listed.as_ref());
        Leftovers::of_killed(&self.stripes, own, listed, &self.scope)?.clear().map(drop)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.ranks
            && !self.rollback.is_kept()
            && let Err(error) = self.clear_ranks()
        {
            tracing::warn!(%error, "could not remove what a failed save wrote");
        }
    }
}

/// Whether a manifest is the one that this save has written, and not that of another save with an equal generation.
fn is_same<T, S>(there: &Listed, written: &Manifest<T, S>) -> bool {
    (there.generation, there.created_unix_ms) == (written.generation, written.created_unix_ms)
        && there.files == written.files
}

/// Returns one more than the largest generation among the shards in the directories. The caller also checks the
/// manifest, so that neither a damaged manifest nor a stale listing makes a save overwrite an earlier one.
fn next_generation(stripes: &Stripes) -> Result<u64> {
    let mut next = 0;
    for (dir, names) in stripes.listed()? {
        for name in names {
            // Those of a damaged checkpoint may still have their uncommitted names.
            let shard = names::committed(&name);
            if names::is_shard(shard) {
                next = next.max(names::generation(shard).saturating_add(1));
            } else if name.ends_with(".safetensors") {
                return Err(foreign_file(dir, &name));
            }
        }
    }
    Ok(next)
}

fn foreign_file(dir: &Path, name: &str) -> Error {
    Error::invalid(format!(
        "{} holds {name}, which ringstow did not write: readers of safetensors directories would \
         take it for a part of this checkpoint; save to another directory, or remove it",
        dir.display()
    ))
}

const UNKNOWN: &str = "it may have taken effect, and the manifest that is there now is not this save's or cannot be \
                       read: either checkpoint may be committed, and the files of both stay; save again";

#[cfg(test)]
mod tests;
