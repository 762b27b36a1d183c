//! A limit on the bytes per second that a save writes.

use crate::common::*;
use ringstow::{Config, Error, Store};
use std::time::{Duration, Instant};

#[test]
fn a_limit_holds_writes_back_and_not_copies() {
    let root = scratch();
    // The second block may be written after ten seconds.
    let config = Config { write_rate: 400, pool_bytes: 64 * 4096, ..small_config() };
    let store = Store::new(config).unwrap();
    let handle =
        store.save_async(State::new(1, &SIZES).into_save(), root.path().join("a")).unwrap();
    assert!(handle.wait_staged(None));
    let progress = handle.progress();
    assert!(progress.total > 2 * 4096 && progress.staged == progress.total, "{progress:?}");
    assert!(progress.written <= 4096, "{progress:?}");
    handle.cancel();
    assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    assert!(!root.path().join("a/manifest.json").exists());
}

#[test]
fn a_save_takes_at_least_the_time_that_its_limit_gives() {
    let root = scratch();
    let bytes = 40 * 4096;
    let state = State::new(1, &[bytes]);
    // A pool of two blocks: fillers wait for buffers that are held back.
    let config = Config { write_rate: 20 * 4096 * 10, pool_bytes: 2 * 4096, ..small_config() };
    let (store, begun) = (Store::new(config).unwrap(), Instant::now());
    store.save(&state.to_save().unwrap(), root.path().join("a")).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(200));
    state.assert_at(&runtime(), &root.path().join("a"));
}
