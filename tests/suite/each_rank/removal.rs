//! Removed as one: by `retain` and `remove`.

use crate::common::{State, assert_says, names_in, retain_as_planned, runtime, scratch, step_at};
use crate::each_rank::pruned::prune_as_planned;
use crate::each_rank::{assert_incomplete, at, flip_last_byte, part, root, save_part, take_down};
use ringstow::internals::store;
use ringstow::internals::{format::names, store::prune_with};
use ringstow::{
    Config, Disposal, Error, Pruning, RetainOptions, Status, Store, latest, prune, retain,
};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn retain_counts_a_whole_once_and_removes_all_of_it() {
    for disposal in [Disposal::Remove, Disposal::Recycle] {
        let root = root(&[1, 2, 3]);
        fs::write(part(&at(root.path(), 2), 1).join("notes.txt"), "mine").unwrap();
        save_part(&at(root.path(), 9), 0, 3, "half");
        let options = RetainOptions { disposal, ..RetainOptions::new(1) };
        let done = retain_as_planned(root.path(), &options, &Config::default());
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
    type Finish = fn(&Path, &Path) -> Vec<PathBuf>;
    let finish: [Finish; 3] = [
        |root, _| retain(root, 5, Disposal::Remove).unwrap().removed,
        |root, _| prune_as_planned(root).removed,
        |_, whole| prune_as_planned(whole).removed,
    ];
    // So many manifests renamed, and then so many parts gone.
    for (taken_down, gone) in [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)] {
        for finish in finish {
            let root = root(&[7, 8]);
            let whole = at(root.path(), 7);
            (0..taken_down).for_each(|rank| take_down(&whole, rank));
            (0..gone).for_each(|rank| fs::remove_dir_all(part(&whole, rank)).unwrap());
            fs::create_dir(whole.join(names::RECYCLED_DIR)).unwrap();
            let found = &Store::found().unwrap().list(root.path()).unwrap()[0];
            assert_eq!(found.status, Status::Incomplete);
            assert!(found.problem.as_ref().unwrap().contains("being removed"), "{found:?}");
            assert_eq!(finish(root.path(), &whole), [whole]);
            assert_eq!(names_in(root.path()), ["step-8"]);
        }
    }
}

#[test]
fn no_shard_goes_before_every_part_is_taken_down() {
    let root = root(&[7]);
    let whole = at(root.path(), 7);
    // The third manifest cannot be renamed, so a removal stops at it.
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
    let saving = Store::found().unwrap().begin(part(&whole, 2), 1).unwrap();
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
    let options = RetainOptions { disposal: Disposal::Recycle, ..RetainOptions::new(1) };
    assert!(
        store::retain_plan(root.path(), &options, &config).unwrap().removed_recycled.is_empty()
    );
    let done = retain_as_planned(root.path(), &RetainOptions::new(1), &config);
    assert_eq!(done.removed_recycled, all);
    assert!(!spares.exists());

    // A file of somebody else's keeps the directory.
    fs::create_dir(&spares).unwrap();
    fs::write(spares.join("notes.txt"), "mine").unwrap();
    fs::write(&all[0], "old").unwrap();
    let pruning = Pruning { recycled: true, ..Pruning::default() };
    assert_eq!(prune_with(root.path(), pruning, &config).unwrap().removed, all[..1]);
    assert!(spares.join("notes.txt").exists());
}
