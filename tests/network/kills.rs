//! Saves that are killed before each of their calls.

use crate::ALONE;
use crate::common::place::{Place, SIZES, WAYS, Way};
use crate::common::{State, names_in, scratch, step_with};
use ringstow::internals::sys::file_system::play;
use ringstow::internals::sys::seam::{Outcome, in_process};

/// The life of a child that is killed.
#[test]
fn child_that_saves_once() {
    if let Some(place) = Place::of_parent() {
        place.save(2).unwrap();
    }
}

/// Kills a save at each of its calls: the checkpoint loads, the next save works, and nothing else is left once somebody
/// promises that nobody else writes.
fn kill_at_each_call(way: Way, options: &str) {
    let mut committed = 0;
    for n in 1.. {
        let root = scratch();
        let _played = play(root.path(), "nfs4", options);
        let place = Place::with_step_1(way, root.path());
        let (kill, dir) = (format!("kill:{n}"), root.path().display());
        let played = format!("nfs4:{options}:{dir}");
        let variables = [("RINGSTOW_TEST_SEAM", &*kill), ("RINGSTOW_TEST_FILE_SYSTEM", &played)];
        let ended = place.in_child("kills::child_that_saves_once", &variables);
        let found = step_with(place.config(), &place.dir());
        assert!(found == 2 || (found == 1 && !ended), "{way:?}, call {n}: step {found}");
        committed += u64::from(found == 2 && !ended);
        place.save(3).unwrap();
        State::new(3, &SIZES).assert_at(&place.runtime, &place.dir());
        let prune = ringstow::internals::store::prune_with;
        prune(place.dir().parent().unwrap(), ALONE, place.config()).unwrap();
        State::new(3, &SIZES).assert_at(&place.runtime, &place.dir());
        let left = names_in(&place.dir());
        assert!(!left.iter().any(|name| name.ends_with(".part")), "{way:?}, call {n}: {left:?}");
        if ended {
            assert!(n > 20 && committed > 0, "{way:?}: {n} calls, {committed} committed");
            break;
        }
    }
}

#[test]
fn save_killed_at_any_call_without_locks_leaves_old_or_new() {
    let _alone = in_process(|_, _, _| Outcome::Pass);
    for way in WAYS {
        kill_at_each_call(way, "nolock");
    }
}

#[test]
fn save_killed_at_any_call_with_locks_leaves_old_or_new() {
    let _alone = in_process(|_, _, _| Outcome::Pass);
    kill_at_each_call(Way::ByRanks, "");
}
