//! One manager that saves into a run's directory: what it holds, and who holds it.

mod heartbeat;

pub use heartbeat::Pace;

use crate::error::{Error, Result};
use crate::sys::dir;
use crate::sys::file_system::{FileSystem, Reach};
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::lock::{FileLock, Hold, hold_new};
use heartbeat::{Heartbeat, Note, Sign, Watch, kernel};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The file in the run's directory that is locked, with a note of who has locked it. It is removed when the lock is released.
/// What a kill leaves of it means nothing where locks reach everybody, and soon nothing elsewhere: see [`heartbeat`].
const FILE: &str = ".ringstow-manager";
/// How long the end of another process of this host is waited for: a job is started again while the one before is being
/// killed.
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
    /// Where other hosts may use the file system.
    heartbeat: Option<Heartbeat>,
    process: u32,
    made_root: bool,
}

impl RunLock {
    /// Whether this process holds the lock of a run's directory.
    pub fn is_own(root: &Path) -> bool {
        let is_held = |root| HELD.lock().is_some_and(|held| held.contains(&root));
        dir::real(root).is_ok_and(is_held)
    }

    /// Takes the lock of a run's directory, and makes the directory if it is missing. Waits a few seconds for another
    /// process to end; where the note of another host's manager is left, a minute for a sign of life. Calls `waits`
    /// meanwhile, again and again; its error ends the wait.
    ///
    /// # Errors
    /// [`Error::RunBusy`] if another manager holds it; [`Error::Io`]; what `waits` returns.
    pub fn take(root: &Path, waits: impl FnMut() -> Result<()>) -> Result<Self> {
        Self::take_at(root, Pace::default(), waits)
    }

    /// [`RunLock::take`] with other times.
    ///
    /// # Errors
    /// As for [`RunLock::take`].
    pub fn take_at(root: &Path, pace: Pace, waits: impl FnMut() -> Result<()>) -> Result<Self> {
        let made_root = !dir::has(root);
        dir::make_all(root)?;
        let root = dir::real(root)?;
        if Self::is_own(&root) {
            let holder = "another manager of this process, which has saved there: close it, or save by that one".into();
            return Err(Error::RunBusy { path: root, holder });
        }
        let system = FileSystem::of(&root).map_err(|error| Error::io("opening", &root, error))?;
        let path = root.join(FILE);
        let wanted = Wanted { root: &root, path: &path, kernel: kernel(&root), pace, system };
        let file = wanted.wait_free(waits)?;
        let note = Note::own(wanted.kernel);
        let heartbeat = match wanted.system.is_shared() {
            true => Some(Heartbeat::start(&path, note, &pace)?),
            false => {
                // For messages alone.
                if file.is_some()
                    && let Err(error) = note.write(&path)
                {
                    tracing::debug!(%error, "cannot note who holds the run");
                }
                None
            }
        };
        if let Some(mut held) = HELD.lock() {
            held.insert(root.clone());
        }
        Ok(Self { root, file, heartbeat, process: std::process::id(), made_root })
    }

    /// Checks that the run is still held: a manager of another host takes it over if this process gives no sign of life
    /// for a minute.
    ///
    /// # Errors
    /// [`Error::RunBusy`].
    pub fn check(&self) -> Result<()> {
        match &self.heartbeat {
            Some(heartbeat) if self.process == std::process::id() => heartbeat.check(&self.root),
            _ => Ok(()),
        }
    }
}

impl Drop for RunLock {
    /// Does nothing in a forked child, which has let go of the file, and whose parent may still hold the lock.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget((self.file.take(), self.heartbeat.take()));
            return;
        }
        if let Some(mut held) = HELD.lock() {
            held.remove(&self.root);
        }
        let path = self.root.join(FILE);
        let note_is_own = self.heartbeat.take().map(Heartbeat::end);
        match (self.file.take(), note_is_own) {
            (Some(lock), None | Some(true)) => lock.remove(&path),
            (None, Some(true)) => drop(dir::try_remove(&path)),
            _ => {} // there is none, or it is another's
        }
        // Nothing was saved.
        if self.made_root
            && let Err(error) = dir::remove_if_empty(&self.root)
        {
            tracing::debug!(%error, "cannot remove an empty directory");
        }
    }
}

/// A run whose lock a manager wants.
struct Wanted<'a> {
    root: &'a Path,
    path: &'a Path,
    kernel: String,
    pace: Pace,
    system: FileSystem,
}

/// Whether a manager may have the run.
enum Verdict {
    Free,
    Taken,
    /// The server keeps the lock of a host that is gone: a new file takes the place of that one.
    Abandoned,
    /// It will turn out; how long that may take.
    Open(Duration),
}

impl Wanted<'_> {
    /// Waits until the run is free. Returns its lock; `None` if the file system has no locks.
    fn wait_free(&self, mut waits: impl FnMut() -> Result<()>) -> Result<Option<FileLock>> {
        let (began, mut watch, mut has_told) = (Instant::now(), Watch::default(), false);
        loop {
            let hold =
                hold_new(self.path).map_err(|error| Error::io("locking", self.path, error))?;
            let note = Note::read(self.path);
            let verdict = match &note {
                Some(note) if self.is_others(note, &hold) => {
                    let now = Instant::now();
                    let sign = watch.see(note, now, &self.pace);
                    self.by_sign(sign, &hold, now - began)
                }
                _ => by_lock(&hold, began.elapsed()),
            };
            let holder = || note.map_or_else(|| "another process".into(), |note| note.to_string());
            match verdict {
                Verdict::Free => return Ok(self.lock_of(hold)),
                Verdict::Taken => {
                    return Err(Error::RunBusy { holder: holder(), path: self.root.into() });
                }
                Verdict::Abandoned => {
                    tracing::warn!(
                        "{} has given no sign of life for {} s: {} is taken over",
                        holder(),
                        self.pace.lease.as_secs(),
                        self.root.display()
                    );
                    dir::remove(self.path)?;
                    watch = Watch::default();
                }
                Verdict::Open(at_most) if !has_told => {
                    has_told = true;
                    tracing::warn!(
                        "waiting up to {} s for {}, which saves into {}, to end",
                        at_most.as_secs(),
                        holder(),
                        self.root.display()
                    );
                }
                Verdict::Open(_) => {}
            }
            drop(hold);
            waits()?;
            std::thread::sleep(POLL);
        }
    }

    /// Whether the lock says nothing of the note's writer, or the writer may be on a host that is gone.
    fn is_others(&self, note: &Note, hold: &Hold) -> bool {
        let is_decided = match hold {
            Hold::Held(_) => self.system.locks == Reach::EveryHost || note.is_of(&self.kernel),
            Hold::Busy => note.is_of(&self.kernel),
            Hold::Gone | Hold::Impossible => false,
        };
        self.system.is_shared() && !is_decided
    }

    fn by_sign(&self, sign: Sign, hold: &Hold, waited: Duration) -> Verdict {
        match (sign, hold) {
            (Sign::Alive, _) => Verdict::Taken,
            (Sign::Silent, Hold::Busy) if waited >= self.pace.lease => Verdict::Abandoned,
            (Sign::Silent, Hold::Busy) => Verdict::Open(self.pace.lease),
            (Sign::Silent, _) => Verdict::Free,
            (Sign::Unknown, _) => Verdict::Open(self.pace.silence),
        }
    }

    fn lock_of(&self, hold: Hold) -> Option<FileLock> {
        match hold {
            Hold::Held(lock) => Some(lock),
            _ => {
                tracing::debug!(path = %self.path.display(), "cannot be locked: nothing keeps out a second manager");
                None
            }
        }
    }
}

fn by_lock(hold: &Hold, waited: Duration) -> Verdict {
    match hold {
        Hold::Busy if waited < PATIENCE => Verdict::Open(PATIENCE),
        Hold::Busy => Verdict::Taken,
        Hold::Held(_) | Hold::Gone | Hold::Impossible => Verdict::Free,
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::sys::file;
    use crate::sys::file_system::play;

    fn take(root: &Path) -> Result<RunLock> {
        RunLock::take(root, || Ok(()))
    }

    #[test]
    fn second_manager_of_a_run_is_refused_until_the_first_lets_go_and_nothing_stays() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        let lock = take(&run).unwrap();
        let refused = take(&run).unwrap_err().to_string();
        assert!(refused.contains("another manager of this process"), "{refused}");
        drop(lock);
        assert!(!dir::has(&run), "nothing was saved");
        drop(take(&run).unwrap());
    }

    #[test]
    fn what_a_kill_left_of_the_file_keeps_nobody_out() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(FILE), "rubbish").unwrap();
        drop(take(root.path()).unwrap());
        assert!(dir::file_names(root.path()).unwrap().is_empty());
    }

    #[test]
    fn file_that_another_holder_has_made_anew_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let lock = take(root.path()).unwrap();
        let path = root.path().join(FILE);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(lock);
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
    }

    /// Nothing beats but what the test says; a sign of life is waited for without end, or not at all.
    const NEVER: Pace = Pace { beat: HOUR, silence: HOUR, lease: HOUR };
    const AT_ONCE: Pace = Pace { silence: Duration::ZERO, lease: Duration::ZERO, ..NEVER };
    const HOUR: Duration = Duration::from_secs(3600);

    /// A note of another host's manager.
    fn others(root: &Path) -> Note {
        let note = Note { host: "node-3".into(), ..Note::own(String::new()) };
        note.write(&root.join(FILE)).unwrap();
        note
    }

    fn ended() -> Error {
        Error::invalid("the test ends the wait")
    }

    #[test]
    fn manager_of_another_host_keeps_the_run_while_it_gives_signs_of_life() {
        let root = tempfile::tempdir().unwrap();
        let _played = play(root.path(), "nfs4", "nolock");
        let mut note = others(root.path());
        let waits = || {
            note.beats += 1;
            note.write(&root.path().join(FILE)).unwrap();
            Ok(())
        };
        let refused = RunLock::take_at(root.path(), NEVER, waits).unwrap_err();
        assert!(matches!(refused, Error::RunBusy { .. }));
        assert!(refused.to_string().contains("on node-3"), "{refused}");
    }

    #[test]
    fn silent_note_of_another_host_is_waited_for_and_then_taken_over() {
        let root = tempfile::tempdir().unwrap();
        let _played = play(root.path(), "nfs4", "nolock");
        others(root.path());
        let waited = RunLock::take_at(root.path(), NEVER, || Err(ended())).unwrap_err();
        assert!(waited.to_string().contains("the test ends the wait"));
        let lock = RunLock::take_at(root.path(), AT_ONCE, || Err(ended())).unwrap();
        lock.check().unwrap();
        drop(lock);
        assert!(dir::file_names(root.path()).unwrap().is_empty());
    }

    #[test]
    fn note_of_a_killed_process_of_this_host_or_of_a_host_that_locks_reach_keeps_nobody_out() {
        let root = tempfile::tempdir().unwrap();
        let played = play(root.path(), "nfs4", "nolock");
        Note::own(kernel(root.path())).write(&root.path().join(FILE)).unwrap();
        drop(RunLock::take_at(root.path(), NEVER, || Err(ended())).unwrap());
        drop(played);
        let _played = play(root.path(), "nfs4", "");
        others(root.path());
        drop(RunLock::take_at(root.path(), NEVER, || Err(ended())).unwrap());
    }

    #[test]
    fn manager_whose_run_another_host_has_taken_saves_no_more_and_leaves_its_note() {
        let root = tempfile::tempdir().unwrap();
        let _played = play(root.path(), "nfs4", "nolock");
        let lock = RunLock::take_at(root.path(), NEVER, || Err(ended())).unwrap();
        lock.check().unwrap();
        let other = others(root.path());
        let refused = lock.check().unwrap_err().to_string();
        assert!(refused.contains("node-3") && refused.contains("has taken it over"), "{refused}");
        drop(lock);
        assert_eq!(Note::read(&root.path().join(FILE)).unwrap().id, other.id);
    }

    #[test]
    fn lock_that_a_server_keeps_of_a_host_that_is_gone_is_waited_for_and_then_passed_by() {
        let root = tempfile::tempdir().unwrap();
        let _played = play(root.path(), "nfs", "");
        let _gone = hold_new(&root.path().join(FILE)).unwrap();
        others(root.path());
        let leased = Pace { silence: Duration::ZERO, ..NEVER };
        let waited = RunLock::take_at(root.path(), leased, || Err(ended())).unwrap_err();
        assert!(waited.to_string().contains("the test ends the wait"));
        let lock = RunLock::take_at(root.path(), AT_ONCE, || Ok(())).unwrap();
        lock.check().unwrap();
    }

    #[test]
    fn holder_gives_signs_of_life_by_itself() {
        let root = tempfile::tempdir().unwrap();
        let _played = play(root.path(), "nfs4", "nolock");
        let fast = Pace { beat: Duration::from_millis(1), ..NEVER };
        let _lock = RunLock::take_at(root.path(), fast, || Err(ended())).unwrap();
        let until = Instant::now() + HOUR;
        while Note::read(&root.path().join(FILE)).is_none_or(|note| note.beats < 3) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        let bytes = file::read_start(&root.path().join(FILE), 1 << 20).unwrap().len();
        assert_eq!(bytes, 1024, "a later note leaves nothing of an earlier one");
    }
}
