//! Saves by several ranks.

use crate::common::{assert_says, names_in, small_config};
use crate::{BYTES, Hosts, assert_nothing_else, state, store, tree};
use ringstow::{Receipt, Session};
use std::path::Path;

/// Begins a save by one rank.
fn begin(dir: &Path) -> Session {
    Session::begin(dir, 1, &small_config()).unwrap()
}

/// What the rank of a save writes, as it reports it.
fn write(dir: &Path, seed: u8) -> Receipt {
    store().write_rank(&state(seed), 0, dir).unwrap().0
}

#[test]
fn sessions_of_two_hosts_never_mix() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let (begin, write) = (|| begin(&dir), |seed| write(&dir, seed));
    let first = begin();
    let receipt = write(1);
    let second = begin();
    // The first host's rank has its mark still, and its coordinator commits.
    first.commit(vec![receipt], tree()).unwrap();
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [1; BYTES]);
    let receipt = write(2);
    let third = begin();
    // Ranks find the newest session.
    let other = write(3);
    let error = second.commit(vec![receipt], tree()).unwrap_err();
    assert_says(&error, &["rank 0", "not from its last write"]);
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [1; BYTES]);
    third.commit(vec![other], tree()).unwrap();
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [3; BYTES]);
    assert_nothing_else(&dir);
}

#[test]
fn failed_session_removes_its_own_files_alone() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let (begin, write) = (|| begin(&dir), |seed| write(&dir, seed));
    let first = begin();
    let receipt = write(1);
    let before = names_in(&dir);
    let second = begin();
    drop(second);
    let mut now = names_in(&dir);
    now.push("manifest.json.part".into()); // the note was the second's in the end
    now.sort();
    assert_eq!(now, before);
    first.commit(vec![receipt], tree()).unwrap();
    assert_nothing_else(&dir);
    let third = begin();
    write(3);
    drop(third);
    assert_nothing_else(&dir);
}
