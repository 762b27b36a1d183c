//! Logs each fallback once, since a training run saves a thousand times. Every report lists it.

use crate::engine::fallback::Fallback;
use crate::sys::dir;
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::path::Path;
use std::sync::Mutex;

/// File system and reason of the fallbacks logged so far.
static LOGGED: PerProcess<Vec<(u64, String)>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// Logs each fallback as a warning, unless this process has logged one for the same reason and the file
/// system of `dir`.
pub(crate) fn warn_once<'a>(dir: &Path, steps: impl IntoIterator<Item = &'a Fallback>) {
    for step in steps {
        warn_once_of(dir, &step.reason, step);
    }
}

/// Like [`warn_once`], for a fallback whose reason names paths that change with every save: `about` takes
/// the reason's place in telling whether it was logged.
pub(crate) fn warn_once_of(dir: &Path, about: &str, step: &Fallback) {
    let Fallback { wanted, got, reason, remedy, .. } = step;
    // Logs after releasing the lock: a logger may wait for a thread that wants the lock.
    if is_new((file_system(dir), about.to_owned())) {
        tracing::warn!("{got} instead of {wanted}: {reason}; {remedy}");
    }
}

fn is_new(known: (u64, String)) -> bool {
    LOGGED.lock().is_some_and(|mut logged| {
        let is_new = !logged.contains(&known);
        if is_new {
            logged.push(known);
        }
        is_new
    })
}

/// The number of the file system that a directory is on, or will be.
fn file_system(dir: &Path) -> u64 {
    dir.ancestors().find_map(dir::device).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_new_once_on_each_file_system() {
        let of = |dir: &str, reason: &str| is_new((file_system(Path::new(dir)), reason.into()));
        assert!(of("/", "of this test"));
        assert!(!of("/", "of this test"));
        assert!(!of("/no/such/directory", "of this test"));
        assert!(of("/proc", "of this test"));
        assert!(of("/", "another of this test"));
    }
}
