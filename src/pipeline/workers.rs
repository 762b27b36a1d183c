//! Scoped worker threads that do one piece of work side by side.

use crate::config::Priority;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Runs `work` on that many threads, this one among them, and returns when all have ended. The others get
/// `priority`. If the system has no more threads, it goes on with fewer: slower beats losing a checkpoint.
///
/// When one panics, this calls `stop`, which must make the others end, and then resumes the panic in
/// this thread.
pub(crate) fn scoped_workers(
    (threads, priority): (usize, Priority),
    work: impl Fn() + Sync,
    stop: impl Fn() + Sync,
) {
    let work = || catch_unwind(AssertUnwindSafe(&work)).inspect_err(|_| stop());
    let other = || {
        priority.try_apply();
        work()
    };
    let ended = thread::scope(|scope| {
        let start = |_| match thread::Builder::new().spawn_scoped(scope, other) {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::warn!(%error, "no more threads to copy and check with: going on with fewer");
                None
            }
        };
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mine = work();
        others
            .into_iter()
            .fold(mine, |ended, other| ended.and(other.join().and_then(|ended| ended)))
    });
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}
