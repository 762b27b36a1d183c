//! A directory as the place that a checkpoint is copied to, such as one that all nodes share.
//!
//! Several nodes may send to it at the same time, each its own files. A file is written under a name that no other promotion has,
//! and synced once it is whole. Then it gets the uncommitted name that it would have in a save. Once all files are there, the
//! rename of the manifest commits, and then they get their final names.

use super::target::{Paced, Seen, Target, Upload};
use crate::error::{Error, Result};
use crate::format::names;
use crate::limits::ALIGN;
use crate::object::Version;
use crate::pipeline::blocks::Checked;
use crate::pipeline::job::Job;
use crate::pipeline::pace::wait_until;
use crate::store::layout::manifest::{read_bytes, refuse_foreign};
use crate::store::layout::published::publish;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::sys::chance::unique;
use crate::sys::lock::{self, DirLock, FileLock, Hold};
use crate::sys::{dir, file, space};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long another promotion may take to replace the manifest: it syncs one file.
const COMMIT_MAX: Duration = Duration::from_secs(60);
/// How often that is looked at.
const COMMIT_LOOK: Duration = Duration::from_millis(5);

/// The directory.
pub(super) struct Directory {
    path: PathBuf,
    job: Arc<Job>,
    /// What identifies this run of the machine's kernel.
    boot: String,
    /// Whether files are opened with O_DIRECT, until the file system refuses.
    direct: AtomicBool,
}

impl Directory {
    /// A directory that need not be there yet.
    pub fn at(path: &Path, job: &Arc<Job>) -> Self {
        let boot = file::boot_id().unwrap_or_else(|_| unique());
        Self { path: path.into(), job: job.clone(), boot, direct: true.into() }
    }

    /// Where an upload is until it is finished.
    fn part(&self, upload: &Upload) -> PathBuf {
        self.path.join(names::uncommitted_write(&upload.name, &upload.id))
    }

    /// Writes blocks that follow one another. The last alone may end between two pages: that end goes through the page cache.
    fn write(
        &self,
        path: &Path,
        mut offset: u64,
        blocks: &[Checked],
        paced: Paced,
    ) -> io::Result<()> {
        let opened = self.open(path)?;
        for block in blocks {
            paced(block.as_ref().len() as u64);
            if self.job.stopped() {
                return Err(crate::engine::queue::cancelled());
            }
            let bytes: &[u8] = block.as_ref();
            let is_aligned = offset.is_multiple_of(ALIGN as u64);
            let whole = if is_aligned { bytes.len() / ALIGN * ALIGN } else { 0 };
            let is_refused =
                self.is_refused(file::write_at(&opened, path, &bytes[..whole], offset))?;
            let rest = if is_refused { 0 } else { whole };
            if rest < bytes.len() {
                let buffered = file::open_write(path, false)?;
                file::write_at(&buffered, path, &bytes[rest..], offset + rest as u64)?;
            }
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        if self.direct.load(Relaxed) {
            match file::open_write(path, true) {
                Err(error) if is_not_direct(&error) => self.give_up_direct(&error),
                opened => return opened,
            }
        }
        file::open_write(path, false)
    }

    /// Whether the file system has refused a write since it is direct: some open the file, and refuse that.
    fn is_refused(&self, written: io::Result<()>) -> io::Result<bool> {
        match written {
            Err(error) if is_not_direct(&error) && self.direct.load(Relaxed) => {
                self.give_up_direct(&error);
                Ok(true)
            }
            written => written.map(|()| false),
        }
    }

    fn give_up_direct(&self, error: &io::Error) {
        if self.direct.swap(false, Relaxed) {
            tracing::info!(dir = %self.path.display(), %error, "no O_DIRECT there: copying through the page cache");
        }
    }
}

fn is_not_direct(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput || crate::error::is_unsupported(error)
}

impl Target for Directory {
    fn place(&self) -> &Path {
        &self.path
    }

    fn hold(&self) -> Result<Option<DirLock>> {
        dir::make_all(&self.path)?;
        refuse_foreign(&self.path)?;
        let lock = DirLock::take_with_others(&self.path)?;
        self.refuse_others()?;
        Ok(Some(lock))
    }

    fn manifest(&self) -> Result<Option<Seen>> {
        let bytes = match dir::is_there(&self.path)? {
            true => read_bytes(&self.path)?,
            false => None,
        };
        Ok(bytes.map(|manifest| Seen { manifest, version: Version::default() }))
    }

    fn commit(&self, manifest: Vec<u8>, seen: Option<&Seen>) -> Result<()> {
        let Some(seen) = seen else {
            return publish(&self.path, names::MANIFEST, &manifest, false);
        };
        // Without it, another promotion could replace it between the look and the rename.
        let _held = self.hold_manifest()?;
        match read_bytes(&self.path)? {
            Some(there) if there == seen.manifest => {
                publish(&self.path, names::MANIFEST, &manifest, true)
            }
            _ => Err(self.replaced()),
        }
    }

    fn settle(&self, names: &[String]) -> Result<()> {
        dir::sync(&self.path)?;
        self.path.parent().map_or(Ok(()), dir::sync)?;
        if let Err(error) = self.clear_up(names) {
            // Readers find the shards under either name.
            tracing::warn!(dir = %self.path.display(), %error, "the copy is committed, but its directory could not be cleared up; `ringstow prune` does it");
        }
        Ok(())
    }

    /// Looks at each, since a network file system may show an old listing.
    fn missing(&self, files: &[(&str, u64)]) -> io::Result<Vec<usize>> {
        let has = |name: &str, bytes: u64| match dir::look_at(&self.path.join(name)) {
            Ok(found) => Ok(found.is_file() && found.len() == bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        };
        let mut missing = Vec::new();
        for (number, &(name, bytes)) in files.iter().enumerate() {
            if !has(name, bytes)? && !has(&names::uncommitted(name), bytes)? {
                missing.push(number);
            }
        }
        Ok(missing)
    }

    /// None if the directory is gone: somebody may remove it while a journal still names it.
    fn shards(&self) -> io::Result<Vec<String>> {
        let entries = match dir::try_entries(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
        let is_whole = |name: &String| names::split_write(name).is_none();
        let shards = names.filter(is_whole).map(|name| names::committed(&name).to_owned());
        Ok(shards.filter(|name| names::is_shard(name)).collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        dir::try_remove(&self.path.join(names::uncommitted(name)))?;
        dir::try_remove(&self.path.join(name)).map(drop)
    }

    fn free(&self) -> Option<u64> {
        space::free_at(&self.path).ok().flatten()
    }

    fn taken(&self, upload: &Upload) -> u64 {
        let part = file::open_read(&self.part(upload), false);
        part.and_then(|part| space::allocated(&part)).unwrap_or_default()
    }

    fn begin(&self, name: &str, bytes: u64) -> io::Result<Upload> {
        let upload = Upload { name: name.into(), id: unique() };
        let path = self.part(&upload);
        let reserved = file::create_new(&path, false)
            .and_then(|file| space::preallocate(&file, bytes).map(drop));
        if let Err(error) = reserved {
            let _gone = dir::try_remove(&path);
            return Err(error);
        }
        Ok(upload)
    }

    fn put_part(
        &self,
        upload: &Upload,
        (_, offset): (usize, u64),
        blocks: Vec<Checked>,
        paced: Paced,
    ) -> io::Result<String> {
        self.write(&self.part(upload), offset, &blocks, paced).map(|()| self.boot.clone())
    }

    /// A part is synced with its file alone: until then it outlives its process, and not this machine's memory.
    fn keeps(&self, answer: &str) -> bool {
        answer == self.boot
    }

    fn finish(&self, upload: &Upload, bytes: u64, _: Vec<String>) -> io::Result<()> {
        let (from, to) = (self.part(upload), self.path.join(names::uncommitted(&upload.name)));
        let found = dir::look_at(&from)?.len();
        if found != bytes {
            let why = format!(
                "{} has {found} bytes, and not {bytes}: another program has changed it",
                from.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        file::sync(&file::open_write(&from, false)?)?;
        dir::try_rename(&from, &to)?;
        dir::try_sync(&self.path)
    }

    fn abort(&self, upload: &Upload) -> io::Result<()> {
        dir::try_remove(&self.part(upload)).map(drop)
    }
}

impl Directory {
    /// Locks the manifest that is there, so that no other promotion replaces it meanwhile. `None` where nothing can be locked.
    /// The lock goes with the file: after a replacement nobody gets that of the new one by the old one's.
    fn hold_manifest(&self) -> Result<Option<FileLock>> {
        let path = self.path.join(names::MANIFEST);
        let until = Instant::now() + COMMIT_MAX;
        while !self.job.stopped() {
            match lock::hold(&path).map_err(|error| Error::io("locking", &path, error))? {
                Hold::Held(lock) => return Ok(Some(lock)),
                Hold::Gone => return Err(self.replaced()),
                Hold::Impossible => return Ok(None),
                Hold::Busy if Instant::now() > until => {
                    return Err(Error::Busy { path: self.path.clone() });
                }
                Hold::Busy => wait_until(Instant::now() + COMMIT_LOOK, &self.job),
            }
        }
        Err(Error::Cancelled { path: self.path.clone() })
    }

    /// The error for a manifest that is no longer the one that was seen.
    fn replaced(&self) -> Error {
        let exists = io::ErrorKind::AlreadyExists.into();
        Error::io("replacing", self.path.join(names::MANIFEST), exists)
    }

    /// Gives files that are committed their final names, and removes what others have begun to send of them.
    fn clear_up(&self, names: &[String]) -> Result<()> {
        for name in names {
            match dir::rename(&self.path.join(names::uncommitted(name)), &self.path.join(name)) {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        let is_begun = |file: &&String| {
            names::split_write(file)
                .is_some_and(|(shard, _)| names.iter().any(|name| name == shard))
        };
        for begun in dir::file_names(&self.path)?.iter().filter(is_begun) {
            dir::remove(&self.path.join(begun))?;
        }
        dir::sync(&self.path)
    }

    /// Refuses a directory of checkpoints, and one whose files readers would take for parts of this one.
    fn refuse_others(&self) -> Result<()> {
        let named = self.path.display();
        if let Some(checkpoint) = stripe_owner(&self.path)? {
            return Err(Error::invalid(format!(
                "{named} holds shards of the checkpoint {checkpoint}, which is striped over it: copy to another directory"
            )));
        }
        if let Some(step) =
            dir::directories(&self.path)?.iter().find(|step| dir::has(&step.join(names::MANIFEST)))
        {
            let step = step.display();
            return Err(Error::invalid(format!(
                "{named} holds checkpoints, such as {step}: name the directory of the copy, such as {named}/step-1000"
            )));
        }
        let is_other = |name: &&String| name.ends_with(".safetensors") && !names::is_shard(name);
        match dir::file_names(&self.path)?.iter().find(is_other) {
            None => Ok(()),
            Some(name) => Err(Error::invalid(format!(
                "{named} holds {name}, which ringstow did not write: readers of safetensors directories would take it for \
                 a part of this checkpoint; copy to another directory, or move that file away"
            ))),
        }
    }
}
