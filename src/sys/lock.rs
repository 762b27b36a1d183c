//! One saver per directory at a time, on all hosts where the file system can tell them of each other.

use crate::error::{Error, Result};
use crate::sys::file_system::{FileSystem, Reach};
use crate::sys::inherited::Inherited;
use crate::sys::seam::{Call, call, call_on};
use crate::sys::{dir, file};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The file that is locked besides its directory where hosts share the file system. It stays as long as the directory.
pub(crate) const FILE: &str = ".ringstow-lock";

/// An exclusive lock on a directory, held until dropped or until the process ends.
///
/// It is a lock (flock) on the directory itself, so it leaves no file behind, however the process ends. That lock never
/// reaches other hosts. On a file system that they share, a lock on [`FILE`] is held as well, whatever its reach: another
/// host may have mounted the same files so that it does reach. A file that is there already is locked on any file
/// system: this host may be the server.
#[derive(Debug)]
pub(crate) struct DirLock {
    dir: PathBuf,
    file: Option<FileLock>,
    own: Option<Held>,
    reach: Reach,
    shared: bool,
    why: String,
}

/// Unlocks when it is dropped. Closing alone would not, while a forked child has the descriptor.
#[derive(Debug)]
struct Held {
    _inherited: Inherited,
    _lock: Flock<File>,
}

/// The lock on [`FILE`].
#[derive(Debug)]
struct FileLock {
    inherited: Option<Inherited>,
    file: File,
    /// Whether this lock created the file.
    created: bool,
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
        Self::taken(dir, true)
    }

    /// [`DirLock::take`] for a process that will change nothing: it does not create [`FILE`].
    ///
    /// # Errors
    /// As for [`DirLock::take`].
    pub fn take_to_look(dir: &Path) -> Result<Self> {
        Self::taken(dir, false)
    }

    fn taken(dir: &Path, creates: bool) -> Result<Self> {
        /// How many times others may replace what is locked.
        const TRIES_MAX: usize = 1000;
        for _ in 0..TRIES_MAX {
            let file = File::open(dir).map_err(|e| Error::io("opening", dir, e))?;
            if let Some(lock) = Self::of(file, dir, creates)? {
                return Ok(lock);
            }
        }
        Err(Error::Busy { path: dir.into() })
    }

    /// Locks a directory that was opened by this path. `None` if another directory has the path by now: a
    /// clean-up has removed the opened one, and another process may hold the lock of the new one.
    fn of(opened: File, dir: &Path, creates: bool) -> Result<Option<Self>> {
        let io = |e| Error::io("opening", dir, e);
        let system = FileSystem::of_open(&opened).map_err(io)?;
        let (mut reach, mut why) = (system.locks, system.why());
        let shared = system.is_shared();
        let identity = identity(file::look(&opened).map_err(io)?);
        let (dir_path, failed) = (dir.to_path_buf(), |errno: io::Error| {
            format!("the lock failed on {}: {errno}", system.name)
        });
        let own = match flock(opened) {
            Ok(own) => Some(own),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Error::Busy { path: dir_path });
            }
            Err(error) => {
                if !shared {
                    (reach, why) = (Reach::ThisHost, failed(error));
                }
                None
            }
        };
        let file = match FileLock::take(&dir.join(FILE), shared && creates) {
            Ok(Attempt::Locked(file)) => Some(file),
            Ok(Attempt::Absent) => None,
            Ok(Attempt::Replaced) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Error::Busy { path: dir_path });
            }
            // The directory is gone.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(io(error)),
            // Another host has just removed the file, or the directory too.
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => {
                return Ok(None);
            }
            Err(error) if cannot_lock(&error) => {
                if reach == Reach::EveryHost {
                    (reach, why) = (Reach::ThisHost, failed(error));
                }
                None
            }
            // The lock works for other hosts, and they rely on it: a save without it is not safe for anybody.
            Err(error) => return Err(Error::io("locking", dir.join(FILE), error)),
        };
        if identity != self::identity(dir::look(dir).map_err(io)?) {
            return Ok(None);
        }
        let lock = Self { dir: dir_path, file, own, reach, shared, why };
        lock.warn();
        Ok(Some(lock))
    }

    /// Whom the lock keeps out.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Whether another process may write here in spite of the lock: on another host, whose view may also be late, or on
    /// this one if the directory cannot be locked.
    pub fn is_shared(&self) -> bool {
        self.shared || self.own.is_none()
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
            if !is_empty(&self.dir) {
                return Ok(false);
            }
            // NFS keeps a removed file under another name while it is open.
            dir::remove(&self.dir.join(FILE))?;
            drop(file);
        }
        dir::remove_if_empty(&self.dir)
    }

    /// Releases the lock of a directory that turned out not to hold a checkpoint, and leaves no [`FILE`] there.
    pub fn withdraw(self) {
        if self.file.as_ref().is_some_and(|file| file.created)
            && let Err(error) = dir::remove(&self.dir.join(FILE))
        {
            tracing::debug!(%error, "cannot remove a lock file");
        }
    }

    fn warn(&self) {
        static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        // In a forked child, nobody may ever release it.
        if self.reach == Reach::ThisHost
            && let Ok(mut warned) = WARNED.try_lock()
            && warned.insert(self.why.clone())
        {
            tracing::warn!(dir = %self.dir.display(), why = self.why, "the lock does not keep out every other process that may save here: a save removes only its own files and those of the checkpoint that it replaces; `ringstow prune --no-other-writers` removes what killed saves left");
        }
    }
}

/// Removes a directory that holds nothing (but [`FILE`]); says whether it did. Takes its lock: another save may be about
/// to write into it.
///
/// # Errors
/// [`Error::Io`] if it is empty and the system refuses.
pub(crate) fn remove_if_empty(dir: &Path) -> Result<bool> {
    // Locking may create the file.
    if !is_empty(dir) {
        return Ok(false);
    }
    match DirLock::take(dir) {
        Err(Error::Busy { .. }) => Ok(false),
        Err(error) if error.is_not_found() => Ok(false),
        lock => lock?.remove_dir(),
    }
}

/// Whether a directory holds nothing (but [`FILE`]).
pub(crate) fn is_empty(dir: &Path) -> bool {
    dir::entries(dir).is_ok_and(|all| all.iter().all(is_lock))
}

fn is_lock(entry: &std::fs::DirEntry) -> bool {
    entry.file_name() == FILE
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
    let is = |number| unlocked.iter().any(|errno| *errno as i32 == number);
    error.raw_os_error().is_none_or(is)
}

fn flock(opened: File) -> io::Result<Held> {
    call_on(Call::Lock, &opened)?;
    match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Held { _inherited: Inherited::note(&*lock), _lock: lock }),
        Err((_, errno)) => Err(errno.into()),
    }
}

impl FileLock {
    /// Locks the file at `path`. Creates it if it is missing and `creates` is set.
    fn take(path: &Path, creates: bool) -> io::Result<Attempt> {
        let opened = match file::open_lock(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && creates => {
                file::create_lock(path).map(|file| (file, true))
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
        if let Err(error) = call(Call::Lock, path).and_then(|()| set(&file, nix::libc::F_WRLCK)) {
            if created && error.kind() != io::ErrorKind::WouldBlock {
                // Nobody can lock it.
                dir::try_remove(path)?;
            }
            return Err(error);
        }
        let inherited = Some(Inherited::note(&file));
        let lock = Self { inherited, file, created };
        // Opening the directory makes a network file system ask the server whether names in it have changed. Without
        // that, it may open a removed file again that this process has open, and show an old manifest.
        if let Some(dir) = path.parent() {
            call(Call::Open, dir)?;
            File::open(dir)?;
        }
        let now = match file::open_read(path, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Attempt::Replaced);
            }
            now => now?,
        };
        let is_same = identity(now.metadata()?) == identity(lock.file.metadata()?);
        Ok(if is_same { Attempt::Locked(lock) } else { Attempt::Replaced })
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Before the descriptor is closed.
        self.inherited = None;
        if let Err(error) = set(&self.file, nix::libc::F_UNLCK) {
            tracing::debug!(%error, "cannot unlock; closing the file will");
        }
    }
}

/// Sets a lock on a whole file. It belongs to this descriptor: other threads' descriptors are kept out, too.
///
/// # Errors
/// The system's; [`io::ErrorKind::WouldBlock`] if another has the lock.
#[cfg(target_os = "linux")]
fn set(file: &File, kind: i32) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    let range = nix::libc::flock {
        l_type: kind as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    loop {
        return match fcntl(file, FcntlArg::F_OFD_SETLK(&range)) {
            Ok(_) => Ok(()),
            // The server was asked, and a signal came before its answer.
            Err(Errno::EINTR) => continue,
            Err(Errno::EAGAIN | Errno::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Off Linux, no file system is known to pass locks on.
#[cfg(not(target_os = "linux"))]
fn set(_: &File, _: i32) -> io::Result<()> {
    Err(Errno::ENOSYS.into())
}

#[cfg(test)]
mod tests {
    use crate::sys::lock::*;
    use std::fs;

    #[test]
    fn directory_that_was_removed_and_recreated_has_one_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step");
        fs::create_dir(&dir).unwrap();
        // Opened, and removed by somebody else before it is locked.
        let opened = File::open(&dir).unwrap();
        fs::remove_dir(&dir).unwrap();
        let again = opened.try_clone().unwrap();
        let error = DirLock::of(opened, &dir, true).unwrap_err();
        assert!(error.is_not_found(), "{error}");
        fs::create_dir(&dir).unwrap();
        let held = DirLock::take(&dir).unwrap();
        assert_eq!((held.reach(), held.is_shared()), (Reach::EveryHost, false));
        assert!(DirLock::of(again, &dir, true).unwrap().is_none());
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
        drop(held);
        assert!(lock_file(&dir).is_none());
    }

    fn lock_file(dir: &Path) -> Option<Metadata> {
        dir.join(FILE).metadata().ok()
    }

    /// Other hosts do not see this one's locks on directories.
    #[cfg(all(debug_assertions, target_os = "linux"))]
    mod other_hosts {
        use super::*;
        use crate::sys::file_system::play;
        use crate::sys::seam::{Outcome, Watch, fail_call, on_thread};

        const ENOLCK: i32 = 37;

        fn no_flock(dir: &Path) -> Watch {
            fail_call(Call::Lock, dir, ENOLCK)
        }

        #[test]
        fn lock_file_keeps_out_hosts_that_do_not_see_the_lock_on_the_directory() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let _nfs = play(&dir, "nfs4", "local_lock=none");
            let _hosts = no_flock(&dir);
            let held = DirLock::take(&dir).unwrap();
            assert_eq!((held.reach(), held.is_shared()), (Reach::EveryHost, true));
            assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
            drop(held);
            assert!(DirLock::take(&dir).is_ok());
            assert_eq!(lock_file(&dir).unwrap().len(), 0);
        }

        #[test]
        fn server_of_a_directory_locks_the_file_that_its_clients_lock() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let client = {
                let _nfs = play(&dir, "nfs4", "");
                let _hosts = no_flock(&dir);
                DirLock::take(&dir).unwrap()
            };
            // The server itself sees a local disk, and not the client's lock on the directory.
            assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
            drop(client);
            let server = DirLock::take(&dir).unwrap();
            assert_eq!((server.reach(), server.is_shared()), (Reach::EveryHost, false));
            // A directory that was copied from there goes with its lock file.
            assert!(server.remove_dir().unwrap() && !dir.exists());
        }

        #[test]
        fn host_without_reach_is_kept_out_by_hosts_that_lock() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let _hosts = no_flock(&dir);
            let fuse = play(&dir, "fuse.ceph", "");
            let held = DirLock::take(&dir).unwrap();
            assert_eq!(held.reach(), Reach::ThisHost);
            drop(fuse);
            let _kernel = play(&dir, "ceph", "");
            assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
        }

        #[test]
        fn look_and_withdrawn_lock_leave_no_file() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let _nfs = play(&dir, "nfs4", "");
            drop(DirLock::take_to_look(&dir).unwrap());
            assert!(lock_file(&dir).is_none());
            DirLock::take(&dir).unwrap().withdraw();
            assert!(lock_file(&dir).is_none());
            drop(DirLock::take(&dir).unwrap());
            assert!(matches!(
                (DirLock::take(&dir), DirLock::take_to_look(&dir)),
                (Ok(_), Err(Error::Busy { .. }))
            ));
            DirLock::take(&dir).unwrap().withdraw();
            assert!(lock_file(&dir).is_some(), "an earlier save created it");
        }

        #[test]
        fn who_may_write_to_the_directory_may_lock_its_file() {
            use std::os::unix::fs::PermissionsExt;
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let _nfs = play(&dir, "nfs4", "");
            for (mode, expected) in [(0o1777, 0o666), (0o775, 0o664), (0o700, 0o600)] {
                fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
                drop(DirLock::take(&dir).unwrap());
                assert_eq!(lock_file(&dir).unwrap().permissions().mode() & 0o777, expected);
                fs::remove_file(dir.join(FILE)).unwrap();
            }
        }

        #[test]
        fn lock_file_goes_with_its_directory() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap().join("step");
            fs::create_dir(&dir).unwrap();
            let _nfs = play(&dir, "nfs4", "");
            let held = DirLock::take(&dir).unwrap();
            fs::write(dir.join("notes.txt"), "").unwrap();
            assert!(!held.remove_dir().unwrap() && lock_file(&dir).is_some());
            assert!(!remove_if_empty(&dir).unwrap());
            fs::remove_file(dir.join("notes.txt")).unwrap();
            assert!(remove_if_empty(&dir).unwrap() && !dir.exists());
        }

        #[test]
        fn lock_file_that_was_removed_and_recreated_has_one_lock() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let path = dir.join(FILE);
            let _nfs = play(&dir, "nfs4", "");
            let _hosts = no_flock(&dir);
            // Another host replaces the file after it was opened and before it is locked.
            let mut replace = Some(path.clone());
            let watch = on_thread(move |_, call, on| {
                if call == Call::Lock && replace.as_deref() == Some(on) {
                    let path = replace.take().unwrap();
                    fs::remove_file(&path).unwrap();
                    fs::write(&path, "").unwrap();
                }
                Outcome::Pass
            });
            let held = DirLock::take(&dir).unwrap();
            assert_eq!(watch.take_paths(Call::Lock), [path.clone(), path]);
            let now = lock_file(&dir).unwrap();
            let file = &held.file.as_ref().unwrap().file;
            assert_eq!(identity(now), identity(file.metadata().unwrap()));
        }

        #[test]
        fn locks_that_fail_or_stay_on_this_host_have_no_reach() {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let without = no_flock(&dir);
            let lock = DirLock::take(&dir).unwrap();
            assert_eq!((lock.reach(), lock.is_shared()), (Reach::ThisHost, true));
            assert!(lock.why().contains("the lock failed"), "{}", lock.why());
            drop((lock, without));
            let nolock = play(&dir, "nfs4", "nolock");
            let lock = DirLock::take(&dir).unwrap();
            assert_eq!(lock.reach(), Reach::ThisHost);
            assert!(lock.why().contains("`nolock`"), "{}", lock.why());
            // This host's processes still keep each other out.
            assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
            drop((lock, nolock));
            let _nfs = play(&dir, "nfs4", "");
            let _failing = fail_call(Call::Lock, &dir.join(FILE), ENOLCK);
            let lock = DirLock::take(&dir).unwrap();
            assert_eq!(lock.reach(), Reach::ThisHost);
            assert!(lock.why().contains("the lock failed on nfs4"), "{}", lock.why());
        }

        #[test]
        fn lock_that_fails_where_other_hosts_rely_on_it_is_an_error() {
            const EMFILE: i32 = 24;
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let _nfs = play(&dir, "nfs4", "");
            let failing = fail_call(Call::Create, &dir.join(FILE), EMFILE);
            let error = DirLock::take(&dir).unwrap_err();
            assert!(error.to_string().contains(FILE), "{error}");
            drop(failing);
            assert_eq!(DirLock::take(&dir).unwrap().reach(), Reach::EveryHost);
        }

        #[test]
        fn lock_file_that_another_host_has_just_removed_is_made_again() {
            const ESTALE: i32 = 116;
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().canonicalize().unwrap();
            let path = dir.join(FILE);
            let _nfs = play(&dir, "nfs4", "");
            let mut stale = Some(path);
            let _watch = on_thread(move |_, call, on| {
                match call == Call::Lock && stale.take_if(|path| path == on).is_some() {
                    true => Outcome::Fail(ESTALE),
                    false => Outcome::Pass,
                }
            });
            assert_eq!(DirLock::take(&dir).unwrap().reach(), Reach::EveryHost);
        }
    }
}
