//! Two hosts on one network file system: two mounts of a [`Share`] of ours over FUSE, which keeps locks local to a host
//! and shows what another host has done late (`tests/two-hosts` says what it promises). Mounting needs root and
//! /dev/fuse.
//!
//! `make torture-hosts` runs 500 interleavings; `make test` 30.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

#[path = "../common/mod.rs"]
mod common;
mod history;
mod interleavings;
mod job;
mod rig;
mod single;

use common::mounts;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use two_hosts::{Rules, Share};

/// The server's life, when [`with_hosts`] starts it; nothing in an ordinary run.
#[test]
fn server_of_the_share() {
    two_hosts::serve();
}

/// One share at a time: until a program that another test starts has replaced its image, it has this process' files
/// open, and closing them there tells the share that they are closed.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a test with a share that two hosts have mounted, or says why it cannot.
fn with_hosts(rules: Rules, seed: u64, test: impl FnOnce(&Share) + Send) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    mounts::where_mounts_work(|| {
        let below = tempfile::tempdir().unwrap();
        let mut server = Command::new(std::env::current_exe().unwrap());
        server.args(["--exact", "server_of_the_share", "--nocapture"]);
        std::fs::create_dir(below.path().join("share")).unwrap();
        let share = Share::mount(server, below.path(), rules, seed);
        let share = share.map_err(|error| format!("cannot mount over FUSE: {error}"))?;
        test(&share);
        Ok(())
    });
}
