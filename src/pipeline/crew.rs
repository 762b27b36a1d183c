//! Threads that do one piece of work side by side. Knows nothing of what they do.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Has `work` done by so many threads, this one among them, and returns when all have ended. By fewer,
/// where the system has no more threads: that is slower, and no reason to lose a checkpoint.
///
/// A panic of one calls `stop`, which is to make the others end, and then goes on in this thread.
pub(super) fn work_together(threads: usize, work: impl Fn() + Sync, stop: impl Fn() + Sync) {
    let work = || catch_unwind(AssertUnwindSafe(&work)).inspect_err(|_| stop());
    let ended = thread::scope(|scope| {
        let start = |_| match thread::Builder::new().spawn_scoped(scope, work) {
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
