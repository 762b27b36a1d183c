//! Checkpoints whose ranks saved each by itself: found, passed over and removed as one.

mod common;

use common::{State, assert_says, names_in, runtime, scratch, step_at};
use ringstow::internals::format::names;
use ringstow::internals::store::{Found, Status, Swept, remove_recycled};
use ringstow::{
    Checkpoint, Config, Disposal, Dtype, Error, RankShare, Retention, Session, StateDict, Value,
    latest, list, prune, retain, verify,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves one rank's share, as a rank does that talks to no other.
fn save_part(whole: &Path, rank: u32, ranks: u32, save: &str) {
    let part_of = RankShare { rank, ranks, save: save.into() };
    save_part_as(whole, rank, part_of);
}

fn save_part_as(whole: &Path, rank: u32, part_of: RankShare) {
    let (dir, runtime) = (part(whole, rank), runtime());
    let data = vec![rank as u8; 9000];
    let mut state = StateDict::new();
    state.bytes("w", Dtype::U8, &[9000], &data).unwrap();
    let session = Session::begin_with(&dir, 1, runtime.config()).unwrap().rank_share(part_of);
    let (receipt, _) =
        ringstow::internals::store::write_rank(&runtime, &state, 0, &dir, &Arc::default()).unwrap();
    let step = Value::Dict(vec![(Value::from("step"), Value::Int(i64::from(rank)))]);
    session.commit(vec![receipt], step.to_json().unwrap()).unwrap();
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
    let mut found = list(root).unwrap();
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
    let found = list(root.path()).unwrap();
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
    assert_eq!(only(&whole.path).path, whole.path, "also where it is asked for itself");
}

#[test]
fn a_whole_cannot_be_opened_and_says_what_can() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    for error in [
        Checkpoint::open(&whole).unwrap_err(),
        Checkpoint::open_foreign(&whole).unwrap_err(),
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
    let found = list(root.path()).unwrap();
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
    assert_eq!(list(root.path()).unwrap().len(), 2);
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

#[test]
fn retain_counts_a_whole_once_and_removes_all_of_it() {
    for disposal in [Disposal::Remove, Disposal::Recycle] {
        let root = root(&[1, 2, 3]);
        fs::write(part(&at(root.path(), 2), 1).join("notes.txt"), "mine").unwrap();
        save_part(&at(root.path(), 9), 0, 3, "half");
        let plan = ringstow::internals::store::retain_plan(
            root.path(),
            &Retention { disposal, ..Retention::new(1) },
            &Config::default(),
        )
        .unwrap();
        let done = retain(root.path(), 1, disposal).unwrap();
        assert_eq!(plan, done);
        assert_eq!(done.kept, [at(root.path(), 3)]);
        assert_eq!(done.removed, [at(root.path(), 1), at(root.path(), 2)]);
        assert_eq!(done.left.len(), 1);
        assert!(done.left[0].reason.contains("ranks 1, 2"), "{:?}", done.left);
        assert_eq!(names_in(root.path()), ["step-2", "step-3", "step-9"], "no spare files");
        assert_eq!(names_in(&at(root.path(), 2)), ["rank00001"], "what others put into it stays");
        assert_eq!(names_in(&part(&at(root.path(), 2), 1)), ["notes.txt"]);
        assert_eq!(latest(root.path()).unwrap(), Some(at(root.path(), 3)));
    }
}

#[test]
fn killed_removal_is_no_checkpoint_and_is_finished() {
    // So many manifests renamed, and then so many parts gone.
    for (taken_down, gone) in [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)] {
        let root = root(&[7, 8]);
        let whole = at(root.path(), 7);
        (0..taken_down).for_each(|rank| take_down(&whole, rank));
        (0..gone).for_each(|rank| fs::remove_dir_all(part(&whole, rank)).unwrap());
        let found = &list(root.path()).unwrap()[0];
        assert_eq!(found.status, Status::Incomplete);
        assert!(found.problem.as_ref().unwrap().contains("being removed"), "{found:?}");
        let done = retain(root.path(), 5, Disposal::Remove).unwrap();
        assert_eq!((done.removed, done.left), (vec![whole], vec![]));
        assert_eq!(names_in(root.path()), ["step-8"]);
    }
}

#[test]
fn no_shard_goes_before_every_part_is_taken_down() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    // The third manifest cannot be renamed: whoever removes it ends there.
    let obstacle = part(&whole, 2).join(names::REMOVAL_MARK).join("obstacle");
    fs::create_dir_all(&obstacle).unwrap();
    retain(root.path(), 1, Disposal::Remove).unwrap();
    assert!(matches!(ringstow::remove(&whole, Disposal::Remove).unwrap_err(), Error::Io { .. }));
    for rank in 0..2 {
        let shards = ["manifest.json.retired", "rank00000-0.safetensors"];
        assert_eq!(names_in(&part(&whole, rank)), shards);
    }
    assert_incomplete(root.path(), &["being removed", "ringstow prune"]);
    fs::remove_dir_all(obstacle.parent().unwrap()).unwrap();
    let done = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!(done.removed, std::slice::from_ref(&whole));
    assert!(!whole.exists());
}

#[test]
fn share_saved_after_a_killed_removal_stays() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    (0..3).for_each(|rank| take_down(&whole, rank));
    save_part(&whole, 1, 3, "b-7");
    let done = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!((done.removed, done.left.len()), (vec![], 1));
    assert_eq!(step_at(&part(&whole, 1)), 1);
    save_part(&whole, 0, 3, "b-7");
    save_part(&whole, 2, 3, "b-7");
    assert_eq!(latest(root.path()).unwrap(), Some(whole));
}

#[test]
fn removal_of_damaged_shares_hinders_no_other() {
    let root = root(&[6, 7, 8]);
    let whole = at(root.path(), 7);
    take_down(&whole, 0);
    flip_last_byte(&part(&whole, 1).join(names::MANIFEST));
    let done = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!(done.removed, [at(root.path(), 6)]);
    assert!(done.left[0].reason.contains("rank00001/manifest.json"), "{:?}", done.left);
    assert_eq!(step_at(&part(&whole, 2)), 2);
}

#[test]
fn retain_leaves_shares_without_a_save_alone() {
    let root = root(&[7]);
    let unknown = at(root.path(), 1);
    for rank in 0..2 {
        State::new(1, &[100]).save(&runtime(), &part(&unknown, rank)).unwrap();
    }
    let done = retain(root.path(), 1, Disposal::Remove).unwrap();
    assert_eq!((done.kept, done.removed), (vec![at(root.path(), 7)], vec![]));
    assert!(done.left[0].reason.contains("not known"), "{:?}", done.left);
    // Asked for by name, it goes; also in a second call, after a kill.
    take_down(&unknown, 0);
    ringstow::remove(&unknown, Disposal::Recycle).unwrap();
    assert_eq!(names_in(root.path()), ["step-7"]);
}

#[test]
fn what_cannot_be_removed_whole_is_not_touched() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    let saving = Session::begin(part(&whole, 2), 1).unwrap();
    let busy = ringstow::remove(&whole, Disposal::Remove).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(saving);
    assert_eq!(latest(root.path()).unwrap(), Some(whole.clone()));
    flip_last_byte(&part(&whole, 2).join(names::MANIFEST));
    assert!(matches!(
        ringstow::remove(&whole, Disposal::Remove).unwrap_err(),
        Error::Corrupt { .. }
    ));
    assert_eq!(step_at(&part(&whole, 0)), 0);
    // Nor is there anything to remove where nobody has committed.
    let killed = at(root.path(), 8);
    fs::create_dir_all(part(&killed, 0)).unwrap();
    fs::write(part(&killed, 0).join("rank00000-0.safetensors.part"), "half").unwrap();
    let error = ringstow::remove(&killed, Disposal::Remove).unwrap_err();
    assert_says(&error, &["no rank's share is committed", "prune"]);
    assert_eq!(prune(&killed).unwrap().removed.len(), 2);
}

#[test]
fn retain_says_which_spare_files_it_removes() {
    let root = scratch();
    let spares = root.path().join(names::RECYCLED_DIR);
    fs::create_dir(&spares).unwrap();
    for name in ["rank00000-0.spare", "rank00001-0.spare"] {
        fs::write(spares.join(name), "old").unwrap();
    }
    let all = [spares.join("rank00000-0.spare"), spares.join("rank00001-0.spare"), spares.clone()];
    let config = Config::default();
    assert!(
        ringstow::internals::store::retain_plan(
            root.path(),
            &Retention { disposal: Disposal::Recycle, ..Retention::new(1) },
            &config
        )
        .unwrap()
        .removed_recycled
        .is_empty()
    );
    let plan =
        ringstow::internals::store::retain_plan(root.path(), &Retention::new(1), &config).unwrap();
    assert_eq!(plan.removed_recycled, all);
    assert!(all[0].exists(), "a plan changes nothing");
    assert_eq!(retain(root.path(), 1, Disposal::Remove).unwrap(), plan);
    assert!(!spares.exists());

    // A file of somebody else's keeps the directory.
    fs::create_dir(&spares).unwrap();
    fs::write(spares.join("notes.txt"), "mine").unwrap();
    fs::write(&all[0], "old").unwrap();
    assert_eq!(remove_recycled(root.path(), &config).unwrap(), all[..1]);
    assert!(spares.join("notes.txt").exists());
}

/// Uncommitted shards in a part, as a killed save leaves them.
fn leave_half(whole: &Path, rank: u32) -> PathBuf {
    let left = part(whole, rank).join("rank00000-0.g9.safetensors.part");
    fs::create_dir_all(part(whole, rank)).unwrap();
    fs::write(&left, "half").unwrap();
    left
}

/// Prunes, after looking whether it says beforehand what it will do.
fn prune_as_planned(dir: &Path) -> Swept {
    let config = Config::default();
    let plan = ringstow::internals::store::prune_plan(dir, &config).unwrap();
    let done = prune(dir).unwrap();
    assert_eq!(plan, done);
    done
}

#[test]
fn prune_clears_up_what_killed_saves_left_in_parts() {
    let root = root(&[6, 7]);
    let (whole, killed) = (at(root.path(), 7), at(root.path(), 8));
    // One save over a part was killed while it wrote, one between its commit and its last rename.
    let half = leave_half(&whole, 1);
    let shard = part(&whole, 2).join("rank00000-0.safetensors");
    fs::rename(&shard, part(&whole, 2).join("rank00000-0.safetensors.part")).unwrap();
    // Of step 8 a rank has committed, two were killed, and one is saving.
    save_part(&killed, 0, 4, "a-8");
    leave_half(&killed, 1);
    let halves = [leave_half(&killed, 1), leave_half(&killed, 2)];
    let saving = Session::begin(part(&killed, 3), 1).unwrap();

    let done = prune_as_planned(root.path());
    let emptied = [part(&killed, 1), part(&killed, 2)];
    let [first, second] = &halves;
    assert_eq!(done.removed, [&half, first, &emptied[0], second, &emptied[1]].map(PathBuf::from));
    assert_eq!(done.renamed, [shard]);
    assert_eq!(done.left.len(), 1, "{done:?}");
    assert_eq!(done.left[0].path, part(&killed, 3));
    assert!(done.left[0].reason.contains("in progress"), "{done:?}");
    assert_eq!(names_in(&killed), ["rank00000", "rank00003"]);
    drop(saving);
    assert_eq!(latest(root.path()).unwrap(), Some(whole.clone()));
    (0..3).for_each(|rank| assert_eq!(step_at(&part(&whole, rank)), i64::from(rank)));
}

#[test]
fn prune_removes_shares_that_were_never_committed() {
    let root = root(&[7]);
    let killed = at(root.path(), 8);
    (0..2).for_each(|rank| drop(leave_half(&killed, rank)));
    let done = prune_as_planned(root.path());
    assert_eq!(done.removed.last(), Some(&killed));
    assert_eq!(names_in(root.path()), ["step-7"]);
}

#[test]
fn prune_finishes_a_killed_removal_of_a_whole() {
    for (taken_down, gone) in [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)] {
        for asked_for_itself in [false, true] {
            let root = root(&[7, 8]);
            let whole = at(root.path(), 7);
            (0..taken_down).for_each(|rank| take_down(&whole, rank));
            (0..gone).for_each(|rank| fs::remove_dir_all(part(&whole, rank)).unwrap());
            fs::create_dir(whole.join(names::RECYCLED_DIR)).unwrap();
            let done = prune_as_planned(if asked_for_itself { &whole } else { root.path() });
            assert_eq!(done, Swept { removed: vec![whole], ..Swept::default() });
            assert_eq!(names_in(root.path()), ["step-8"]);
        }
    }
}

#[test]
fn killed_removal_waits_while_a_rank_saves() {
    let root = root(&[7, 8]);
    let whole = at(root.path(), 7);
    take_down(&whole, 0);
    let saving = Session::begin(part(&whole, 2), 1).unwrap();
    let retained = retain(root.path(), 5, Disposal::Remove).unwrap();
    let pruned = prune(root.path()).unwrap();
    for left in [retained.left, pruned.left] {
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(left[0].path, whole);
        assert!(left[0].reason.contains("in progress"), "{left:?}");
    }
    // Nothing was touched, least of all what says that it was being removed.
    assert!(part(&whole, 0).join(names::REMOVAL_MARK).exists());
    assert_eq!(step_at(&part(&whole, 1)), 1);
    drop(saving);
    prune_as_planned(root.path());
    assert_eq!(names_in(root.path()), ["step-8"]);
}

#[test]
fn prune_keeps_shares_of_a_later_save() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    (0..3).for_each(|rank| take_down(&whole, rank));
    save_part(&whole, 1, 3, "b-7");
    prune_as_planned(root.path());
    assert_eq!(names_in(&whole), ["rank00001"]);
    assert_eq!(step_at(&part(&whole, 1)), 1);
}

#[test]
fn removal_killed_at_its_end_leaves_nothing() {
    for finish in [
        |whole: &Path| drop(prune(whole).unwrap()),
        |whole: &Path| {
            drop(ringstow::remove(whole, Disposal::Remove).unwrap());
        },
    ] {
        let root = root(&[7, 8]);
        let whole = at(root.path(), 7);
        (0..3).for_each(|rank| take_down(&whole, rank));
        // Of the first part all but its directory had gone.
        let first = part(&whole, 0);
        names_in(&first).iter().for_each(|name| fs::remove_file(first.join(name)).unwrap());
        finish(&whole);
        assert_eq!(names_in(root.path()), ["step-8"]);
    }
}

#[test]
fn recycled_files_go_while_a_share_marks_the_removal() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    let spares = whole.join(names::RECYCLED_DIR);
    fs::create_dir(&spares).unwrap();
    fs::write(spares.join("rank00000-0.spare"), "old").unwrap();
    // The first part cannot be removed: whoever removes the whole ends there.
    fs::remove_file(part(&whole, 0).join(names::MANIFEST)).unwrap();
    fs::create_dir(part(&whole, 0).join(names::REMOVAL_MARK)).unwrap();
    assert!(matches!(ringstow::remove(&whole, Disposal::Remove).unwrap_err(), Error::Io { .. }));
    assert!(!spares.exists());
    assert!(part(&whole, 2).join(names::REMOVAL_MARK).exists());
}
