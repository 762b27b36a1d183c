//! The coordinator's side of an export by several ranks. It creates the files of a model at their final length, and writes
//! their headers. The ranks write the rest ([`write_model_share`]). Once all of it is durable, the coordinator publishes
//! the model.
//!
//! [`write_model_share`]: crate::store::write::model_share::write_model_share

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{Item, TensorInfo, names};
use crate::limits::ALIGN;
use crate::plan::save::{SavePlan, Shard, plan_model, plan_numbered};
use crate::store::write::model_files::{begin, check_plain, publish};
use crate::store::write::rollback::Rollback;
use crate::sys::chance::unique;
use crate::sys::{file, inodes, space};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Which files hold a model's tensors, and where in them. Every rank computes the same.
#[derive(Debug)]
pub struct ModelLayout {
    items: Vec<Item>,
    plan: SavePlan,
}

impl ModelLayout {
    /// Lays out tensors as [`Store::export`](crate::Store::export) does. With `numbers`, each tensor has the number of its file, from 1.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what safetensors cannot hold; [`Error::Invalid`] for two tensors of one name.
    pub fn new(tensors: Vec<TensorInfo>, numbers: Option<&[u32]>, config: &Config) -> Result<Self> {
        let item = |info| Item { info, region: None, object: false };
        let items: Vec<Item> = tensors.into_iter().map(item).collect();
        check_plain(&items)?;
        let plan = match numbers {
            None => plan_model(&items, config.block_bytes, config.shard_bytes)?,
            Some(numbers) => plan_numbered(&items, numbers, config.block_bytes)?,
        };
        Ok(Self { items, plan })
    }

    /// The files: each one's name, the bytes of its header, and its length.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.plan.shards.iter().map(|shard| (&*shard.name, shard.header.bytes(), shard.bytes))
    }

    /// For each tensor, the index of its file, and the offset of its first byte there.
    pub fn places(&self) -> Vec<(usize, u64)> {
        let mut places = vec![(0, 0); self.items.len()];
        for (file, shard) in self.plan.shards.iter().enumerate() {
            for extent in &shard.items {
                places[extent.item] = (file, extent.range.start);
            }
        }
        places
    }
}

/// The coordinator's hold on a directory: from the creation of the files to their publication. Dropping it removes what
/// was written.
#[derive(Debug)]
pub struct ModelSession {
    layout: ModelLayout,
    dir: PathBuf,
    /// In the files' uncommitted names. A process that a failed export has left behind knows only its own.
    id: String,
    rollback: Rollback,
}

impl ModelSession {
    /// Locks a directory, and creates the files in it, at their final length and with their headers.
    ///
    /// # Errors
    /// [`Error::Busy`] if another export holds the lock; [`Error::Invalid`] if the directory holds other tensors;
    /// [`Error::Io`], for a full disk too. Nothing stays.
    pub fn begin(dir: impl AsRef<Path>, layout: ModelLayout) -> Result<Self> {
        let (dir, id) = (dir.as_ref().to_path_buf(), unique());
        let rollback = begin(&dir)?;
        let mut session = Self { layout, dir, id, rollback };
        session.create()?;
        Ok(session)
    }

    fn create(&mut self) -> Result<()> {
        let mut files: Vec<File> = Vec::new();
        for (shard, path) in self.layout.plan.shards.iter().zip(self.paths()) {
            // Not before: a file of this name that cannot be created is not this export's.
            let file = file::create_new(&path, false).map_err(|e| inodes::creating(&path, e))?;
            self.rollback.files.push(path.clone());
            files.push(file);
            let file = files.last().expect("it was just pushed");
            space::preallocate(file, padded(shard))
                .map_err(|error| self.too_little_space(&path, error, &files))?;
            file::write_start(file, &path, &shard.header_bytes(&self.layout.items))?;
        }
        Ok(())
    }

    fn too_little_space(&self, path: &Path, error: io::Error, files: &[File]) -> Error {
        let needed = self.layout.plan.shards.iter().map(padded).sum();
        let lack = space::shortage(&error, needed, files.iter());
        let mut error = Error::io("preallocating", path, error);
        if let Error::Io { shortage, .. } = &mut error {
            *shortage = lack;
        }
        error
    }

    /// The files that the ranks write, in the order of the layout.
    pub fn paths(&self) -> Vec<PathBuf> {
        let path = |shard: &Shard| self.dir.join(names::uncommitted_write(&shard.name, &self.id));
        self.layout.plan.shards.iter().map(path).collect()
    }

    /// Cuts the padding off the files, and makes them a model. All ranks' writes are durable.
    ///
    /// # Errors
    /// [`Error::NotDurable`] if the model is there, and may not survive a crash; [`Error::Io`]: nothing stays.
    pub fn publish(mut self) -> Result<()> {
        for (shard, path) in self.layout.plan.shards.iter().zip(self.paths()) {
            let file =
                file::open_write(&path, false).map_err(|e| Error::io("opening", &path, e))?;
            space::finish(&file, shard.bytes)
                .map_err(|e| Error::io("cutting to length", &path, e))?;
            file::sync(&file).map_err(|e| Error::io("syncing", &path, e))?;
        }
        let uncommitted = |name: &str| names::uncommitted_write(name, &self.id);
        let ModelLayout { items, plan } = &self.layout;
        publish(plan, items, (&self.dir, uncommitted), &mut self.rollback)
    }
}

fn padded(shard: &Shard) -> u64 {
    shard.bytes.next_multiple_of(ALIGN as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Dtype;
    use crate::pipeline::job::Job;
    use crate::pipeline::runtime::Runtime;
    use crate::plan::share::{Place, SharedFile};
    use crate::state::StateDict;
    use crate::store::write::export::export;
    use crate::store::write::model_share::write_model_share;
    use crate::sys::dir::file_names;
    use std::fs;
    use std::sync::Arc;

    const PAGE: u64 = ALIGN as u64;

    fn config(shard_bytes: u64) -> Config {
        Config { block_bytes: 8192, pool_bytes: 65536, shard_bytes, ..Config::default() }
    }

    fn bytes(of: usize) -> Vec<u8> {
        (0..30_000).map(|at| (at * 7 + of) as u8).collect()
    }

    fn infos() -> Vec<TensorInfo> {
        let info =
            |name: &str| TensorInfo { name: name.into(), dtype: Dtype::U8, shape: vec![30_000] };
        ["a", "b", "c"].map(info).into()
    }

    /// Writes as one of two ranks, which take turns at the pages of every file.
    fn write(session: &ModelSession, rank: u64, config: &Config) -> Result<()> {
        let runtime = Runtime::new(config.clone()).unwrap();
        let tensors: Vec<Vec<u8>> = (0..3).map(bytes).collect();
        let mut state = StateDict::new();
        for (info, tensor) in infos().into_iter().zip(&tensors) {
            state.bytes(info.name, info.dtype, &info.shape, tensor).unwrap();
        }
        let files: Vec<(PathBuf, SharedFile)> = session
            .paths()
            .into_iter()
            .zip(session.layout.files())
            .map(|(path, (name, _, bytes))| (path, SharedFile { name: name.into(), bytes }))
            .collect();
        let mut places = Vec::new();
        for (file, shard) in session.layout.plan.shards.iter().enumerate() {
            for extent in &shard.items {
                let mut offset = extent.range.start;
                while offset < extent.range.end {
                    let end = (offset + 1).next_multiple_of(PAGE).min(extent.range.end);
                    if offset / PAGE % 2 == rank {
                        let (from, bytes) = (offset - extent.range.start, end - offset);
                        places.push(Place {
                            file,
                            offset,
                            item: extent.item,
                            from,
                            bytes,
                            round: 0,
                        });
                    }
                    offset = end;
                }
            }
        }
        let job = Arc::<Job>::default();
        write_model_share(&runtime, &state, &session.dir, (&files, &places), &job).map(drop)
    }

    fn all_files(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let mut names = file_names(dir).unwrap();
        names.sort();
        names.into_iter().map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect()
    }

    #[test]
    fn pages_of_two_ranks_are_the_files_of_one_export() {
        for shard_bytes in [0, 70_000] {
            let root = tempfile::tempdir().unwrap();
            let (one, all) = (root.path().join("one"), root.path().join("all"));
            let config = config(shard_bytes);
            let tensors: Vec<Vec<u8>> = (0..3).map(bytes).collect();
            let mut state = StateDict::new();
            for (info, tensor) in infos().into_iter().zip(&tensors) {
                state.bytes(info.name, info.dtype, &info.shape, tensor).unwrap();
            }
            let runtime = Runtime::new(config.clone()).unwrap();
            export(&runtime, &state, &one, &Arc::default()).unwrap();
            let layout = ModelLayout::new(infos(), None, &config).unwrap();
            let session = ModelSession::begin(&all, layout).unwrap();
            for rank in [1, 0] {
                write(&session, rank, &config).unwrap();
            }
            assert!(!file_names(&all).unwrap().iter().any(|name| name.ends_with(".safetensors")));
            session.publish().unwrap();
            assert_eq!(all_files(&all), all_files(&one));
        }
    }

    #[test]
    fn numbers_decide_the_files_and_there_is_an_index() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(0);
        let layout = ModelLayout::new(infos(), Some(&[3, 1, 3]), &config).unwrap();
        let session = ModelSession::begin(dir.path(), layout).unwrap();
        for rank in [0, 1] {
            write(&session, rank, &config).unwrap();
        }
        session.publish().unwrap();
        let names: Vec<String> = all_files(dir.path()).into_iter().map(|(name, _)| name).collect();
        let files = [1, 3].map(|number| names::numbered_model_shard(number, 3));
        assert_eq!(names, [&*files[0], &*files[1], names::MODEL_INDEX]);
        for wrong in [&[1, 0, 1][..], &[1, 2]] {
            assert!(ModelLayout::new(infos(), Some(wrong), &config).is_err());
        }
    }

    #[test]
    fn session_that_ends_removes_its_files_and_late_ranks_write_to_none() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(0);
        let layout = || ModelLayout::new(infos(), None, &config).unwrap();
        let first = ModelSession::begin(dir.path(), layout()).unwrap();
        assert!(matches!(ModelSession::begin(dir.path(), layout()), Err(Error::Busy { .. })));
        let paths = first.paths();
        drop(first);
        assert!(file_names(dir.path()).unwrap().is_empty());
        let second = ModelSession::begin(dir.path(), layout()).unwrap();
        assert_ne!(paths, second.paths());
        fs::remove_file(&second.paths()[0]).unwrap();
        assert!(write(&second, 0, &config).unwrap_err().is_not_found());
        assert!(second.publish().unwrap_err().is_not_found());
        assert!(file_names(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn leftovers_of_a_killed_session_are_cleared_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(0);
        let name = names::uncommitted_write(names::MODEL, "00ff00ff00ff00ff");
        fs::write(dir.path().join(&name), "x").unwrap();
        let layout = ModelLayout::new(infos(), None, &config).unwrap();
        let session = ModelSession::begin(dir.path(), layout).unwrap();
        assert!(!dir.path().join(name).exists());
        drop(session);
    }
}
