//! Checkpoints that are removed, and saves that write over their files.
#![cfg(target_os = "linux")]

use crate::common::{
    State, assert_no_litter, assert_says, names_in, no_values, rig, runtime, set_acl, shards_in,
    small_config,
};
use ringstow::internals::store;
use ringstow::{
    Config, Disposal, EngineChoice, Error, Fallback, FallbackKind, Runtime, SaveReport, Status,
    Store, prune, remove, retain,
};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

const SIZES: [usize; 3] = [30_000, 5, 12_288];
const RECYCLED_DIR: &str = ".ringstow-spares";

/// A root with a checkpoint of these steps, each a state of its own.
fn root(steps: &[i64]) -> (tempfile::TempDir, Runtime) {
    let (root, runtime) = (tempfile::tempdir().unwrap(), runtime());
    for &step in steps {
        State::new(step, &SIZES).save(&runtime, &at(root.path(), step)).unwrap();
    }
    (root, runtime)
}

fn at(root: &Path, step: i64) -> PathBuf {
    root.join(format!("step-{step}"))
}

fn shard(dir: &Path) -> PathBuf {
    shards_in(dir).remove(0)
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn next_save_overwrites_a_removed_checkpoints_files() {
    let (root, runtime) = root(&[1]);
    let (first, second) = (at(root.path(), 1), at(root.path(), 2));
    let file = inode(&shard(&first));
    let removed = remove(&first, Disposal::Recycle).unwrap();
    assert_eq!((removed.recycled, first.exists()), (1, false));
    let state = State::new(2, &SIZES);
    let report = state.save(&runtime, &second).unwrap();
    assert_eq!(report.recycled_bytes, report.file_bytes);
    assert!(report.moved.fallbacks.iter().all(|f| f.kind != FallbackKind::Recycling));
    assert_eq!(inode(&shard(&second)), file);
    state.assert_at(&runtime, &second);
    assert_no_litter(&second);
    assert!(names_in(&root.path().join(RECYCLED_DIR)).is_empty());
    // There are no more: a new file.
    let report = State::new(3, &SIZES).save(&runtime, &at(root.path(), 3)).unwrap();
    assert_eq!(report.recycled_bytes, 0);
}

#[test]
fn states_of_other_sizes_fit_recycled_files() {
    let (root, runtime) = root(&[1]);
    for (step, sizes) in [(2, vec![200_000, 7]), (3, vec![11]), (4, vec![50_000; 4])] {
        remove(at(root.path(), step - 1), Disposal::Recycle).unwrap();
        let (state, dir) = (State::new(step, &sizes), at(root.path(), step));
        let report = state.save(&runtime, &dir).unwrap();
        assert!(report.recycled_bytes > 0);
        assert_eq!(fs::metadata(shard(&dir)).unwrap().len(), report.file_bytes);
        state.assert_at(&runtime, &dir);
    }
}

#[test]
fn shards_recycle_files_of_their_rank_and_number() {
    let (root, _) = root(&[]);
    let config = Config { shard_bytes: 20_000, ..small_config() };
    let runtime = Runtime::new(config).unwrap();
    for step in 1..4 {
        let (state, dir) = (State::new(step, &[15_000; 6]), at(root.path(), step));
        state.save_by_ranks(3, &runtime, &dir);
        state.assert_at(&runtime, &dir);
        let files = names_in(&dir).len() - 1;
        assert_eq!(remove(&dir, Disposal::Recycle).unwrap().recycled, files);
        assert_eq!(names_in(&root.path().join(RECYCLED_DIR)).len(), files);
    }
    // One rank, one shard: what five others left goes with the next retirement.
    let dir = at(root.path(), 9);
    let report = State::new(9, &[15_000]).save(&runtime, &dir).unwrap();
    assert!(report.recycled_bytes > 0);
    remove(&dir, Disposal::Recycle).unwrap();
    assert_eq!(names_in(&root.path().join(RECYCLED_DIR)), ["rank00000-0.spare"]);
}

/// Why a save has not written over old files.
fn not_recycled(report: &SaveReport) -> &Fallback {
    let fallbacks = &report.moved.fallbacks;
    fallbacks.iter().find(|fallback| fallback.kind == FallbackKind::Recycling).unwrap()
}

#[test]
fn what_somebody_reads_is_not_written_over() {
    let (root, runtime) = root(&[1]);
    let mut reader = fs::File::open(shard(&at(root.path(), 1))).unwrap();
    let before = fs::read(shard(&at(root.path(), 1))).unwrap();
    remove(at(root.path(), 1), Disposal::Recycle).unwrap();
    let state = State::new(2, &SIZES);
    let report = state.save(&runtime, &at(root.path(), 2)).unwrap();
    assert_eq!(report.recycled_bytes, 0);
    let told = not_recycled(&report);
    assert!(told.reason.contains("open"), "{}", told.reason);
    let mut after = Vec::new();
    reader.read_to_end(&mut after).unwrap();
    assert!(before == after);
    state.assert_at(&runtime, &at(root.path(), 2));
}

#[test]
fn a_hard_linked_copy_is_not_written_over() {
    let (root, runtime) = root(&[1, 2]);
    // One linked before it is removed, one after.
    let (file, early, late) =
        (shard(&at(root.path(), 1)), root.path().join("early"), root.path().join("late"));
    fs::hard_link(&file, &early).unwrap();
    let before = fs::read(&early).unwrap();
    assert_eq!(remove(at(root.path(), 1), Disposal::Recycle).unwrap().recycled, 0);
    let second = fs::read(shard(&at(root.path(), 2))).unwrap();
    assert_eq!(remove(at(root.path(), 2), Disposal::Recycle).unwrap().recycled, 1);
    fs::hard_link(root.path().join(RECYCLED_DIR).join("rank00000-0.spare"), &late).unwrap();
    let report = State::new(3, &SIZES).save(&runtime, &at(root.path(), 3)).unwrap();
    assert_eq!(report.recycled_bytes, 0);
    assert!(fs::read(&early).unwrap() == before && fs::read(&late).unwrap() == second);
}

#[test]
fn a_replaced_file_with_a_hard_link_is_not_recycled_and_the_report_says_why() {
    let (root, _) = root(&[]);
    let dir = root.path().join("last");
    let runtime = Runtime::new(Config { recycle: true, ..small_config() }).unwrap();
    State::new(1, &SIZES).save(&runtime, &dir).unwrap();
    fs::hard_link(shard(&dir), root.path().join("copy")).unwrap();
    let copy = fs::read(root.path().join("copy")).unwrap();
    let report = State::new(2, &SIZES).save(&runtime, &dir).unwrap();
    let told = not_recycled(&report);
    assert!(told.reason.contains("last/") && told.reason.contains("hard link"), "{told:?}");
    assert!(!root.path().join(RECYCLED_DIR).exists());
    assert!(fs::read(root.path().join("copy")).unwrap() == copy);
}

#[test]
fn recycle_alternates_between_two_file_sets() {
    for engine in [EngineChoice::Auto, EngineChoice::Portable] {
        let (root, _) = root(&[]);
        let dir = root.path().join("last");
        let config = Config { engine, shard_bytes: 20_000, recycle: true, ..small_config() };
        let runtime = Runtime::new(config.clone()).unwrap();
        let mut inodes = Vec::new();
        for step in 0..10 {
            let state = State::new(step, &SIZES);
            let report = state.save(&runtime, &dir).unwrap();
            let all = if step < 2 { 0 } else { report.file_bytes };
            assert_eq!(report.recycled_bytes, all, "{engine:?}, step {step}: {report:?}");
            state.assert_at(&runtime, &dir);
            assert_no_litter(&dir);
            inodes.push(inode(&shard(&dir)));
        }
        assert_ne!(inodes[8], inodes[9]);
        assert_eq!(inodes[6..8], inodes[8..]);
        // Not asked for: removed as ever, and the spare file is still taken.
        let without = Runtime::new(Config { recycle: false, ..config }).unwrap();
        State::new(9, &SIZES).save(&without, &dir).unwrap();
        assert!(names_in(&root.path().join(RECYCLED_DIR)).is_empty());
    }
}

#[test]
fn failed_save_over_a_recycled_file_leaves_nothing() {
    let (root, runtime) = root(&[1, 2]);
    remove(at(root.path(), 1), Disposal::Recycle).unwrap();
    let job = std::sync::Arc::new(ringstow::Job::default());
    job.cancel();
    let error = State::new(3, &SIZES).save_as(&runtime, &at(root.path(), 3), &job).unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }), "{error}");
    assert!(!at(root.path(), 3).exists());
    assert!(names_in(&root.path().join(RECYCLED_DIR)).is_empty());
    State::new(2, &SIZES).assert_at(&runtime, &at(root.path(), 2));
}

#[test]
fn killed_removal_is_not_a_checkpoint_and_is_finished() {
    let (root, runtime) = root(&[1, 2, 3, 4]);
    for step in 1..4 {
        let dir = at(root.path(), step);
        fs::rename(dir.join("manifest.json"), dir.join("manifest.json.retired")).unwrap();
    }
    let found = &Store::found().unwrap().list(root.path()).unwrap()[0];
    assert_eq!(found.status, Status::Incomplete);
    assert!(found.problem.as_ref().unwrap().contains("being removed"), "{:?}", found.problem);
    // By retain, by a save into it, by prune.
    let third = at(root.path(), 3);
    State::new(3, &SIZES).save(&runtime, &third).unwrap();
    assert_no_litter(&third);
    assert_eq!(remove(at(root.path(), 1), Disposal::Recycle).unwrap().recycled, 1);
    let swept = prune(root.path()).unwrap();
    assert!(swept.removed.contains(&at(root.path(), 2)), "{swept:?}");
    assert_eq!(names_in(root.path()), [RECYCLED_DIR, "step-3", "step-4"]);
}

#[test]
fn remove_refuses_other_directories_and_running_saves() {
    let (root, _) = root(&[1]);
    let dir = at(root.path(), 1);
    let session = ringstow::Store::found().unwrap().begin(&dir, 1).unwrap();
    assert!(matches!(remove(&dir, Disposal::Remove), Err(Error::Busy { .. })));
    drop(session);
    let error = remove(root.path(), Disposal::Remove).unwrap_err();
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
    fs::write(dir.join("manifest.json"), "rubbish").unwrap();
    assert!(remove(&dir, Disposal::Remove).is_err());
    assert!(shard(&dir).exists());
}

#[test]
fn remove_refuses_a_symlink() {
    let (root, runtime) = root(&[1]);
    let latest = root.path().join("latest");
    symlink("step-1", &latest).unwrap();
    for name in ["latest", "latest/", "latest/."] {
        let error = remove(root.path().join(name), Disposal::Remove).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        assert_says(&error, &["latest is a link to", "step-1: pass that"]);
    }
    State::new(1, &SIZES).assert_at(&runtime, &latest);
    fs::remove_file(&latest).unwrap();
    symlink("nowhere", &latest).unwrap();
    let error = remove(&latest, Disposal::Remove).unwrap_err();
    assert_says(&error, &["following the link", "latest"]);
    // Links above it are no matter.
    let above = root.path().join("above");
    symlink(root.path(), &above).unwrap();
    remove(above.join("step-1"), Disposal::Remove).unwrap();
    assert!(!at(root.path(), 1).exists());
}

#[test]
fn rank_shares_are_not_counted_as_steps() {
    let (root, _) = root(&[7]);
    let ranks: Vec<PathBuf> =
        (0..3).map(|rank| root.path().join(format!("rank{rank:05}"))).collect();
    for dir in &ranks {
        State::new(1, &SIZES).save(&runtime(), dir).unwrap();
    }
    let retained = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!((retained.kept, retained.removed), (vec![at(root.path(), 7)], vec![]));
    let left: Vec<&Path> = retained.left.iter().map(|left| left.path.as_path()).collect();
    assert_eq!(left, ranks);
    assert!(retained.left[0].reason.contains("one rank's share"));
    assert!(ranks.iter().all(|dir| shard(dir).exists()));
}

/// Who could read the earlier checkpoint is not asked to read the next: a file is as new ones are, or a new one.
#[test]
fn files_of_another_owner_mode_or_acl_are_not_written_over() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::fs::chown;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    let owner = |path: &Path| {
        let found = fs::metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    let owned = |path: &Path, user, group| {
        let done = chown(path, user, group).is_ok();
        if !done {
            rig::missing("only root can give files away");
        }
        done
    };
    let users = |path: &Path| owned(path, Some(4242), None);
    let groups = |path: &Path| owned(path, None, Some(4242));
    let private = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        true
    };
    for change in [&private as &dyn Fn(&Path) -> bool, &set_acl, &users, &groups] {
        let (root, runtime) = root(&[1]);
        let (first, second) = (at(root.path(), 1), at(root.path(), 2));
        let (old, mine) = (mode(&shard(&first)), owner(&shard(&first)));
        if !change(&shard(&first)) {
            continue;
        }
        remove(&first, Disposal::Recycle).unwrap();
        let state = State::new(2, &SIZES);
        let report = state.save(&runtime, &second).unwrap();
        assert_eq!(report.recycled_bytes, 0);
        assert!(report.moved.fallbacks.iter().any(|f| f.reason.contains("mode or ACL")));
        assert_eq!((mode(&shard(&second)), owner(&shard(&second))), (old, mine));
        let acl =
            rustix::fs::getxattr(shard(&second), "system.posix_acl_access", &mut [0_u8; 64][..]);
        assert!(acl.is_err());
        state.assert_at(&runtime, &second);
        assert!(names_in(&root.path().join(RECYCLED_DIR)).is_empty());
    }
}

#[cfg(debug_assertions)] // the seam exists in these builds only
#[test]
fn rank_that_loses_the_race_for_a_recycled_file_writes_a_new_one() {
    use ringstow::internals::sys::seam::{Call, Outcome, on_thread};
    let (root, runtime) = root(&[1]);
    remove(at(root.path(), 1), Disposal::Recycle).unwrap();
    let dir = at(root.path(), 2);
    let session = ringstow::Store::found().unwrap().begin(&dir, 1).unwrap();
    let _another_takes_it = on_thread(|_, call, on| {
        if call == Call::Rename && on.extension().is_some_and(|end| end == "spare") {
            fs::remove_file(on).unwrap();
        }
        Outcome::Pass
    });
    let state = crate::common::held::only(b"bytes".to_vec());
    let (receipt, report) =
        store::write_rank(&runtime, &state, 0, &dir, &Default::default()).unwrap();
    assert_eq!(report.recycled_bytes, 0);
    let tree = no_values();
    session.commit(vec![receipt], tree).unwrap();
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), b"bytes");
}
