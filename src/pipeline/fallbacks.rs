//! Says what could not be had, once: a training saves a thousand times. The reports have it each time.

use crate::engine::fallback::Fallback;
use crate::sys::dir::look;
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

/// File system and reason of what has been said.
static SAID: PerProcess<Vec<(u64, String)>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// Warns of each step down that this process has not been warned of, for the same reason and on the file system
/// that `dir` is on.
pub(crate) fn warn_once<'a>(dir: &Path, steps: impl IntoIterator<Item = &'a Fallback>) {
    for step in steps {
        warn_once_of(dir, &step.reason, step);
    }
}

/// As [`warn_once`], of a step down whose reason names paths that are others at each save: what is `about` the same
/// is said once.
pub(crate) fn warn_once_of(dir: &Path, about: &str, step: &Fallback) {
    let Fallback { wanted, got, reason, remedy } = step;
    // Logging comes after the lock is let go of: who logs may wait for somebody who wants it.
    if is_new((file_system(dir), about.to_owned())) {
        tracing::warn!("{got} instead of {wanted}: {reason}; {remedy}");
    }
}

fn is_new(known: (u64, String)) -> bool {
    SAID.lock().is_some_and(|mut said| {
        let is_new = !said.contains(&known);
        if is_new {
            said.push(known);
        }
        is_new
    })
}

/// The number of the file system that a directory is on, or will be.
fn file_system(dir: &Path) -> u64 {
    let found = dir.ancestors().find_map(|dir| look(dir).ok());
    found.map_or(0, |found| found.dev())
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
