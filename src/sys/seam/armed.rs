//! The seam as tests use it: what becomes of each call of a thread or of the process.

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

/// Fails the calls that are meant.
pub fn fail_if(
    errno: i32,
    mut is_meant: impl FnMut(Call, &Path) -> bool + Send,
) -> impl FnMut(u64, Call, &Path) -> Outcome + Send {
    move |_, call, on| if is_meant(call, on) { Outcome::Fail(errno) } else { Outcome::Pass }
}

/// Fails each call of one kind on this path, on this thread.
pub fn fail_call(of: Call, path: &Path, errno: i32) -> Watch {
    let path = path.to_path_buf();
    on_thread(fail_if(errno, move |call, on| call == of && on == path))
}

/// Fails the `n`th call of one kind on files below a directory, on any thread.
pub fn fail_nth(n: u64, of: Call, below: &Path, errno: i32) -> Watch {
    let (below, mut seen) = (below.to_path_buf(), 0);
    in_process(fail_if(errno, move |call, on| {
        let is_one = call == of && on.starts_with(&below);
        seen += u64::from(is_one);
        is_one && seen == n
    }))
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
