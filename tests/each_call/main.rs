//! An operation meets trouble at each of its system calls in turn: the call fails, all calls from it on fail, or the
//! process ends before it (`killed.rs`). Each time the earlier or the new checkpoint loads whole, and the next save
//! works.
#![cfg(debug_assertions)] // the seam exists in these builds only

#[path = "../common/mod.rs"]
mod common;
mod killed;

use common::place::{Place, SIZES, WAYS, Way};
use common::{State, names_in, scratch, small_config, step_with};
use ringstow::internals::sys::seam::{Outcome, Watch, from_nth, in_process, nth};
use ringstow::{Checkpoint, Config, Dtype, Error, Runtime, StateDict};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const EIO: i32 = 5;

/// The seam is the whole process': one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes trouble at each call of `operation` in turn, until it has fewer calls than that.
fn at_each_call(
    way: Way,
    arm: impl Fn(u64) -> Watch,
    operation: impl Fn(&Place) -> ringstow::Result<()>,
    check: impl Fn(&Place, u64, ringstow::Result<()>),
) {
    for n in 1.. {
        let root = scratch();
        let place = Place::with_step_1(way, root.path());
        let watch = arm(n);
        let done = operation(&place);
        let calls = watch.take().len() as u64;
        drop(watch);
        check(&place, n, done);
        if calls < n {
            assert!(n > 20, "{way:?}: only {calls} calls pass the seam");
            return;
        }
    }
}

/// After a save of step 2.
#[track_caller]
fn assert_old_or_new(place: &Place, n: u64, done: ringstow::Result<()>) {
    let found = step_with(place.config(), &place.dir());
    let way = place.way;
    match done {
        Ok(()) => assert_eq!(found, 2, "{way:?}, call {n}"),
        Err(Error::NotDurable { .. }) => assert_eq!(found, 2, "{way:?}, call {n}"),
        Err(error) => assert_eq!(found, 1, "{way:?}, call {n}: {error}"),
    }
    place.assert_whole(found);
}

#[test]
fn save_with_a_failing_call_leaves_old_or_new() {
    let _alone = alone();
    for way in WAYS {
        let arm = |n| in_process(nth(n, Outcome::Fail(EIO)));
        at_each_call(way, arm, |place| place.save(2), assert_old_or_new);
    }
}

#[test]
fn save_on_a_dead_disk_leaves_old_or_new() {
    let _alone = alone();
    for way in WAYS {
        let arm = |n| in_process(from_nth(n, Outcome::Fail(EIO)));
        at_each_call(way, arm, |place| place.save(2), assert_old_or_new);
    }
}

#[test]
fn removal_with_a_failing_call_is_undone_or_prunable() {
    let _alone = alone();
    for way in WAYS {
        let arm = |n| in_process(nth(n, Outcome::Fail(EIO)));
        at_each_call(way, arm, Place::remove, |place, n, done| {
            if place.exists() {
                assert!(done.is_err(), "{way:?}, call {n}: it is still there");
                return place.assert_whole(1);
            }
            place.prune().unwrap();
            // Where a lock failed, the marker of a stripe directory stays: another host may be about to save there.
            place.assert_nothing_left(&[place.dir()], &format!("call {n}"));
            place.save(2).unwrap();
            place.assert_whole(2);
        });
    }
}

/// A model of two files and an index.
fn export_model(place: &Place) -> ringstow::Result<()> {
    let config = Config { shard_bytes: 20_000, ..small_config() };
    let (runtime, state) = (Runtime::new(config).unwrap(), State::new(1, &SIZES));
    let mut model = StateDict::new();
    for (name, data) in &state.tensors {
        model.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
    }
    let to = place.root.join("model");
    ringstow::internals::store::export(&runtime, &model, &to, &Arc::default()).map(drop)
}

#[test]
fn export_with_a_failing_call_is_whole_or_refused_and_can_be_repeated() {
    let _alone = alone();
    for from in [false, true] {
        let arm = |n| match from {
            false => in_process(nth(n, Outcome::Fail(EIO))),
            true => in_process(from_nth(n, Outcome::Fail(EIO))),
        };
        at_each_call(Way::Plain, arm, export_model, |place, n, done| {
            let to = place.root.join("model");
            let opened = Checkpoint::open_foreign(&to).map(|found| found.tensors().len());
            match (&done, &opened) {
                (Ok(()), Ok(tensors)) => assert_eq!(*tensors, SIZES.len(), "call {n}"),
                (Err(_), Err(_)) => export_model(place).unwrap(),
                // Nor could the files be removed: renamed, and not durable.
                (Err(_), Ok(tensors)) if from => assert_eq!(*tensors, SIZES.len(), "call {n}"),
                _ => panic!("call {n}: {done:?}, {opened:?}, {:?}", names_in(&to)),
            }
            assert_eq!(Checkpoint::open_foreign(&to).unwrap().tensors().len(), SIZES.len());
        });
    }
}
