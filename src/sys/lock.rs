//! One saver per directory at a time, on all hosts where the file system can tell them of each other.

use crate::error::{Error, Result, is_one_of};
use crate::sys::dir::At;
use crate::sys::file_system::{FileSystem, Reach};
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::inherited::Inherited;
use crate::sys::open_dir::Dir;
use crate::sys::range_lock::{Lock, WHOLE};
use crate::sys::seam::{Call, made};
use crate::sys::{dir, file, range_lock};
use nix::errno::Errno;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The file that is locked besides its directory where hosts share the file system. It stays as long as the directory.
pub(crate) const FILE: &str = ".ringstow-lock";

/// A lock on a directory, held until dropped or until the process ends.
///
/// It is a lock (flock) on the directory itself, so it leaves no file behind, however the process ends. That lock never
/// reaches other hosts. On a file system that they share, a lock on [`FILE`] is held as well, whatever its reach: another
/// host may have mounted the same files so that it does reach. A file that is there already is locked on any file
/// system: this host may be the server.
#[derive(Debug)]
pub(crate) struct DirLock {
    dir: Arc<Dir>,
    file: Option<FileLock>,
    _own: Option<Held>,
    reach: Reach,
    shared: bool,
    why: String,
}

/// Unlocks when it is dropped. Closing alone would not, while a forked child has the descriptor.
#[derive(Debug)]
struct Held {
    _inherited: Inherited,
    dir: Arc<Dir>,
}

impl Held {
    fn take(dir: Arc<Dir>, who: Who) -> io::Result<Self> {
        let operation = match who {
            Who::One => FlockOperation::NonBlockingLockExclusive,
            Who::Several => FlockOperation::NonBlockingLockShared,
        };
        made(Call::Lock, dir.file(), || Ok(flock(dir.file(), operation)?))?;
        Ok(Self { _inherited: Inherited::note(dir.file()), dir })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = flock(self.dir.file(), FlockOperation::Unlock) {
            tracing::debug!(%error, "cannot unlock; closing the directory will");
        }
    }
}

/// A lock on a file, such as [`FILE`].
#[derive(Debug)]
pub(crate) struct FileLock {
    inherited: Option<Inherited>,
    file: File,
    /// Whether this lock created the file.
    created: bool,
}

/// Who may hold a lock at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// This holder alone.
    One,
    /// All that take it so.
    Several,
}

/// What became of an attempt to lock [`FILE`].
enum Attempt {
    Locked(FileLock),
    /// There is no file, and none was to be created.
    Absent,
    /// Another file, or none, has the path by now.
    Replaced,
}

impl DirLock {
    /// Takes the lock without waiting. If it cannot be locked, or the lock does not reach other hosts that may use the
    /// file system, [`DirLock::reach`] says so, and a warning is logged once.
    ///
    /// # Errors
    /// [`Error::Busy`] if another save holds it; [`Error::Io`], also if the directory is gone.
    pub fn take(dir: &Path) -> Result<Self> {
        Self::taken(dir, || Dir::open(dir), (Who::One, true))
    }

    /// [`DirLock::take`] of a directory that is open, while its path leads to it. The system grants it to those who share
    /// what is open: one that holds a lock of this directory must not take another.
    ///
    /// # Errors
    /// As for [`DirLock::take`]; [`Error::Invalid`] if another directory or a link has its path by now.
    pub fn take_open(dir: &Arc<Dir>) -> Result<Self> {
        Self::taken(dir.path(), || dir.check().map(|()| Arc::clone(dir)), (Who::One, true))
    }

    /// [`DirLock::take_open`] for a process that will change nothing: it does not create [`FILE`].
    ///
    /// # Errors
    /// As for [`DirLock::take_open`].
    pub fn take_to_look(dir: &Arc<Dir>) -> Result<Self> {
        Self::taken(dir.path(), || dir.check().map(|()| Arc::clone(dir)), (Who::One, false))
    }

    /// [`DirLock::take`] together with others that take it by this function: it keeps out those that take it alone.
    ///
    /// # Errors
    /// As for [`DirLock::take`].
    pub fn take_with_others(dir: &Path) -> Result<Self> {
        Self::taken(dir, || Dir::open(dir), (Who::Several, true))
    }

    fn taken(
        dir: &Path,
        open: impl Fn() -> Result<Arc<Dir>>,
        (who, creates): (Who, bool),
    ) -> Result<Self> {
        /// How many times others may replace what is locked.
        const TRIES_MAX: usize = 1000;
        for _ in 0..TRIES_MAX {
            if let Some(lock) = Self::of(open()?, (who, creates))? {
                return Ok(lock);
            }
        }
        Err(Error::Busy { path: dir.into() })
    }

    /// Locks an open directory. `None` if another one has its path by now: a clean-up has removed the opened one, and
    /// another process may hold the lock of the new one.
    fn of(opened: Arc<Dir>, (who, creates): (Who, bool)) -> Result<Option<Self>> {
        let dir = opened.path();
        let io = |e| Error::io("opening", dir, e);
        let system = FileSystem::of_open(opened.file()).map_err(io)?;
        let (mut reach, mut why) = (system.locks, system.why.clone());
        let shared = system.is_shared();
        let failed = |error: io::Error| format!("the lock failed on {}: {error}", system.name);
        let busy = || Error::Busy { path: dir.into() };
        let own = match Held::take(Arc::clone(&opened), who) {
            Ok(own) => Some(own),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(busy()),
            Err(error) => {
                if !shared {
                    (reach, why) = (Reach::ThisHost, failed(error));
                }
                None
            }
        };
        let path = dir.join(FILE);
        let file = match FileLock::take(opened.at(&path), who, shared && creates) {
            Ok(Attempt::Locked(file)) => Some(file),
            Ok(Attempt::Absent) => None,
            Ok(Attempt::Replaced) => return Ok(None),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Err(busy()),
                // The directory is gone.
                io::ErrorKind::NotFound => return Err(io(error)),
                // Another host has just removed the file, or the directory too.
                io::ErrorKind::StaleNetworkFileHandle => return Ok(None),
                _ if cannot_lock(&error) => {
                    if reach == Reach::EveryHost {
                        (reach, why) = (Reach::ThisHost, failed(error));
                    }
                    None
                }
                // The lock works for other hosts, and they rely on it: a save without it is not safe for anybody.
                _ => return Err(Error::io("locking", path, error)),
            },
        };
        if !opened.is_here().map_err(io)? {
            return Ok(None);
        }
        let lock = Self { dir: Arc::clone(&opened), file, _own: own, reach, shared, why };
        lock.warn();
        Ok(Some(lock))
    }

    /// The locked directory.
    pub fn dir(&self) -> &Arc<Dir> {
        &self.dir
    }

    /// Whom the lock keeps out.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Whether another process may write here in spite of the lock: on another host, whose view may also be late, or on
    /// this one if the directory or its [`FILE`] cannot be locked.
    pub fn is_shared(&self) -> bool {
        self.shared || self.reach == Reach::ThisHost
    }

    /// Why the lock has this reach.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Removes the directory if it holds nothing but [`FILE`]; says whether it did. Another host may lock the directory
    /// at any moment after the file is gone. Then the directory stays.
    ///
    /// # Errors
    /// [`Error::Io`] if it is empty and the system refuses.
    pub fn remove_dir(mut self) -> Result<bool> {
        if let Some(file) = self.file.take() {
            if !holds_nothing(&self.dir) {
                return Ok(false);
            }
            // NFS keeps a removed file under another name while it is open.
            dir::remove(self.dir.at(&self.dir.path().join(FILE)))?;
            drop(file);
        }
        dir::remove_if_empty(self.dir.itself())
    }

    /// Releases the lock of a directory that turned out not to hold a checkpoint, and leaves no [`FILE`] of its own
    /// there.
    pub fn withdraw(self) {
        if self.file.as_ref().is_some_and(|file| file.created) {
            self.remove_file();
        }
    }

    /// Releases the lock of a directory that holds no checkpoint of ringstow's, and leaves no [`FILE`] there. A process
    /// that has opened the file by now finds that it is gone, and tries again.
    pub fn remove_file(self) {
        if self.file.is_some()
            && let Err(error) = dir::remove(self.dir.at(&self.dir.path().join(FILE)))
        {
            tracing::debug!(%error, "cannot remove a lock file");
        }
    }

    fn warn(&self) {
        static WARNED: PerProcess<BTreeSet<String>> =
            PerProcess::new([const { Mutex::new(BTreeSet::new()) }; GENERATIONS]);
        let is_new = || WARNED.lock().is_some_and(|mut warned| warned.insert(self.why.clone()));
        if self.reach == Reach::ThisHost && is_new() {
            tracing::warn!(dir = %self.dir.path().display(), why = self.why, "the lock does not keep out every other process that may save here: a save removes only its own files and those of the checkpoint that it replaces; `ringstow prune --no-other-writers` removes what killed saves left");
        }
    }
}

/// Removes a directory that holds nothing (but [`FILE`]); says whether it did. Takes its lock: another save may be about
/// to write into it.
///
/// # Errors
/// [`Error::Io`] if it is empty and the system refuses.
pub(crate) fn remove_if_empty(dir: &Arc<Dir>) -> Result<bool> {
    // Locking may create the file.
    if !holds_nothing(dir) {
        return Ok(false);
    }
    match DirLock::take_open(dir) {
        Err(Error::Busy { .. }) => Ok(false),
        Err(error) if error.is_not_found() => Ok(false),
        lock => lock?.remove_dir(),
    }
}

/// Whether an open directory holds nothing (but [`FILE`]).
pub(crate) fn holds_nothing(dir: &Dir) -> bool {
    dir.names().is_ok_and(|all| all.iter().all(|(name, _)| name.as_os_str() == FILE))
}

/// Whether a directory holds nothing (but [`FILE`]).
pub(crate) fn is_empty(dir: &Path) -> bool {
    dir::entries(dir).is_ok_and(|all| all.iter().all(|entry| entry.file_name() == FILE))
}

fn identity(found: Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Whether this file cannot be locked by anybody, or by this user: no other host relies on a lock, or there is no file
/// to lock, since the disk is full or may not be written to.
fn cannot_lock(error: &io::Error) -> bool {
    use Errno::{EACCES, EDQUOT, EINVAL, ELOOP, ENOLCK, ENOSPC, ENOSYS, EOPNOTSUPP, EPERM, EROFS};
    let unlocked =
        [ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL, ENOSPC, EDQUOT, EROFS, EACCES, EPERM, ELOOP];
    // Without a number: something else than a file has the name.
    error.raw_os_error().is_none() || is_one_of(error, &unlocked)
}

/// What came of locking a file that is written under its uncommitted name.
#[derive(Debug)]
pub(crate) enum Hold {
    /// This process has the lock, until it drops it.
    Held(FileLock),
    /// Another holds it.
    Busy,
    /// The file was removed.
    Gone,
    /// Nobody can lock it, so nobody may take it for a leftover.
    Impossible,
}

/// Locks a file that exists, without waiting.
///
/// # Errors
/// The system's.
pub(crate) fn hold<'a>(at: impl Into<At<'a>>) -> io::Result<Hold> {
    match FileLock::take(at.into(), Who::One, false) {
        Ok(Attempt::Locked(lock)) => Ok(Hold::Held(lock)),
        Ok(Attempt::Absent | Attempt::Replaced) => Ok(Hold::Gone),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Hold::Busy),
        Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => Ok(Hold::Gone),
        Err(error) if cannot_lock(&error) => Ok(Hold::Impossible),
        Err(error) => Err(error),
    }
}

/// [`hold`]. Creates the file if it is missing.
///
/// # Errors
/// The system's, also if its directory is gone.
pub(crate) fn hold_new(path: &Path) -> io::Result<Hold> {
    loop {
        match FileLock::take(path.into(), Who::One, true) {
            Ok(Attempt::Locked(lock)) => return Ok(Hold::Held(lock)),
            Ok(Attempt::Absent | Attempt::Replaced) => {} // its holder has just removed it
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Hold::Busy),
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => {}
            Err(error) if cannot_lock(&error) => return Ok(Hold::Impossible),
            Err(error) => return Err(error),
        }
    }
}

fn open_dir(dir: &Path) -> io::Result<File> {
    made(Call::Open, dir, || File::open(dir))
}

impl FileLock {
    /// Locks a file. Creates it if it is missing and `creates` is set.
    fn take(at: At<'_>, who: Who, creates: bool) -> io::Result<Attempt> {
        let path = at.path;
        let opened = match file::open_lock(at) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && creates => {
                file::create_lock(at).map(|file| (file, true))
            }
            opened => opened.map(|file| (file, false)),
        };
        let (file, created) = match opened {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Ok(Attempt::Replaced);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && !creates => {
                return Ok(Attempt::Absent);
            }
            opened => opened?,
        };
        if let Err(error) = made(Call::Lock, path, || {
            range_lock::set(
                &file,
                WHOLE,
                if who == Who::One { Lock::Exclusive } else { Lock::Shared },
            )
        }) {
            // Nobody can lock it. After any other failure, another host may have.
            if created && error.kind() != io::ErrorKind::WouldBlock && cannot_lock(&error) {
                let _kept = dir::try_remove(at);
            }
            return Err(error);
        }
        let inherited = Some(Inherited::note(&file));
        let lock = Self { inherited, file, created };
        // Opening the directory makes a network file system ask the server whether names in it have changed. Without
        // that, it may open a removed file again that this process has open, and show an old manifest.
        if let Some(dir) = path.parent() {
            open_dir(dir)?;
        }
        let now = match file::open_read(at, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Attempt::Replaced);
            }
            now => now?,
        };
        let is_same = identity(now.metadata()?) == identity(lock.file.metadata()?);
        Ok(if is_same { Attempt::Locked(lock) } else { Attempt::Replaced })
    }
}

impl FileLock {
    /// Removes the file, if it still has this path, and releases the lock.
    pub(crate) fn remove(self, path: &Path) {
        let is_same =
            || io::Result::Ok(identity(dir::look_at(path)?) == identity(file::look(&self.file)?));
        if is_same().is_ok_and(|same| same)
            && let Err(error) = dir::try_remove(path)
        {
            tracing::debug!(%error, "cannot remove a lock file");
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Before the descriptor is closed.
        self.inherited = None;
        if let Err(error) = range_lock::set(&self.file, WHOLE, Lock::None) {
            tracing::debug!(%error, "cannot unlock; closing the file will");
        }
    }
}

#[cfg(test)]
mod tests;
