//! Checkpoints whose ranks saved each by itself: found, passed over and removed as one.

mod pruned;
mod removal;

use crate::common::{State, assert_says, runtime, scratch, step_at};
use ringstow::internals::format::names;
use ringstow::{Checkpoint, Error, Found, OpenOptions, Status, Store, latest, verify};
use std::fs;
use std::path::{Path, PathBuf};

/// Saves one rank's share, as a rank does that talks to no other.
fn save_part(whole: &Path, rank: u32, ranks: u32, save: &str) {
    State::new(i64::from(rank), &[9000]).save_alone((rank, ranks), save, &runtime(), whole);
}

fn part(whole: &Path, rank: u32) -> PathBuf {
    whole.join(names::rank_dir(rank))
}

fn at(root: &Path, step: u32) -> PathBuf {
    root.join(format!("step-{step}"))
}

fn save_all(whole: &Path, ranks: u32, save: &str) {
    (0..ranks).for_each(|rank| save_part(whole, rank, ranks, save));
}

/// A directory in which all of three ranks saved these steps.
fn root(steps: &[u32]) -> tempfile::TempDir {
    let root = scratch();
    steps.iter().for_each(|step| save_all(&at(root.path(), *step), 3, &format!("a-{step}")));
    root
}

fn only(root: &Path) -> Found {
    let mut found = Store::found().unwrap().list(root).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// What is found there cannot be loaded, and the reason holds each of these words.
#[track_caller]
fn assert_incomplete(root: &Path, words: &[&str]) {
    let found = only(root);
    let problem = found.problem.unwrap_or_default();
    assert_eq!(found.status, Status::Incomplete, "{problem}");
    for word in words {
        assert!(problem.contains(word), "{word:?} is not in: {problem}");
    }
    match latest(root) {
        Ok(newest) => assert_eq!(newest, None),
        // It was committed, and has lost files.
        Err(error) => assert!(matches!(error, Error::MissingFiles { .. }), "{error}"),
    }
}

/// What a kill leaves after the first step of a part's removal.
fn take_down(whole: &Path, rank: u32) {
    let dir = part(whole, rank);
    fs::rename(dir.join(names::MANIFEST), dir.join(names::REMOVAL_MARK)).unwrap();
}

fn flip_last_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_whole_is_one_checkpoint_and_the_latest() {
    let root = root(&[6, 7]);
    let found = Store::found().unwrap().list(root.path()).unwrap();
    let paths: Vec<&Path> = found.iter().map(|found| found.path.as_path()).collect();
    assert_eq!(paths, [at(root.path(), 6), at(root.path(), 7)]);
    let whole = &found[1];
    assert_eq!((whole.status, whole.step, whole.tensors), (Status::Committed, Some(7), Some(3)));
    assert_eq!(whole.parts, [0, 1, 2].map(|rank| part(&whole.path, rank)));
    let parts: Vec<Found> = whole.parts.iter().map(|part| only(part)).collect();
    assert_eq!(whole.file_bytes, parts.iter().map(|part| part.file_bytes).sum());
    assert_eq!(whole.created_unix_ms, parts.iter().map(|part| part.created_unix_ms).max().unwrap());
    assert_eq!(parts[2].part_of.as_ref().map(|of| (of.rank, of.ranks)), Some((2, 3)));
    assert_eq!(latest(root.path()).unwrap(), Some(at(root.path(), 7)));
    assert_eq!(only(&whole.path).path, whole.path, "listed by its own path");
}

#[test]
fn a_whole_cannot_be_opened_and_says_what_can() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    for error in [
        Checkpoint::open(&whole).unwrap_err(),
        OpenOptions::new().foreign(true).open(&whole).unwrap_err(),
        verify(&whole).unwrap_err(),
    ] {
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
        assert_says(&error, &["saved each by itself", "dcp.load", "step-7/rank00000"]);
    }
    assert_eq!(step_at(&part(&whole, 2)), 2);
}

#[test]
fn step_with_unfinished_ranks_is_skipped() {
    let root = root(&[6]);
    let whole = at(root.path(), 7);
    save_part(&whole, 0, 4, "a-7");
    save_part(&whole, 2, 4, "a-7");
    // One was killed while it wrote, one never began.
    fs::create_dir(part(&whole, 1)).unwrap();
    fs::write(part(&whole, 1).join("rank00000-0.safetensors.part"), "half").unwrap();
    let found = Store::found().unwrap().list(root.path()).unwrap();
    assert_eq!(found[1].status, Status::Incomplete);
    let problem = found[1].problem.as_ref().unwrap();
    assert!(problem.contains("4 ranks saved it") && problem.contains("ranks 1, 3"), "{problem}");
    assert_eq!(latest(root.path()).unwrap(), Some(at(root.path(), 6)));
    save_part(&whole, 1, 4, "a-7");
    save_part(&whole, 3, 4, "a-7");
    assert_eq!(latest(root.path()).unwrap(), Some(whole));
}

#[test]
fn damage_and_losses_in_a_part_are_those_of_the_whole() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    let shard = part(&whole, 1).join("rank00000-0.safetensors");
    fs::rename(&shard, shard.with_extension("away")).unwrap();
    assert_incomplete(root.path(), &["3 ranks saved it", "of rank 1", "rank00000-0.safetensors"]);
    fs::rename(shard.with_extension("away"), &shard).unwrap();
    flip_last_byte(&part(&whole, 2).join(names::MANIFEST));
    let found = only(root.path());
    assert_eq!(found.status, Status::Damaged);
    assert!(found.problem.unwrap().contains("rank00002/manifest.json"));
    assert!(matches!(latest(root.path()).unwrap_err(), Error::Corrupt { .. }));
}

#[test]
fn rank_shares_without_a_count_are_never_a_checkpoint() {
    let root = scratch();
    let whole = at(root.path(), 7);
    for rank in 0..2 {
        State::new(1, &[100]).save(&runtime(), &part(&whole, rank)).unwrap();
    }
    assert_incomplete(root.path(), &["ranks 0, 1", "not known", "dcp.load"]);
    save_part(&whole, 2, 3, "a");
    assert_incomplete(root.path(), &["different saves", "ranks 0, 1 of one whose manifest"]);
}

#[test]
fn step_saved_again_counts_once_every_rank_saved_again() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    for rank in 0..2 {
        save_part(&whole, rank, 3, "b-7");
        assert_incomplete(root.path(), &["different saves", "by 3 ranks"]);
    }
    save_part(&whole, 2, 3, "b-7");
    assert_eq!(latest(root.path()).unwrap(), Some(whole));
}

#[test]
fn ranks_beyond_those_of_a_later_save_are_named() {
    let root = scratch();
    let whole = at(root.path(), 7);
    save_all(&whole, 4, "a");
    save_all(&whole, 2, "b");
    let words =
        ["ranks 0, 1 of one by 2 ranks", "ranks 2, 3 of one by 4 ranks", "rank00002, rank00003"];
    assert_incomplete(root.path(), &words);
    for rank in [2, 3] {
        fs::remove_dir_all(part(&whole, rank)).unwrap();
    }
    assert_eq!(latest(root.path()).unwrap(), Some(whole));
}

#[test]
fn a_renamed_part_is_not_taken_for_another_rank_s() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    fs::remove_dir_all(part(&whole, 0)).unwrap();
    fs::rename(part(&whole, 1), part(&whole, 0)).unwrap();
    save_part(&whole, 1, 3, "a-7");
    assert_incomplete(root.path(), &["rank00000 holds the share of rank 1"]);
}

#[test]
fn rank_shares_beside_checkpoints_hide_none() {
    let root = root(&[1]);
    save_part(root.path(), 9, 10, "stray");
    assert_eq!(Store::found().unwrap().list(root.path()).unwrap().len(), 2);
    assert_eq!(latest(root.path()).unwrap(), Some(at(root.path(), 1)));
    // What others put beside its parts is nothing to it.
    fs::create_dir(at(root.path(), 1).join("tokenizer")).unwrap();
    assert_eq!(latest(root.path()).unwrap(), Some(at(root.path(), 1)));
}

#[test]
fn a_checkpoint_of_its_own_hides_parts_below_it() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    State::new(5, &[100]).save(&runtime(), &whole).unwrap();
    let found = only(root.path());
    assert_eq!((found.status, found.tensors, found.parts.len()), (Status::Committed, Some(1), 0));
    assert_eq!(step_at(&whole), 5);
}
