//! The seam between ringstow and the operating system. Every function of `sys` makes its system call through `made`;
//! the I/O thread calls `passed` before it gives a transfer or a sync to the engine. A test can count the calls, fail
//! one of them or end the process just before one.
//!
//! The seam exists in builds with debug assertions only. A release build has empty functions in its place.
//!
//! - [`on_thread`] and [`in_process`] watch one thread or the whole process.
//! - The environment variable `RINGSTOW_TEST_SEAM` does it in a child process, another program or Python: `kill:7`
//!   ends the process before its 7th call, `fail:7:5` fails that call with error number 5, and `fail-from:7:5` also
//!   fails all calls after it.

use crate::limits::INTERRUPTIONS_MAX;
use std::fs::File;
use std::io;
use std::path::Path;
#[cfg(debug_assertions)]
use std::path::PathBuf;

/// The kinds of system calls that the seam tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Looking at a path: stat, realpath.
    Look,
    /// Listing a directory.
    List,
    /// Opening a file that exists.
    Open,
    /// Creating a file.
    Create,
    /// Reading a small file.
    Read,
    /// Writing a small file.
    Write,
    /// An engine's read of a block, or of the rest of one.
    ReadBlock,
    /// An engine's write of a block, or of the rest of one.
    WriteBlock,
    /// Reserving blocks for a file.
    Allocate,
    /// Changing a file's length.
    Cut,
    /// Syncing a file or a directory.
    Sync,
    /// Not a call: the moment after a sync, before its caller gets the result. A failure here is a disk that has synced
    /// and reports an error.
    Synced,
    /// Renaming a file.
    Rename,
    /// Removing a file.
    Remove,
    /// Creating a directory.
    MakeDir,
    /// Removing a directory.
    RemoveDir,
    /// Locking a directory.
    Lock,
    /// Finding out whether another process has a file open.
    Lease,
    /// Reading what a file or file system is or has: free space, flags, attributes.
    Query,
    /// Reading or raising a limit of the process.
    Limit,
}

/// What a call is made on: a path or an open file.
pub(crate) trait Subject {
    #[cfg(debug_assertions)]
    fn path(&self) -> PathBuf;
}

impl Subject for Path {
    #[cfg(debug_assertions)]
    fn path(&self) -> PathBuf {
        self.into()
    }
}

impl Subject for File {
    #[cfg(debug_assertions)]
    fn path(&self) -> PathBuf {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", self.as_raw_fd());
        std::fs::read_link(&link).unwrap_or(link.into())
    }
}

/// Makes a system call: again if a signal interrupts it (EINTR).
///
/// # Errors
/// The system's, or the one that a test asks for.
#[inline]
pub(crate) fn made<T>(
    kind: Call,
    on: &(impl Subject + ?Sized),
    mut make: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    uninterrupted(|| match pass(kind, on)? {
        None => make(),
        Some(late) => make().and(Err(late)),
    })
}

/// Passes a call that the caller then makes, and makes again if a signal interrupts it.
///
/// # Errors
/// The one that a test asks for.
#[inline]
pub(crate) fn passed(kind: Call, on: &(impl Subject + ?Sized)) -> io::Result<()> {
    pass(kind, on)?.map_or(Ok(()), Err)
}

/// Returns the error of a call that is made and then fails.
#[inline]
fn pass(kind: Call, on: &(impl Subject + ?Sized)) -> io::Result<Option<io::Error>> {
    #[cfg(debug_assertions)]
    {
        armed::pass(kind, || on.path())
    }
    #[cfg(not(debug_assertions))]
    {
        let _ = (kind, on);
        Ok(None)
    }
}

/// File systems in user space and on the network let signals interrupt calls that local ones never do: rename, unlink,
/// stat.
fn uninterrupted<T>(mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 1..INTERRUPTIONS_MAX {
        match make() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            made => return made,
        }
    }
    make()
}

#[cfg(debug_assertions)]
pub use armed::{Outcome, Watch, fail_call, fail_nth, from_nth, in_process, nth, on_thread, watch};

#[cfg(debug_assertions)]
mod armed {
    use crate::sys::seam::{Call, Path, PathBuf, io};
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    /// What becomes of a call.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Outcome {
        /// The call is made.
        Pass,
        /// The call is not made, and fails with this error number.
        Fail(i32),
        /// The call is made, and fails all the same, as one does whose answer a network loses. A transfer or sync of the
        /// engines is not made.
        FailLate(i32),
        /// The process ends before the call.
        Kill,
    }

    /// Gets the number of the call, from 1 on, and what it does to which path.
    type Decide = dyn FnMut(u64, Call, &Path) -> Outcome + Send;

    struct Watcher {
        /// Since the last [`Watch::take`].
        seen: Vec<(Call, PathBuf)>,
        count: u64,
        decide: Box<Decide>,
    }

    type Shared = Arc<Mutex<Watcher>>;

    thread_local! {
        static THREAD: RefCell<Vec<Shared>> = const { RefCell::new(Vec::new()) };
    }

    static PROCESS: Mutex<Option<Shared>> = Mutex::new(None);
    /// Held by the one [`in_process`] that is in force.
    static ALONE: Mutex<()> = Mutex::new(());
    /// How many watches are in force in all; with none, a call costs one load.
    static IN_FORCE: AtomicUsize = AtomicUsize::new(0);

    /// Watches calls until it is dropped.
    #[must_use = "dropped, it watches nothing"]
    pub struct Watch {
        shared: Shared,
        alone: Option<MutexGuard<'static, ()>>,
    }

    impl Watch {
        /// All calls since the last time that this was called, in order.
        pub fn take(&self) -> Vec<(Call, PathBuf)> {
            std::mem::take(&mut lock(&self.shared).seen)
        }

        /// The paths of calls of one kind since the last [`Watch::take`], which this is as well.
        pub fn take_paths(&self, of: Call) -> Vec<PathBuf> {
            self.take().into_iter().filter(|(call, _)| *call == of).map(|(_, path)| path).collect()
        }
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            match self.alone {
                Some(_) => *lock(&PROCESS) = None,
                None => THREAD.with_borrow_mut(|all| {
                    all.retain(|watcher| !Arc::ptr_eq(watcher, &self.shared));
                }),
            }
            IN_FORCE.fetch_sub(1, SeqCst);
        }
    }

    /// Watches the calls of this thread. `decide` must not make any. Several watches may be in force: each sees
    /// every call that those before it let pass.
    pub fn on_thread(decide: impl FnMut(u64, Call, &Path) -> Outcome + Send + 'static) -> Watch {
        let shared = watcher(decide);
        THREAD.with_borrow_mut(|all| all.push(Arc::clone(&shared)));
        IN_FORCE.fetch_add(1, SeqCst);
        Watch { shared, alone: None }
    }

    /// Watches the calls of all threads. Waits until no other watch of the process is in force.
    pub fn in_process(decide: impl FnMut(u64, Call, &Path) -> Outcome + Send + 'static) -> Watch {
        let alone = Some(lock(&ALONE));
        let shared = watcher(decide);
        *lock(&PROCESS) = Some(Arc::clone(&shared));
        IN_FORCE.fetch_add(1, SeqCst);
        Watch { shared, alone }
    }

    /// Watches the calls of this thread and lets all of them pass.
    pub fn watch() -> Watch {
        on_thread(|_, _, _| Outcome::Pass)
    }

    /// Decides about the `n`th call alone; the first is number 1.
    pub fn nth(n: u64, outcome: Outcome) -> impl FnMut(u64, Call, &Path) -> Outcome + Send {
        move |number, _, _| if number == n { outcome } else { Outcome::Pass }
    }

    /// Decides about the `n`th call and all after it.
    pub fn from_nth(n: u64, outcome: Outcome) -> impl FnMut(u64, Call, &Path) -> Outcome + Send {
        move |number, _, _| if number >= n { outcome } else { Outcome::Pass }
    }

    /// Fails each call of one kind on this path, on this thread.
    pub fn fail_call(of: Call, path: &Path, errno: i32) -> Watch {
        let path = path.to_path_buf();
        on_thread(move |_, call, on| match call == of && on == path {
            true => Outcome::Fail(errno),
            false => Outcome::Pass,
        })
    }

    /// Fails the `n`th call of one kind on files below a directory, on any thread.
    pub fn fail_nth(n: u64, of: Call, below: &Path, errno: i32) -> Watch {
        let (below, mut seen) = (below.to_path_buf(), 0);
        in_process(move |_, call, on| {
            seen += u64::from(call == of && on.starts_with(&below));
            match call == of && on.starts_with(&below) && seen == n {
                true => Outcome::Fail(errno),
                false => Outcome::Pass,
            }
        })
    }

    /// Returns the error of a call that is made and then fails.
    pub fn pass(call: Call, path: impl FnOnce() -> PathBuf) -> io::Result<Option<io::Error>> {
        watch_for_environment();
        if IN_FORCE.load(SeqCst) == 0 {
            return Ok(None);
        }
        let path = path();
        // The thread's own are gone while it ends.
        let mut watchers = THREAD.try_with(|all| all.borrow().clone()).unwrap_or_default();
        watchers.extend(lock(&PROCESS).clone());
        for watcher in &watchers {
            let mut watcher = lock(watcher);
            watcher.seen.push((call, path.clone()));
            watcher.count += 1;
            let number = watcher.count;
            match (watcher.decide)(number, call, &path) {
                Outcome::Pass => {}
                Outcome::Fail(errno) => return Err(io::Error::from_raw_os_error(errno)),
                Outcome::FailLate(errno) => return Ok(Some(io::Error::from_raw_os_error(errno))),
                Outcome::Kill => std::process::abort(),
            }
        }
        Ok(None)
    }

    fn watcher(decide: impl FnMut(u64, Call, &Path) -> Outcome + Send + 'static) -> Shared {
        Arc::new(Mutex::new(Watcher { seen: Vec::new(), count: 0, decide: Box::new(decide) }))
    }

    /// A test that failed with the lock in hand is no reason for others to fail.
    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the environment until it asks for a watch: a forked child sets it when its parent has made calls.
    fn watch_for_environment() {
        static ASKED: AtomicBool = AtomicBool::new(false);
        if ASKED.load(SeqCst) {
            return;
        }
        let Ok(asked) = std::env::var("RINGSTOW_TEST_SEAM") else { return };
        if ASKED.swap(true, SeqCst) {
            return;
        }
        let words: Vec<&str> = asked.split(':').collect();
        let number = |at: usize| -> Option<u64> { words.get(at)?.parse().ok() };
        let errno = || number(2).and_then(|errno| i32::try_from(errno).ok());
        let watch = match (words[0], number(1), errno()) {
            ("kill", Some(n), None) => in_process(nth(n, Outcome::Kill)),
            ("fail", Some(n), Some(errno)) => in_process(nth(n, Outcome::Fail(errno))),
            ("fail-from", Some(n), Some(errno)) => in_process(from_nth(n, Outcome::Fail(errno))),
            _ => {
                panic!("RINGSTOW_TEST_SEAM is {asked:?}: kill:N, fail:N:ERRNO or fail-from:N:ERRNO")
            }
        };
        std::mem::forget(watch); // in force until the process ends
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::dir;
    use crate::sys::seam::*;
    use nix::libc::{EINTR, EIO};

    #[test]
    fn thread_watch_sees_the_calls_of_its_thread_in_order() {
        let root = tempfile::tempdir().unwrap();
        let (path, other) = (root.path().join("a"), root.path().join("b"));
        let watch = watch();
        assert!(dir::make(&path).unwrap());
        std::thread::scope(|scope| scope.spawn(|| dir::make(&other)).join().unwrap()).unwrap();
        dir::sync(&path).unwrap();
        assert!(dir::remove_if_empty(&path).unwrap());
        let all = [Call::MakeDir, Call::Sync, Call::Synced, Call::RemoveDir]
            .map(|call| (call, path.clone()));
        assert_eq!(watch.take(), all);
        assert!(watch.take().is_empty());
    }

    #[test]
    fn nth_call_fails_alone_or_with_all_after_it() {
        let root = tempfile::tempdir().unwrap();
        let failed = || [1, 2, 3].map(|_| dir::look(root.path()).is_err());
        let watch = on_thread(nth(2, Outcome::Fail(EIO)));
        assert_eq!(failed(), [false, true, false]);
        drop(watch);
        let watch = on_thread(from_nth(2, Outcome::Fail(EIO)));
        assert_eq!(failed(), [false, true, true]);
        assert_eq!(dir::look(root.path()).unwrap_err().raw_os_error(), Some(EIO));
        drop(watch);
        assert_eq!(failed(), [false; 3]);
    }

    #[test]
    fn call_that_signals_interrupt_is_made_again_but_not_forever() {
        let root = tempfile::tempdir().unwrap();
        let watch = on_thread(|number, _, _| match number {
            1..=3 => Outcome::Fail(EINTR),
            _ => Outcome::Pass,
        });
        assert!(dir::make(&root.path().join("a")).unwrap());
        assert_eq!(watch.take().len(), 4);
        drop(watch);
        let _always = on_thread(|_, _, _| Outcome::Fail(EINTR));
        let error = dir::make(&root.path().join("b")).unwrap_err();
        assert_eq!(error.io_error().and_then(io::Error::raw_os_error), Some(EINTR));
    }

    #[test]
    fn late_failure_is_reported_although_the_call_was_made() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a");
        let _late = on_thread(nth(1, Outcome::FailLate(EIO)));
        assert!(dir::make(&path).is_err());
        assert!(path.is_dir());
    }

    #[test]
    fn failed_call_is_not_made() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let _failing = fail_call(Call::Remove, &file, EIO);
        let error = dir::remove(&file).unwrap_err();
        assert!(error.to_string().contains("file") && file.exists(), "{error}");
    }

    #[test]
    fn process_watch_sees_the_calls_of_all_threads_with_the_paths_of_open_files() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let path = root.join("file");
        let watch = in_process(|_, _, _| Outcome::Pass);
        let write = || crate::sys::file::write_durably(&path, |_| Ok(()));
        std::thread::scope(|scope| scope.spawn(write).join().unwrap()).unwrap();
        // Other tests run meanwhile.
        let here = watch.take().into_iter().filter(|(_, on)| *on == path);
        let calls: Vec<Call> = here.map(|(call, _)| call).collect();
        assert_eq!(calls, [Call::Create, Call::Write, Call::Sync, Call::Synced]);
    }
}
