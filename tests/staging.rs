//! The staging memory of background saves: training waits for the copies, and not for the disk.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use ringstow::{Config, Error, Store};
use std::time::Duration;

/// More than any save or load may take.
const LARGE: usize = 320 << 20;
const BLOCK: u64 = 4 << 20;
const TEN_MINUTES: Duration = Duration::from_secs(600);

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
    let root = scratch();
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
    let root = scratch();
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

#[test]
fn memory_is_kept_for_the_next_save_and_the_report_has_it() {
    let root = scratch();
    let store = Store::new(config(7)).unwrap();
    let save = |step: i64| {
        let state = State::new(step, &[LARGE]);
        let path = root.path().join(step.to_string());
        let report = store.save_async(state.into_save(), &path).unwrap().result().unwrap();
        State::new(step, &[LARGE]).assert_at(&runtime(), &path);
        report
    };
    let (first, second) = (save(1), save(2));
    assert!(first.pool_bytes >= 256 << 20);
    assert!(
        second.pool_bytes <= (LARGE as u64 + (1 << 20)).next_multiple_of(64 << 20) + (64 << 20)
    );
    assert!(first.moved.fallbacks.iter().all(|step| !step.wanted.contains("staging memory")));
}
