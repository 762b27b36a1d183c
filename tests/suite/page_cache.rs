//! A load copies from the page cache what it holds, and is right whatever that is; a check reads the medium.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

use crate::common::{
    SIZES, State, assert_undamaged, flip, load_all, load_error, runtime, saved, shard_of,
    small_config,
};
use nix::libc::ENOSYS;
use ringstow::internals::sys::file::drop_page_cache;
use ringstow::internals::sys::seam::{Call, Outcome, fail_if, in_process};
use ringstow::{
    Checkpoint, Config, Error, LoadOptions, LoadReport, OnCorrupt, Runtime, Switch, Target,
};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of the tensors: many blocks of [`small_config`], so that the kernel's readahead cannot take all.
const LARGE: [usize; 3] = [3_000_000, 5000, 1_000_001];

/// A checkpoint on a disk, nothing of which is in the page cache; `None` if its file system cannot forget.
fn cold() -> Option<(tempfile::TempDir, PathBuf, State)> {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (dir, state) = (root.path().join("ckpt"), State::new(1, &LARGE));
    state.save(&runtime(), &dir).unwrap();
    forget(&dir);
    let report = loaded(&runtime(), &dir, &state);
    (report.moved.direct && report.cached_bytes == 0).then_some((root, dir, state))
}

fn forget(dir: &Path) {
    let file = File::open(shard_of(dir)).unwrap();
    file.sync_all().unwrap();
    drop_page_cache(&file).unwrap();
}

/// Loads all, which must be this state, into memory of its own and into the caller's; both report the same.
#[track_caller]
fn loaded(runtime: &Runtime, dir: &Path, state: &State) -> LoadReport {
    let loaded = load_all(runtime, dir).unwrap();
    state.assert_equals(&loaded);
    let mut memory: Vec<Vec<u8>> =
        state.tensors.iter().map(|(_, data)| vec![0; data.len()]).collect();
    let targets: Vec<(&str, Target)> = state
        .tensors
        .iter()
        .zip(&mut memory)
        .map(|((name, _), to)| (name.as_str(), Target::new(&mut to[..])))
        .collect();
    let options = LoadOptions { runtime: Some(runtime), ..LoadOptions::default() };
    let filled = Checkpoint::open(dir).unwrap().load_into(&targets, options).unwrap();
    drop(targets);
    assert!(state.tensors.iter().zip(&memory).all(|((_, data), to)| data == to));
    assert_eq!(filled.cached_bytes, loaded.report.cached_bytes);
    filled
}

/// How many calls of each of two kinds `act` makes on files in a directory: to the page cache, and reads of the engine.
fn counted(dir: &Path, act: impl FnOnce()) -> (usize, usize) {
    let watch = in_process(|_, _, _| Outcome::Pass);
    act();
    let seen = watch.take();
    let count = |of| seen.iter().filter(|(call, on)| *call == of && on.starts_with(dir)).count();
    (count(Call::PageCache), count(Call::ReadBlock))
}

#[test]
fn warm_file_is_copied_from_the_page_cache() {
    let Some((_root, dir, state)) = cold() else { return };
    fs::read(shard_of(&dir)).unwrap();
    let report = loaded(&runtime(), &dir, &state);
    assert_eq!(report.cached_bytes, report.read_bytes);
    assert!(report.to_string().ends_with(" from the page cache"), "{report}");
}

#[test]
fn file_that_is_warm_in_part_is_copied_and_read() {
    let Some((_root, dir, state)) = cold() else { return };
    let file = File::open(shard_of(&dir)).unwrap();
    file.read_exact_at(&mut vec![0; 500_000], 1_000_000).unwrap();
    let report = loaded(&runtime(), &dir, &state);
    assert!(
        report.cached_bytes >= 400_000 && report.cached_bytes < report.read_bytes,
        "{report:?}"
    );
}

#[test]
fn load_of_a_cold_file_leaves_nothing_in_the_page_cache() {
    let Some((_root, dir, state)) = cold() else { return };
    for _ in 0..2 {
        assert_eq!(loaded(&runtime(), &dir, &state).cached_bytes, 0);
    }
}

#[test]
fn bytes_that_are_not_yet_on_the_disk_are_loaded() {
    let Some((_root, dir, state)) = cold() else { return };
    let shard = shard_of(&dir);
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes).unwrap(); // not synced
    let report = loaded(&runtime(), &dir, &state);
    assert_eq!(report.cached_bytes, report.read_bytes);
}

#[test]
fn direct_on_reads_the_disk() {
    let Some((_root, dir, state)) = cold() else { return };
    fs::read(shard_of(&dir)).unwrap();
    let runtime = Runtime::new(Config { direct: Switch::On, ..small_config() }).unwrap();
    assert_eq!(loaded(&runtime, &dir, &state).cached_bytes, 0);
}

#[test]
fn load_is_right_where_the_kernel_does_not_say_what_the_page_cache_holds() {
    let (_root, dir) = saved();
    let below = dir.clone();
    let is_meant = move |call, on: &Path| call == Call::PageCache && on.starts_with(&below);
    let _refusing = in_process(fail_if(ENOSYS, is_meant));
    assert_eq!(loaded(&runtime(), &dir, &State::new(1, &SIZES)).cached_bytes, 0);
}

#[test]
fn verify_reads_the_medium() {
    let (_root, dir) = saved();
    let verify = || assert_undamaged(&runtime(), &dir);
    let (asked, read) = counted(&dir, verify);
    assert!(asked == 0 && read > 1, "{asked}, {read}");
    // So does the search that a load begins with if it skips what is damaged.
    let options = LoadOptions { on_corrupt: OnCorrupt::Skip, ..LoadOptions::default() };
    let skip = || drop(Checkpoint::open(&dir).unwrap().load_names(["layer.1.weight"], options));
    assert!(counted(&dir, skip).1 > 1);
}

#[test]
fn block_that_is_damaged_in_the_page_cache_is_read_from_the_medium() {
    let (_root, dir) = saved();
    let trial = counted(&dir, || drop(load_all(&runtime(), &dir).unwrap())).1;
    flip(&shard_of(&dir), 9000);
    let mut error = None;
    let (_, read) = counted(&dir, || error = Some(load_error(&dir)));
    assert!(matches!(error, Some(Error::Corrupt { offset: 8192, .. })), "{error:?}");
    assert!(read > trial, "{read} reads, {trial} of them the trial of the I/O mode");
}
