//! A process is killed before each system call of an operation in turn.

use crate::common::place::{Place, SIZES, WAYS, Way};
use crate::common::{State, assert_no_litter_in, names_in, scratch, step_with};
use crate::{alone, export_model};
use ringstow::internals::format::names;
use ringstow::{Checkpoint, Disposal, Retention, Status};
use std::path::{Path, PathBuf};

/// Says to a child process what it does.
const CHILD_DOES: &str = "RINGSTOW_TEST_EACH_CALL_DOES";

#[derive(Debug, Clone, Copy)]
enum Does {
    /// A save of step 2; by ranks, from the session's begin to its commit.
    Save,
    Remove,
    Retain,
    Prune,
    Export,
}

const ALL: [Does; 5] = [Does::Save, Does::Remove, Does::Retain, Does::Prune, Does::Export];

/// The child's life, when started by a test below.
#[test]
fn child_that_does_one_thing() {
    let Some(place) = Place::of_parent() else { return };
    let told = std::env::var(CHILD_DOES).unwrap();
    let does = ALL.into_iter().find(|does| format!("{does:?}") == told).unwrap();
    match does {
        Does::Save => place.save(2),
        Does::Remove => place.remove(),
        Does::Retain => retain(&place),
        Does::Prune => place.prune(),
        Does::Export => export_model(&place),
    }
    .unwrap();
}

fn retain(place: &Place) -> ringstow::Result<()> {
    let disposal = Disposal::of(place.config());
    let retention = Retention { disposal, ..Retention::new(1) };
    ringstow::internals::store::retain(place.root.join("run"), &retention, place.config()).map(drop)
}

/// Does it in a child process; says whether that came to its end.
fn in_child(place: &Place, does: Does, seam: &str) -> bool {
    let variables = [(CHILD_DOES, &*format!("{does:?}")), ("RINGSTOW_TEST_SEAM", seam)];
    place.in_child("killed::child_that_does_one_thing", &variables)
}

/// Kills it before each call in turn; `check` gets the number of the call, and whether it came to its end.
fn kill_at_each_call(
    way: Way,
    does: Does,
    prepare: impl Fn(&Place),
    mut check: impl FnMut(&Place, u64, bool),
) {
    let _alone = alone();
    for n in 1.. {
        let root = scratch();
        let place = Place::with_step_1(way, root.path());
        prepare(&place);
        let ended = in_child(&place, does, &format!("kill:{n}"));
        check(&place, n, ended);
        if ended {
            assert!(n > 5, "{way:?}: only {n} calls pass the seam");
            return;
        }
    }
}

#[test]
fn save_killed_at_any_call_leaves_old_or_new() {
    for way in WAYS {
        let mut committed = 0;
        kill_at_each_call(
            way,
            Does::Save,
            |_| (),
            |place, n, ended| {
                let found = step_with(place.config(), &place.dir());
                assert!(found == 2 || (found == 1 && !ended), "{way:?}, call {n}: step {found}");
                committed += u64::from(found == 2 && !ended);
                place.assert_whole(found);
                assert!(!ended || (n > 20 && committed > 0), "{way:?}: {n} calls, {committed}");
            },
        );
    }
}

#[test]
fn removal_killed_at_any_call_is_undone_or_prunable() {
    for way in WAYS {
        kill_at_each_call(
            way,
            Does::Remove,
            |_| (),
            |place, n, ended| {
                if place.exists() {
                    assert!(!ended, "{way:?}: it is still there");
                    return place.assert_whole(1);
                }
                if n % 2 == 0 {
                    place.prune().unwrap();
                    let dirs = [place.dir(), place.root.join("disk/checkpoint")];
                    place.assert_nothing_left(&dirs, &format!("call {n}"));
                }
                place.save(2).unwrap();
                place.assert_whole(2);
            },
        );
    }
}

fn step_dir(place: &Place, step: i64) -> PathBuf {
    place.root.join("run").join(format!("step-{step}"))
}

#[test]
fn retain_killed_at_any_call_keeps_the_newest_and_goes_on() {
    let prepare = |place: &Place| {
        place.remove().unwrap();
        (1..=3).for_each(|step| place.save_to(step, &step_dir(place, step)).unwrap());
    };
    for way in WAYS {
        kill_at_each_call(way, Does::Retain, prepare, |place, n, ended| {
            let (what, run) = (format!("{way:?}, call {n}"), place.root.join("run"));
            let committed = || -> Vec<PathBuf> {
                let found = ringstow::internals::store::list(&run, place.config()).unwrap();
                let whole = found.into_iter().filter(|found| found.status == Status::Committed);
                whole.map(|found| found.path).collect()
            };
            for path in committed() {
                let step = step_with(place.config(), &path);
                State::new(step, &SIZES).assert_at(&place.runtime, &path);
            }
            assert!(committed().contains(&step_dir(place, 3)), "{what}");
            assert!(!ended || committed().len() == 1, "{what}");
            if n % 2 == 0 {
                place.prune().unwrap();
                assert_only_checkpoints(place, &committed(), &what);
            }
            retain(place).unwrap();
            assert_eq!(committed(), [step_dir(place, 3)], "{what}");
            assert_only_checkpoints(place, &committed(), &what);
            place.save(2).unwrap();
            place.assert_whole(2);
        });
    }
}

/// Nothing but these checkpoints and recycled files is there, in any of the directories.
#[track_caller]
fn assert_only_checkpoints(place: &Place, committed: &[PathBuf], what: &str) {
    for path in committed {
        assert_no_litter_in(place.config(), path);
    }
    let known = |dir: &Path| committed.iter().any(|path| path.file_name() == dir.file_name());
    for parent in ["run", "disk"].map(|name| place.root.join(name)) {
        for dir in names_in(&parent).iter().map(|name| parent.join(name)) {
            let recycled = place.way == Way::Recycled && dir.ends_with(".ringstow-spares");
            let left = if known(&dir) || recycled { Vec::new() } else { names_in(&dir) };
            assert!(left.is_empty(), "{what}: {left:?} in {}", dir.display());
        }
    }
}

#[test]
fn prune_killed_at_any_call_keeps_the_checkpoint_and_can_be_repeated() {
    for way in WAYS {
        // A killed removal beside a killed save.
        let prepare = |place: &Place| {
            let removed = step_dir(place, 7);
            place.save_to(7, &removed).unwrap();
            std::fs::rename(removed.join(names::MANIFEST), removed.join(names::REMOVAL_MARK))
                .unwrap();
            let is_part = |name: &String| name.ends_with(".part");
            let left = (1..).find(|n| {
                let ended = in_child(place, Does::Save, &format!("kill:{n}"));
                ended || names_in(&place.dir()).iter().any(is_part)
            });
            assert!(left.is_some() && names_in(&place.dir()).iter().any(is_part));
        };
        kill_at_each_call(way, Does::Prune, prepare, |place, n, ended| {
            let what = format!("{way:?}, call {n}");
            let step = step_with(place.config(), &place.dir());
            State::new(step, &SIZES).assert_at(&place.runtime, &place.dir());
            if !ended {
                place.prune().unwrap();
            }
            assert_only_checkpoints(place, &[place.dir()], &what);
            place.assert_whole(step);
        });
    }
}

#[test]
fn export_killed_at_any_call_is_whole_or_refused_and_can_be_repeated() {
    kill_at_each_call(
        Way::Plain,
        Does::Export,
        |_| (),
        |place, n, ended| {
            let to = place.root.join("model");
            let tensors = || Checkpoint::open_foreign(&to).map(|found| found.tensors().len());
            match tensors() {
                Ok(found) => assert_eq!(found, SIZES.len(), "call {n}"),
                Err(_) => {
                    assert!(!ended, "call {n}");
                    export_model(place).unwrap();
                }
            }
            assert_eq!(tensors().unwrap(), SIZES.len(), "call {n}");
            assert!(names_in(&to).iter().all(|name| !name.ends_with(".part")), "call {n}");
        },
    );
}

#[test]
fn child_process_gets_the_error_from_its_environment() {
    let _alone = alone();
    let root = scratch();
    let place = Place::with_step_1(Way::Plain, root.path());
    assert!(!in_child(&place, Does::Save, "fail-from:10:5"));
    place.assert_whole(1);
    assert!(!in_child(&place, Does::Save, "nonsense"));
    assert!(in_child(&place, Does::Save, "fail:100000:5"));
}
