//! The transaction that makes a checkpoint appear whole or not at all.
//!
//! 1. Shards are written under uncommitted names (`.part`) and synced; so are the directories that
//!    they are in.
//! 2. The manifest is written under an uncommitted name, synced, and renamed into place; the
//!    directory is synced. This rename is the commit: before it the earlier checkpoint stands, from
//!    it on the new one does, whose shards readers also find under their uncommitted names.
//! 3. Shards of the earlier checkpoint are removed, or kept as spare files, the new ones get their final
//!    names, and the directories are synced. A kill in between leaves this to the next save into it, or to `prune`.

use super::dir::{self, file_names};
use super::parts::Parts;
use super::places::Places;
use super::sweep::{committed, sweep, sweep_by, sweep_keeping};
use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, names};
use serde::Serialize;
use std::fs;
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
        parts.lock(dir)?;
        let places = Places::to_save(dir, stripe)?;
        let mut generation = 0;
        match committed(&places) {
            // A damaged checkpoint is no reason to lose the next one: it is replaced, and until then
            // left as it is.
            Err(error @ (Error::Corrupt { .. } | Error::Format { .. })) => {
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
    pub fn commit<T: Serialize, S: Serialize>(mut self, manifest: &Manifest<T, S>) -> Result<()> {
        self.check_free(&manifest.files)?;
        self.write_manifest(manifest)?;
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
            match fs::symlink_metadata(&path) {
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
        let write = || {
            let file = crate::engine::file::create(&path, false)?;
            manifest.write(&file)?;
            file.sync_all()
        };
        write().map_err(|e| Error::io("writing", &path, e))?;
        dir::sync(self.dir())
    }

    /// The commit.
    fn publish(&mut self) -> Result<()> {
        let to = self.dir().join(names::MANIFEST);
        fs::rename(self.dir().join(names::MANIFEST_PART), &to)
            .map_err(|e| Error::io("renaming the manifest to", &to, e))?;
        // From here on nothing may be taken back, even if the directory cannot be synced: the
        // manifest may or may not survive a crash, but its shards must if it does.
        self.parts.keep();
        dir::sync(self.dir())
    }

    /// Step 3.
    fn settle(&mut self, files: &[FileEntry]) -> Result<()> {
        match self.recycle {
            true => sweep_keeping(&self.places, Some(files)),
            false => sweep(&self.places, Some(files)),
        }
        .map(drop)
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
    for dir in places.there() {
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
mod tests {
    use super::*;
    use crate::plan::save::Options;
    use crate::store::{Checkpoint, prune};

    /// A one-shard manifest whose only tensor is `mark`, and its shard under the uncommitted name.
    fn write_part(tx: &mut Transaction, mark: u8) -> Manifest {
        use crate::format::{Dtype, TensorInfo};
        let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![1] };
        let generation = tx.generation();
        let (block_bytes, shard_bytes) = (4096, 0);
        let options = Options { rank: 0, generation, block_bytes, shard_bytes, lanes: 1 };
        let items = [info.into()];
        let plan = crate::plan::save::plan(&items, options).unwrap();
        let shard = &plan.shards[0];
        let mut bytes = shard.header_bytes(&items);
        bytes.push(mark);
        let part = tx.places().dir_of(shard, 0).join(names::part(&shard.name));
        tx.begin_files(std::slice::from_ref(&part));
        fs::write(&part, &bytes).unwrap();
        let crc32 = bytes.chunks(4096).map(crc32fast::hash).collect();
        let file = FileEntry { name: shard.name.clone(), bytes: bytes.len() as u64, crc32 };
        let state = serde_json::value::to_raw_value(&()).unwrap();
        Manifest::new(generation, 1, 4096, vec![file], plan.entries(&items).iter().collect(), state)
    }

    fn mark_at(dir: &Path) -> u8 {
        let checkpoint = Checkpoint::open(dir).unwrap();
        *fs::read(&checkpoint.files[0].path).unwrap().last().unwrap()
    }

    fn commit(dir: &Path, mark: u8) {
        let mut tx = Transaction::begin(dir, &[]).unwrap();
        let manifest = write_part(&mut tx, mark);
        tx.commit(&manifest).unwrap();
    }

    /// A save that lacks only the commit itself.
    fn about_to_publish(dir: &Path, mark: u8) -> (Transaction, Manifest) {
        let mut tx = Transaction::begin(dir, &[]).unwrap();
        let manifest = write_part(&mut tx, mark);
        tx.write_manifest(&manifest).unwrap();
        (tx, manifest)
    }

    /// A save that is committed, and has cleared nothing away yet.
    fn published(dir: &Path, mark: u8) -> (Transaction, Manifest) {
        let (mut tx, manifest) = about_to_publish(dir, mark);
        tx.publish().unwrap();
        (tx, manifest)
    }

    /// Dies without any clean-up, as if killed; only the lock goes, as the kernel would see to.
    fn die(mut tx: Transaction) {
        tx.parts.keep();
    }

    fn safetensors_in(dir: &Path) -> Vec<String> {
        file_names(dir).unwrap().into_iter().filter(|n| n.ends_with(".safetensors")).collect()
    }

    #[test]
    fn killed_before_the_rename_keeps_the_old_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        die(about_to_publish(dir.path(), 2).0);
        assert_eq!(mark_at(dir.path()), 1);
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.safetensors"]);
        prune(dir.path()).unwrap();
        assert_eq!(
            file_names(dir.path()).unwrap(),
            ["manifest.json", "rank00000-0.safetensors"],
            "nothing of the killed save is left"
        );
        assert_eq!(mark_at(dir.path()), 1);
    }

    #[test]
    fn killed_right_after_the_rename_has_the_new_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        die(published(dir.path(), 2).0);
        assert_eq!(mark_at(dir.path()), 2);
        commit(dir.path(), 3);
        assert_eq!(mark_at(dir.path()), 3);
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g2.safetensors"]);
    }

    #[test]
    fn killed_between_commit_and_renames_is_finished_by_prune() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        die(published(dir.path(), 2).0);
        let swept = prune(dir.path()).unwrap();
        assert_eq!((swept.renamed.len(), swept.removed.len()), (1, 1));
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
        assert_eq!(mark_at(dir.path()), 2);
    }

    #[test]
    fn a_checkpoint_opened_right_after_its_commit_is_loaded_under_its_new_names() {
        let dir = tempfile::tempdir().unwrap();
        let (mut tx, manifest) = published(dir.path(), 7);
        let opened = Checkpoint::open(dir.path()).unwrap();
        tx.settle(&manifest.files).unwrap();
        let runtime = crate::Runtime::new(crate::Config::default()).unwrap();
        let loaded = opened
            .load_names(["t"], crate::LoadOptions::default(), &runtime, &Default::default())
            .unwrap();
        assert_eq!(loaded.tensor("t").unwrap().data(), [7]);
    }

    #[test]
    fn a_failed_save_leaves_no_trace() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        let mut tx = Transaction::begin(&dir, &[]).unwrap();
        write_part(&mut tx, 1);
        drop(tx);
        assert!(!root.path().join("a").exists());
    }

    #[test]
    fn a_second_saver_is_told_and_does_no_harm() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("x");
        let mut tx = Transaction::begin(&dir, &[]).unwrap();
        let manifest = write_part(&mut tx, 1);
        assert!(matches!(Transaction::begin(&dir, &[]), Err(Error::Busy { .. })));
        tx.commit(&manifest).unwrap();
        assert_eq!(mark_at(&dir), 1);
    }

    #[test]
    fn foreign_safetensors_files_are_neither_removed_nor_mixed_in() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("model.safetensors"), "theirs").unwrap();
        let error = Transaction::begin(dir.path(), &[]).unwrap_err();
        assert!(error.to_string().contains("model.safetensors"), "{error}");
        assert!(dir.path().join("model.safetensors").exists());
    }

    #[test]
    fn a_damaged_checkpoint_is_replaced_and_harmed_no_further_until_then() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        fs::write(dir.path().join(names::MANIFEST), "rubbish").unwrap();
        drop(Transaction::begin(dir.path(), &[]).unwrap());
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.safetensors"]);
        commit(dir.path(), 2);
        assert_eq!(mark_at(dir.path()), 2);
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
    }

    /// A network file system may show a listing of a moment ago.
    #[test]
    fn a_generation_whose_files_a_listing_does_not_show_is_not_used_again() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        let shard = dir.path().join("rank00000-0.safetensors");
        fs::rename(&shard, dir.path().join("hidden")).unwrap();
        let mut tx = Transaction::begin(dir.path(), &[]).unwrap();
        fs::rename(dir.path().join("hidden"), &shard).unwrap();
        assert_eq!(tx.generation(), 1);
        let manifest = write_part(&mut tx, 2);
        tx.commit(&manifest).unwrap();
        assert_eq!(mark_at(dir.path()), 2);
    }

    #[test]
    fn a_commit_whose_final_name_is_taken_is_refused_and_both_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        commit(dir.path(), 1);
        let mut tx = Transaction::begin(dir.path(), &[]).unwrap();
        let manifest = write_part(&mut tx, 2);
        let taken = dir.path().join("rank00000-0.g1.safetensors");
        fs::write(&taken, "another saver's").unwrap();
        let error = tx.commit(&manifest).unwrap_err().to_string();
        assert!(
            error.contains("rank00000-0.g1.safetensors") && error.contains("nothing was committed")
        );
        assert_eq!(mark_at(dir.path()), 1);
        assert_eq!(fs::read(&taken).unwrap(), b"another saver's");
    }

    #[test]
    fn no_clean_up_removes_an_uncommitted_name_that_the_manifest_lists() {
        let dir = tempfile::tempdir().unwrap();
        let (tx, _) = published(dir.path(), 7);
        die(tx);
        let [part, shard] = ["rank00000-0.safetensors.part", "rank00000-0.safetensors"];
        let bytes = fs::read(dir.path().join(part)).unwrap();
        fs::write(dir.path().join(shard), "of whom?").unwrap();
        let swept = prune(dir.path()).unwrap();
        assert_eq!((swept.removed.len(), swept.renamed.len(), swept.left.len()), (0, 0, 1));
        assert!(swept.left[0].reason.contains(shard), "{swept:?}");
        assert_eq!(fs::read(dir.path().join(part)).unwrap(), bytes);
        // The next save has other names, and is in no doubt about either.
        commit(dir.path(), 8);
        assert_eq!(mark_at(dir.path()), 8);
        assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
    }
}
