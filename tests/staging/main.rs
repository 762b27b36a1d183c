//! The staging memory of background saves: training waits for the copies, and not for the disk.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod groups;

use common::*;
use ringstow::{Config, Error, Store};
use std::sync::RwLock;
use std::time::Duration;

/// More than any save or load may take.
const LARGE: usize = 320 << 20;
const BLOCK: u64 = 4 << 20;
const TEN_MINUTES: Duration = Duration::from_secs(600);

/// Whether `/proc` can be read is one thing for all tests of the process.
static PROC: RwLock<()> = RwLock::new(());

/// A machine of its own for each test: others would wait for its buffers.
fn config(queue_depth: u32) -> Config {
    Config { queue_depth, ..Config::default() }
}

/// Lets the first block through, and the next in days.
fn no_disk(queue_depth: u32) -> Config {
    Config { write_rate: 10, ..config(queue_depth) }
}

#[test]
fn background_save_copies_all_of_its_state_whatever_the_disk_does() {
    let (root, _others) = (scratch(), PROC.read());
    let store = Store::new(no_disk(5)).unwrap();
    let handle =
        store.save_async(State::new(1, &[LARGE]).into_save(), root.path().join("a")).unwrap();
    let (is_staged, progress) = (handle.wait_staged(Some(TEN_MINUTES)), handle.progress());
    handle.cancel();
    assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    assert!(is_staged);
    assert!(progress.staged == progress.total && progress.written <= BLOCK, "{progress:?}");
}

#[test]
fn size_of_the_pool_bounds_background_saves_too() {
    let (root, _others) = (scratch(), PROC.read());
    let store = Store::new(Config { pool_bytes: 256 << 20, ..no_disk(6) }).unwrap();
    let handle =
        store.save_async(State::new(1, &[LARGE]).into_save(), root.path().join("a")).unwrap();
    let is_staged = handle.wait_staged(Some(Duration::from_millis(500)));
    let progress = handle.progress();
    handle.cancel();
    assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    assert!(!is_staged, "only the disk frees a buffer");
    assert!(progress.staged <= (256 << 20) + BLOCK, "{progress:?}"); // one was written
}

#[cfg(debug_assertions)] // the seam exists in these builds only
#[test]
fn where_it_is_not_known_what_is_available_a_save_has_what_any_save_has() {
    use ringstow::internals::sys::seam::{fail_if, in_process};
    let (root, _alone) = (scratch(), PROC.write());
    let store = Store::new(no_disk(9)).unwrap();
    let is_meant = |_, path: &std::path::Path| path.starts_with("/proc/meminfo");
    let _watch = in_process(fail_if(nix::libc::EACCES, is_meant));
    let handle =
        store.save_async(State::new(1, &[LARGE]).into_save(), root.path().join("a")).unwrap();
    let is_staged = handle.wait_staged(Some(Duration::from_secs(2)));
    let progress = handle.progress();
    handle.cancel();
    assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    assert!(!is_staged, "only the disk frees a buffer");
    assert!(progress.staged <= (256 << 20) + BLOCK, "{progress:?}");
}

#[test]
fn memory_is_kept_for_the_next_save_and_the_report_has_it() {
    let (root, _others) = (scratch(), PROC.read());
    let store = Store::new(config(7)).unwrap();
    let save = |step: i64| {
        let state = State::new(step, &[LARGE]);
        let path = root.path().join(step.to_string());
        let report = store.save_async(state.into_save(), &path).unwrap().result().unwrap();
        State::new(step, &[LARGE]).assert_at(&runtime(), &path);
        report
    };
    let (first, second) = (save(1), save(2));
    // As much as a slow disk takes; a chunk more where two threads take one at the same time.
    let most = (LARGE as u64 + (1 << 20)).next_multiple_of(64 << 20) + (64 << 20);
    assert!((1..=most).contains(&first.pool_bytes), "{}", first.pool_bytes);
    assert!((first.pool_bytes..=most).contains(&second.pool_bytes), "{}", second.pool_bytes);
    assert!(
        first.moved.fallbacks.iter().all(|step| step.kind != ringstow::FallbackKind::StagingMemory)
    );
}
