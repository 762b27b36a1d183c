//! The transaction that makes a checkpoint appear whole or not at all.
//!
//! 1. Shards are written under uncommitted names (`.part`) and synced; so are the directories that
//!    they are in.
//! 2. The manifest is written under an uncommitted name, synced, and renamed into place; the
//!    directory is synced. This rename is the commit: before it the earlier checkpoint stands, from
//!    it on the new one does, whose shards readers also find under their uncommitted names.
//! 3. Shards of the earlier checkpoint are removed, or kept as spare files, the new ones get their final
//!    names, and the directories are synced. Spare files that no shard of this save could have taken go. A kill in between leaves this to the next save into it, or to `prune`.

use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, names};
use crate::store::cleanup::sweep::{committed, sweep, sweep_by, sweep_keeping};
use crate::store::layout::recycled;
use crate::store::layout::stripes::Places;
use crate::store::write::rollback::Parts;
use crate::sys::dir;
use crate::sys::dir::file_names;
use crate::sys::file;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// A save into a directory. Dropped without a commit, it removes what it made.
#[derive(Debug)]
pub(crate) struct Transaction {
    places: Places,
    generation: u64,
    /// Set by [`Transaction::begin_ranks`]: every uncommitted file there is this save's.
    ranks: bool,
    /// Whether the shards of the checkpoint that is replaced become spare files.
    recycle: bool,
    /// What is there of this save; kept from the commit on.
    parts: Parts,
}

impl Transaction {
    /// Makes the directory if need be, locks it, cleans up after a killed save, and makes its
    /// companions in `stripe`.
    ///
    /// # Errors
    /// [`Error::Busy`] if another save is under way there; [`Error::Invalid`] if it holds
    /// safetensors files of somebody else's, or cannot be striped; [`Error::Unsupported`] if it holds a checkpoint of a
    /// newer version; [`Error::Io`].
    pub fn begin(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        let mut parts = Parts::begin(dir)?;
        let places = Places::to_save(dir, stripe)?;
        let mut generation = 0;
        match committed(&places) {
            // A damaged checkpoint is no reason to lose the next one: it is replaced, and until then
            // left as it is.
            Err(error) if error.is_damage() => {
                tracing::warn!(%error, "the checkpoint to be replaced is damaged");
            }
            listed => {
                let listed = listed?;
                sweep_by(&places, listed.as_ref())?;
                generation = listed.map_or(0, |listed| listed.next_generation());
            }
        }
        let generation = next_generation(&places)?.max(generation);
        places.make(&mut parts)?;
        Ok(Self { places, generation, ranks: false, recycle: false, parts })
    }

    /// Saves into this directory that came before, as far as its files tell.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Notes which shards are about to be written, so that they are removed if there is no commit.
    pub fn begin_files(&mut self, parts: &[PathBuf]) {
        self.parts.files.extend_from_slice(parts);
    }

    /// Notes that several ranks are about to write: whatever they have written is removed if there is
    /// no commit.
    pub fn begin_ranks(&mut self) {
        self.ranks = true;
    }

    /// Says whether the shards of the checkpoint that is replaced become spare files.
    pub fn recycle(&mut self, recycle: bool) {
        self.recycle = recycle;
    }

    /// The checkpoint's directory.
    pub fn dir(&self) -> &Path {
        self.places.own()
    }

    /// Where its files are.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Commits: all shards of `manifest` are on disk under their uncommitted names.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Invalid`] if a file has the final name of a shard. Nothing is committed then.
    /// [`Error::NotDurable`] if it is, and the sync after that fails.
    pub fn commit<T: Serialize, S: Serialize>(mut self, manifest: &Manifest<T, S>) -> Result<()> {
        self.check_free(&manifest.files)?;
        match self.write_manifest(manifest) {
            // Recycled files are not worth a checkpoint.
            Err(error) if error.is_disk_full() && recycled::give_up(&self.places)? > 0 => {
                tracing::warn!(%error, "the disk is full: recycled files are given up for the manifest");
                self.write_manifest(manifest)?;
            }
            written => written?,
        }
        self.publish()?;
        if let Err(error) = self.settle(&manifest.files) {
            // Committed all the same: readers find the shards under either name.
            tracing::warn!(%error, "the checkpoint is committed, but old files could not be cleared away; the next save or `ringstow prune` will");
        }
        Ok(())
    }

    /// No file has the final name of a shard: readers would take it for the shard. Asked of each file, since a
    /// listing may be of a moment ago.
    fn check_free(&self, files: &[FileEntry]) -> Result<()> {
        for path in files.iter().flat_map(|file| self.places.dirs().map(|dir| dir.join(&file.name)))
        {
            match dir::look_at(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io("opening", path, e)),
                Ok(_) => {
                    return Err(Error::invalid(format!(
                        "{} is there already, and nothing was committed: another program saves to this \
                         directory, or its file system did not show the file when the save began; save again",
                        path.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Step 1 and the first half of 2: after this, only the rename is missing.
    fn write_manifest<T: Serialize, S: Serialize>(
        &mut self,
        manifest: &Manifest<T, S>,
    ) -> Result<()> {
        self.places.sync_companions()?;
        self.parts.sync_parents()?;
        let path = self.dir().join(names::MANIFEST_PART);
        self.parts.files.push(path.clone());
        file::write_durably(&path, |file| manifest.write(file))?;
        dir::sync(self.dir())
    }

    /// The commit.
    fn publish(&mut self) -> Result<()> {
        let [from, to] = [names::MANIFEST_PART, names::MANIFEST].map(|name| self.dir().join(name));
        dir::rename(&from, &to)?;
        // From here on nothing may be taken back, even if the directory cannot be synced: the
        // manifest may or may not survive a crash, but its shards must if it does.
        self.parts.keep();
        let not_durable = |cause| Error::NotDurable { path: self.dir().into(), cause };
        dir::try_sync(self.dir()).map_err(not_durable)
    }

    /// Step 3.
    fn settle(&mut self, files: &[FileEntry]) -> Result<()> {
        match self.recycle {
            true => sweep_keeping(&self.places, Some(files)),
            false => sweep(&self.places, Some(files)),
        }?;
        recycled::drop_unfit(&self.places, files)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.ranks
            && !self.parts.is_kept()
            && let Err(error) =
                committed(&self.places).and_then(|listed| sweep_by(&self.places, listed.as_ref()))
        {
            tracing::warn!(%error, "could not remove what a failed save wrote");
        }
    }
}

/// One more than the largest generation among the shards that are there. Told from the files as well as from the
/// manifest: a damaged manifest cannot make a save write over an earlier one, nor can a stale listing.
fn next_generation(places: &Places) -> Result<u64> {
    let mut next = 0;
    for dir in places.there()? {
        for name in file_names(dir)? {
            if names::is_shard(&name) {
                next = next.max(names::generation(&name).saturating_add(1));
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

#[cfg(test)]
mod tests;
