//! What `prune` clears up.

use crate::common::{names_in, step_at};
use crate::each_rank::{at, part, root, save_part, take_down};
use ringstow::internals::format::names;
use ringstow::{Config, Disposal, Error, Store, Swept, latest, prune, retain};
use std::fs;
use std::path::{Path, PathBuf};

/// Uncommitted shards in a part, as a killed save leaves them.
fn leave_half(whole: &Path, rank: u32) -> PathBuf {
    let left = part(whole, rank).join("rank00000-0.g9.safetensors.part");
    fs::create_dir_all(part(whole, rank)).unwrap();
    fs::write(&left, "half").unwrap();
    left
}

pub fn prune_as_planned(dir: &Path) -> Swept {
    crate::common::prune_as_planned(dir, &Config::default())
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
    let saving = Store::found().unwrap().begin(part(&killed, 3), 1).unwrap();

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
fn killed_removal_waits_while_a_rank_saves() {
    let root = root(&[7, 8]);
    let whole = at(root.path(), 7);
    take_down(&whole, 0);
    let saving = Store::found().unwrap().begin(part(&whole, 2), 1).unwrap();
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
    // The first part cannot be removed, so a removal of the checkpoint stops at it.
    fs::remove_file(part(&whole, 0).join(names::MANIFEST)).unwrap();
    fs::create_dir(part(&whole, 0).join(names::REMOVAL_MARK)).unwrap();
    assert!(matches!(ringstow::remove(&whole, Disposal::Remove).unwrap_err(), Error::Io { .. }));
    assert!(!spares.exists());
    assert!(part(&whole, 2).join(names::REMOVAL_MARK).exists());
}
