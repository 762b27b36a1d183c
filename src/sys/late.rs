//! Waiting, on a host that sees late what another host has done: a network file system may show an old directory for a while.
//! The one rule for how long, in Rust and in Python.

use super::dir;
use super::file_system::FileSystem;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait. NFS shows new names after 60 s at the latest: its mount option acdirmax.
pub const SEEN: Duration = Duration::from_secs(90);
/// The pause before each further look.
pub const POLL: Duration = Duration::from_millis(200);
/// Looks in [`SEEN`].
const LOOKS_MAX: u32 = (SEEN.as_millis() / POLL.as_millis()) as u32;
/// Looks after which the log has a word.
const LOOKS_QUIET: u32 = 10;

static AT_ONCE: AtomicBool = AtomicBool::new(false);

/// Has this process look again without a pause, as often as it would in [`SEEN`]. For tests, which play the other host.
pub fn look_at_once() {
    AT_ONCE.store(true, Relaxed);
}

/// Waits until this host sees what another one has done, or `goes_on` is false. Only where other hosts may use the file system
/// of `path`, and for a bounded time. `what` is for the log.
pub fn awaited(
    path: &Path,
    what: &str,
    mut goes_on: impl FnMut() -> bool,
    mut is_seen: impl FnMut() -> bool,
) {
    if is_seen() {
        return;
    }
    let Some(system) = FileSystem::shared(path) else { return };
    let began = Instant::now();
    for look in 0..LOOKS_MAX {
        if look == LOOKS_QUIET {
            let (limit, path, system) = (SEEN.as_secs(), path.display(), system.name.as_str());
            tracing::warn!(
                "waiting up to {limit} s until this host sees {what} in {path}, which is on {system}"
            );
        }
        if !AT_ONCE.load(Relaxed) {
            thread::sleep(POLL);
        }
        // Lists both: that makes the file system look for new names.
        for dir in path.parent().into_iter().chain([path]) {
            let _ = dir::entries(dir);
        }
        if is_seen() || !goes_on() || began.elapsed() >= SEEN {
            return;
        }
    }
}
