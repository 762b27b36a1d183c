//! A checkpoint of more files, or parts, than the process may have open.
#![cfg(unix)]

use crate::common::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ringstow::internals::format::names;
use ringstow::{Config, Disposal, Runtime, remove, retain};
use std::fs;

#[test]
fn more_files_than_the_soft_limit_allows_are_saved_and_loaded() {
    if !is_alone("many_files::more_files_than_the_soft_limit_allows_are_saved_and_loaded") {
        return;
    }
    let root = scratch();
    let runtime = Runtime::shared(&Config { shard_bytes: 4096, ..small_config() }).unwrap();
    let state = State::new(1, &[4096; 120]);
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    let report = state.save(&runtime, root.path()).unwrap();
    assert_eq!(report.files, 120);
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    state.assert_at(&runtime, root.path());
    // Each has a second descriptor while its bytes are copied from the page cache.
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    let report = load_all(&runtime, root.path()).unwrap().report;
    if cfg!(target_os = "linux") && root.path().starts_with("/dev/shm") {
        assert_eq!(report.cached_bytes, report.read_bytes);
    }
}

#[test]
fn removal_locks_more_shares_than_the_soft_file_limit() {
    if !is_alone("many_files::removal_locks_more_shares_than_the_soft_file_limit") {
        return;
    }
    let root = scratch();
    for step in 1..3 {
        for rank in 0..120 {
            let part = root.path().join(format!("step-{step}")).join(names::rank_dir(rank));
            fs::create_dir_all(&part).unwrap();
            fs::write(part.join(names::REMOVAL_MARK), "of a removal that was killed").unwrap();
        }
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    remove(root.path().join("step-1"), Disposal::Remove).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 60, hard).unwrap();
    retain(root.path(), 1, Disposal::Remove).unwrap();
    assert!(names_in(root.path()).is_empty());
}
