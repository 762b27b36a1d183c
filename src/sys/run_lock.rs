//! One manager that saves into a run's directory: what it holds, and who holds it.

use crate::error::{Error, Result};
use crate::sys::chance::now_unix_ms;
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::lock::{FileLock, Hold, hold_new};
use crate::sys::{dir, file};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The file in the run's directory that is locked. It is removed when the lock is released; what a kill leaves of it
/// means nothing, since nobody has it locked.
const FILE: &str = ".ringstow-manager";
/// How long the end of another process is waited for: a job is started again while the one before is being killed.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// The runs that managers of this process hold.
static HELD: PerProcess<BTreeSet<PathBuf>> =
    PerProcess::new([const { Mutex::new(BTreeSet::new()) }; GENERATIONS]);

/// A lock on a run's directory, until it is dropped or the process ends. Loads, and saves without a manager,
/// need none.
#[derive(Debug)]
pub struct RunLock {
    root: PathBuf,
    /// `None` if the file system has no locks: the locks of the checkpoints keep two saves apart.
    file: Option<FileLock>,
    process: u32,
    made_root: bool,
}

/// What the holder writes into the file, for messages.
#[derive(Serialize, Deserialize)]
struct Holder {
    host: String,
    process: u32,
    since_unix_ms: u64,
}

impl RunLock {
    /// Whether this process holds the lock of a run's directory.
    pub fn is_own(root: &Path) -> bool {
        let is_held = |root| HELD.lock().is_some_and(|held| held.contains(&root));
        dir::real(root).is_ok_and(is_held)
    }

    /// Takes the lock of a run's directory, and makes the directory if it is missing. Waits a few seconds for another
    /// process to end.
    ///
    /// # Errors
    /// [`Error::RunBusy`] if another manager holds it; [`Error::Io`].
    pub fn take(root: &Path) -> Result<Self> {
        let made_root = !dir::has(root);
        dir::make_all(root)?;
        let root = dir::real(root)?;
        if Self::is_own(&root) {
            let holder = "another manager of this process, which has saved there: close it, or save by that one".into();
            return Err(Error::RunBusy { path: root, holder });
        }
        let path = root.join(FILE);
        let until = Instant::now() + PATIENCE;
        let mut has_told = false;
        let file = loop {
            match hold_new(&path).map_err(|error| Error::io("locking", &path, error))? {
                Hold::Held(file) => break Some(file),
                Hold::Busy if Instant::now() < until => {
                    if !has_told {
                        has_told = true;
                        tracing::warn!(
                            "waiting up to {} s for {}, which saves into {}, to end",
                            PATIENCE.as_secs(),
                            holder(&path),
                            root.display()
                        );
                    }
                    std::thread::sleep(POLL);
                }
                Hold::Busy => return Err(Error::RunBusy { holder: holder(&path), path: root }),
                Hold::Gone | Hold::Impossible => {
                    tracing::debug!(path = %path.display(), "cannot be locked: nothing keeps out a second manager");
                    break None;
                }
            }
        };
        let process = std::process::id();
        if let Some(lock) = &file {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let holder = Holder { host, process, since_unix_ms: now_unix_ms() };
            // For messages alone.
            if let Err(error) = lock.write(&path, &serde_json::json!(holder).to_string()) {
                tracing::debug!(%error, "cannot note who holds the run");
            }
        }
        if let Some(mut held) = HELD.lock() {
            held.insert(root.clone());
        }
        Ok(Self { root, file, process, made_root })
    }
}

impl Drop for RunLock {
    /// Does nothing in a forked child, which has let go of the file, and whose parent may still hold the lock.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.file.take());
            return;
        }
        if let Some(mut held) = HELD.lock() {
            held.remove(&self.root);
        }
        if let Some(lock) = self.file.take() {
            lock.remove(&self.root.join(FILE));
        }
        // Nothing was saved.
        if self.made_root
            && let Err(error) = dir::remove_if_empty(&self.root)
        {
            tracing::debug!(%error, "cannot remove an empty directory");
        }
    }
}

/// Describes who holds the lock of a file.
fn holder(path: &Path) -> String {
    let bytes = file::read_start(path, 4096).unwrap_or_default();
    let Ok(Holder { host, process, since_unix_ms }) = serde_json::from_slice(&bytes) else {
        return "another process".into();
    };
    let seconds = now_unix_ms().saturating_sub(since_unix_ms) / 1000;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("process {process} on {host}, since {hours} h {minutes} min {} s", seconds % 60)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn second_manager_of_a_run_is_refused_until_the_first_lets_go_and_nothing_stays() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        let lock = RunLock::take(&run).unwrap();
        let refused = RunLock::take(&run).unwrap_err().to_string();
        assert!(refused.contains("another manager of this process"), "{refused}");
        drop(lock);
        assert!(!dir::has(&run), "nothing was saved");
        drop(RunLock::take(&run).unwrap());
    }

    #[test]
    fn what_a_kill_left_of_the_file_keeps_nobody_out() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(FILE), "rubbish").unwrap();
        drop(RunLock::take(root.path()).unwrap());
        assert!(dir::file_names(root.path()).unwrap().is_empty());
    }

    #[test]
    fn file_that_another_holder_has_made_anew_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let lock = RunLock::take(root.path()).unwrap();
        let path = root.path().join(FILE);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(lock);
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
    }
}
