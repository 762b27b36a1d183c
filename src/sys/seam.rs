//! The seam between ringstow and the operating system. Every function of `sys` makes its system call through `made`;
//! the I/O thread calls `passed` before it gives a transfer or a sync to the engine. A test can count the calls, fail
//! one of them or end the process just before one.
//!
//! The seam exists in builds with debug assertions, and in unit tests. A release build has empty functions in its place.
//!
//! - [`on_thread`] and [`in_process`] watch one thread or the whole process.
//! - The environment variable `RINGSTOW_TEST_SEAM` does it in a child process, another program or Python: `kill:7`
//!   ends the process before its 7th call, `fail:7:5` fails that call with error number 5, and `fail-from:7:5` also
//!   fails all calls after it.

use crate::limits::INTERRUPTIONS_MAX;
use std::fs::File;
use std::io;
use std::path::Path;
#[cfg(any(debug_assertions, test))]
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
    /// Asking what of a block the page cache holds, and reading it from there.
    PageCache,
    /// An engine's write of a block, or of the rest of one.
    WriteBlock,
    /// Mapping a file into memory.
    Map,
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
    /// Giving a file a second name.
    Link,
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
    /// Setting an extended attribute.
    Attribute,
    /// Reading what a file or file system is or has: free space, flags, attributes.
    Query,
    /// Reading or raising a limit of the process.
    Limit,
}

/// What a call is made on: a path or an open file.
pub(crate) trait Subject {
    #[cfg(any(debug_assertions, test))]
    fn path(&self) -> PathBuf;
}

impl Subject for Path {
    #[cfg(any(debug_assertions, test))]
    fn path(&self) -> PathBuf {
        self.into()
    }
}

impl Subject for File {
    #[cfg(any(debug_assertions, test))]
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
    #[cfg(any(debug_assertions, test))]
    {
        armed::pass(kind, || on.path())
    }
    #[cfg(not(any(debug_assertions, test)))]
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

#[cfg(any(debug_assertions, test))]
pub use armed::{
    Outcome, Watch, fail_call, fail_if, fail_nth, from_nth, in_process, nth, on_thread, watch,
};

#[cfg(any(debug_assertions, test))]
mod armed;

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
