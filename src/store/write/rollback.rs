//! Removes what a save has created, unless the save commits. Also notes which
//! directories' names this process has made durable.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::write::stripe_dir::lock_and_remove;
use crate::sys::dir::{self, remove};
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::lock::{self, DirLock};
use crate::sys::open_dir::Dir;
use crate::sys::path;
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::{self, ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// Files and directories that a save has created. Dropping it removes them, unless [`Rollback::keep`] was called.
#[derive(Debug)]
pub(in crate::store) struct Rollback {
    /// Files that the save writes, in the order in which it creates them.
    pub files: Vec<PathBuf>,
    /// Stripe directories that the save has marked. A marker goes with its directory's last file.
    pub marked: Vec<PathBuf>,
    /// The checkpoint's own directory.
    dir: PathBuf,
    /// Directories that the save has created, outermost first.
    made: Vec<PathBuf>,
    kept: bool,
    /// Whether a lock file may stay in the directory.
    leaves_lock: bool,
    /// Released after everything is removed.
    lock: Option<DirLock>,
}

impl Rollback {
    /// An empty one, for a directory that another process has created and locked.
    pub fn new() -> Self {
        let (files, marked, made) = (Vec::new(), Vec::new(), Vec::new());
        let (dir, kept, leaves_lock, lock) = (PathBuf::new(), false, true, None);
        Self { files, marked, dir, made, kept, leaves_lock, lock }
    }

    /// Creates the directory and its parents where they are missing, and locks it until the rollback is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL; [`Error::Busy`] if another save holds the lock; [`Error::Io`]. Then nothing is
    /// created.
    pub fn begin(dir: &Path) -> Result<Self> {
        /// How many times a clean-up may remove the directory before this locks it.
        const TRIES_MAX: usize = 100;
        path::check(dir)?;
        let mut tries = 0;
        loop {
            let mut rollback = Self::new();
            match rollback.make(dir).and_then(|()| rollback.lock(dir)) {
                Err(error) if error.is_not_found() && tries < TRIES_MAX => tries += 1,
                done => return done.map(|()| rollback),
            }
        }
    }

    /// One for a directory that is open and stays: locks it until the rollback is dropped.
    ///
    /// # Errors
    /// As for [`DirLock::take_open`].
    pub fn of_existing(dir: &Arc<Dir>) -> Result<Self> {
        let lock = DirLock::take_open(dir)?;
        let mut rollback = Self::new();
        (rollback.dir, rollback.lock) = (dir.path().into(), Some(lock));
        Ok(rollback)
    }

    fn make(&mut self, dir: &Path) -> Result<()> {
        self.dir = dir.into();
        let missing: Vec<&Path> =
            dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !dir::has(d)).collect();
        missing.into_iter().rev().try_for_each(|each| {
            self.make_dir(each).map_err(|error| match each.parent() {
                Some(above) if dir::look(above).is_ok_and(|kind| !kind.is_dir()) => {
                    let name = above.file_name().unwrap_or_default().display();
                    error.hinted(format!(
                        "`{name}` in this path is a file: choose another directory"
                    ))
                }
                _ => error,
            })
        })?;
        match dir::look(dir) {
            Ok(kind) if kind.is_dir() => Ok(()),
            Ok(_) => {
                let error = io::Error::from_raw_os_error(nix::libc::ENOTDIR);
                Err(Error::io("saving to", dir, error).hinted(
                    "a file has this name, and a checkpoint is a directory: choose another name, or remove the file",
                ))
            }
            Err(e) if dir::is_link(dir) => Err(Error::io("opening", dir, e).hinted(BROKEN)),
            Err(e) => Err(Error::io("opening", dir, e)),
        }
    }

    /// Creates a directory if it is missing; its parent must exist.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn make_dir(&mut self, dir: &Path) -> Result<()> {
        if dir::make(dir)? {
            self.made.push(dir.into());
        }
        Ok(())
    }

    /// Forgets the file that could not be created because another save has one of its name, and those after it.
    pub fn disown(&mut self, error: &Error) {
        let Error::Io { path, cause, .. } = error else { return };
        if cause.kind() == io::ErrorKind::AlreadyExists
            // A link that was given up may have had the name before.
            && let Some(first) = self.files.iter().rposition(|file| file == path)
        {
            self.files.truncate(first);
        }
    }

    /// The lock on the directory.
    ///
    /// # Panics
    /// If another process holds it: after [`Rollback::new`].
    pub fn held(&self) -> &DirLock {
        self.lock.as_ref().expect("a save holds the lock on its directory")
    }

    fn lock(&mut self, dir: &Path) -> Result<()> {
        self.lock = Some(DirLock::take(dir)?);
        Ok(())
    }

    /// Keeps everything from now on.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Leaves no lock file in the directory in the end: it is another program's.
    pub fn leave_no_lock(&mut self) {
        self.leaves_lock = false;
    }

    /// Whether [`Rollback::keep`] was called.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Makes the names of the checkpoint's directory and of all directories above it durable, up to the mount, even if
    /// they existed: their creator may have been killed before it synced. A process syncs the name of each directory
    /// once, but those of the checkpoint's own directory and of the one above it every time.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync_parents(&self) -> Result<()> {
        assert!(self.lock.is_some(), "only the save that holds the lock commits");
        // The checkpoint's own parent follows.
        self.made.iter().filter(|dir| **dir != self.dir).try_for_each(|dir| sync_parent(dir))?;
        // The true parent: the path may be a link, or end in `..`.
        let own = dir::real(&self.dir)?;
        // Other ranks also create the directory that holds the rank checkpoints.
        let always = if names::rank_of_dir(&own).is_some() { 2 } else { 1 };
        for (level, (dir, parent)) in own.ancestors().zip(own.ancestors().skip(1)).enumerate() {
            let name = Name::of(dir)?;
            if level >= always {
                if name.is_mount_below(parent)? {
                    break;
                }
                if name.is_durable() {
                    continue;
                }
            }
            match dir::sync(parent) {
                // A process that may not list or change the directory has not created anything in it.
                Err(Error::Io { cause, .. })
                    if matches!(cause.kind(), PermissionDenied | ReadOnlyFilesystem) => {}
                synced => synced?,
            }
            if level >= always {
                name.note_durable();
            }
        }
        Ok(())
    }

    /// Removes a file that the save has written.
    fn remove_file(&self, file: &Path) -> Result<()> {
        match &self.lock {
            Some(lock) if file.parent() == Some(lock.dir().path()) => remove(lock.dir().at(file)),
            _ => remove(file),
        }
    }

    /// Removes a created directory if it is empty. Takes its lock first: another save may be about to write into it.
    fn remove_dir(&mut self, dir: &Path) -> Result<bool> {
        match self.lock.take_if(|_| dir == self.dir) {
            Some(lock) => lock.remove_dir(),
            None => match Dir::open_real(dir) {
                Err(error) if error.is_not_found() => Ok(false),
                open => lock::remove_if_empty(&open?),
            },
        }
    }
}

const BROKEN: &str =
    "it is a link that leads nowhere: create the directory that it leads to, or change the link";

fn sync_parent(dir: &Path) -> Result<()> {
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    dir::sync(parent.unwrap_or(Path::new(".")))
}

impl Drop for Rollback {
    fn drop(&mut self) {
        if !self.kept {
            self.roll_back();
        } else if let Some(lock) = self.lock.take_if(|_| !self.leaves_lock) {
            lock.remove_file();
        }
    }
}

impl Rollback {
    fn roll_back(&mut self) {
        // What tells whose the rest is was written first, and goes last: this process may be killed in between.
        for file in self.files.iter().rev() {
            if let Err(error) = self.remove_file(file) {
                tracing::warn!(%error, "could not remove what a failed save wrote; the next save into the directory or `ringstow prune` does");
                return;
            }
        }
        let made = std::mem::take(&mut self.made);
        let mut is_marked = false;
        // A session may have removed it, when it cleared up what its ranks wrote.
        for dir in self.marked.iter().filter(|dir| dir::has(dir)) {
            // A crash must not lose the marker alone.
            let unmarked = dir::sync(dir).and_then(|()| lock_and_remove(dir, made.contains(dir)));
            let unmarked = unmarked.and_then(|_| match dir::has(dir) {
                true => Ok(()),
                false => sync_parent(dir),
            });
            is_marked |= dir::has(&dir.join(names::STRIPE_MARKER));
            if let Err(error) = unmarked {
                tracing::warn!(%error, "could not remove the marker of a failed save");
            }
        }
        for dir in made.iter().rev() {
            // A rank that outlives its session has written into a stripe directory. A clean-up finds that by way of
            // the checkpoint's own.
            if is_marked && self.dir.starts_with(dir) {
                continue;
            }
            // A crash must not bring back a stripe directory, and not the checkpoint's own one: nobody would find it.
            let removed = self.remove_dir(dir).and_then(|is_gone| match is_gone {
                true => sync_parent(dir),
                false => Ok(()),
            });
            if let Err(error) = removed {
                tracing::warn!(%error, "could not remove a directory that a failed save created");
            }
        }
        if let Some(lock) = self.lock.take() {
            lock.withdraw();
        }
    }
}

static DURABLE: PerProcess<BTreeSet<Name>> =
    PerProcess::new([const { Mutex::new(BTreeSet::new()) }; GENERATIONS]);

/// The name of one directory. Another directory that gets the same path later has another one: file systems reuse
/// inode numbers, so the time of its creation counts too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    path: PathBuf,
    device: u64,
    inode: u64,
    created: Option<SystemTime>,
}

impl Name {
    /// The name of a directory, by its path from the root.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn of(dir: &Path) -> Result<Self> {
        let found = look(dir)?;
        let (device, inode) = (found.dev(), found.ino());
        Ok(Self { path: dir.into(), device, inode, created: found.created().ok() })
    }

    /// Whether the directory is on another file system than the one above it: a mount, not a name.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn is_mount_below(&self, parent: &Path) -> Result<bool> {
        Ok(look(parent)?.dev() != self.device)
    }

    /// Whether this process has synced the directory that holds the name.
    fn is_durable(&self) -> bool {
        DURABLE.lock().is_some_and(|all| all.contains(self))
    }

    /// Notes that the directory that holds the name was synced.
    fn note_durable(self) {
        if let Some(mut all) = DURABLE.lock() {
            all.insert(self);
        }
    }
}

fn look(dir: &Path) -> Result<Metadata> {
    dir::look(dir).map_err(|e| Error::io("opening", dir, e))
}

#[cfg(test)]
mod tests {
    use crate::store::write::rollback::*;
    use crate::sys::seam::{Call, watch};
    use std::fs;

    #[test]
    fn rollback_keeps_directory_that_another_save_has_locked() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        let mut loser = Rollback::new();
        loser.make(&dir).unwrap();
        let winner = Rollback::begin(&dir).unwrap();
        assert!(matches!(loser.lock(&dir), Err(Error::Busy { .. })));
        drop(loser);
        assert!(dir.exists());
        drop(winner);
        assert!(dir.exists(), "the winner did not create it");
    }

    /// The directories that a save syncs for the names of its directory and of those above.
    fn synced(dir: &Path) -> Vec<PathBuf> {
        let rollback = Rollback::begin(dir).unwrap();
        let watch = watch();
        rollback.sync_parents().unwrap();
        let synced = watch.take_paths(Call::Sync).into_iter();
        synced.map(|dir| fs::canonicalize(dir).unwrap()).collect()
    }

    #[test]
    fn directory_name_is_durable_even_if_it_existed() {
        let root = tempfile::tempdir_in(".").unwrap();
        let there = root.path().join("there");
        fs::create_dir(&there).unwrap();
        let [root, cwd] = [root.path(), Path::new(".")].map(|dir| fs::canonicalize(dir).unwrap());
        assert_eq!(synced(&there)[..2], [&*root, &*cwd]);
        // What this process has made durable stays so.
        assert_eq!(synced(&there), [&*root]);
        // A path without a parent, as in `save("step-1")`.
        assert_eq!(synced(Path::new(root.file_name().unwrap())), [&*cwd]);
        std::os::unix::fs::symlink(&there, root.join("link")).unwrap();
        assert_eq!(synced(&root.join("link")), [&*root]);
        // A rank checkpoint, below a directory that another rank has created.
        assert_eq!(synced(&there.join("rank00001")), [&*there, &*root]);
        // Below directories that this save creates.
        let new = there.join("new");
        assert_eq!(synced(&new.join("step")), [&*there, &*new, &*there, &*root]);
    }

    #[test]
    fn names_of_all_directories_that_a_killed_save_made_are_durable() {
        let root = tempfile::tempdir_in(".").unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        let deep = root.join("a/b/c");
        // As a save leaves them that is killed before its first sync.
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(synced(&deep)[..3], [root.join("a/b"), root.join("a"), root.clone()]);
        assert_eq!(synced(&deep), [root.join("a/b")]);
        // Another directory of the same path has not been synced.
        fs::rename(root.join("a"), root.join("old")).unwrap();
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(synced(&deep), [root.join("a/b"), root.join("a"), root.clone()]);
    }
}
