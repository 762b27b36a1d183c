//! A checkpoint of more files than the process may have open. A test binary of its own: it lowers
//! the limit.
#![cfg(unix)]

mod common;

use common::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ringstow::{Config, Runtime};

#[test]
fn more_files_than_the_soft_limit_allows_are_read() {
    let root = scratch();
    let runtime = Runtime::shared(&Config { shard_bytes: 4096, ..small_config() }).unwrap();
    let state = State::new(1, &[4096; 120]);
    setrlimit(Resource::RLIMIT_NOFILE, 4096, 4096).unwrap();
    let report = state.save(&runtime, root.path()).unwrap();
    assert_eq!(report.files, 120);
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    state.assert_at(&runtime, root.path());
}
