//! What is done to a run: each operation, what the run holds before and after it, and in which ways.

use crate::common::place::{Place, SIZES, WAYS, Way};
use crate::common::{EXTRA, State, is_extra, load_all};
use ringstow::internals::format::names;
use ringstow::internals::store;
use ringstow::internals::sys::seam::{Call, fail_if, in_process};
use ringstow::{
    Base, Checkpoint, Disposal, Error, Job, Left, OpenOptions, Promotion, Result, RetainOptions,
    Store,
};
use std::path::{Path, PathBuf};

/// Numbers of checkpoints, `step-1`, each with the number of the state that it holds.
type Contents = &'static [(u32, i64)];

pub struct Operation {
    pub name: &'static str,
    pub ways: &'static [Way],
    pub before: Contents,
    pub after: Contents,
    /// Whether it may do a part of its work and fail: each checkpoint is as before or as after.
    pub partial: bool,
    /// What a test does to the run before, besides saving what is in `before`.
    pub prepare: fn(&Place),
    pub act: fn(&Place) -> Result<()>,
    /// The checkpoint to which the next save goes.
    pub next: u32,
    /// Whether a reader that opened a checkpoint before may find it changed.
    pub changes: bool,
}

const SAVE: Operation = Operation {
    name: "save new",
    ways: &WAYS,
    before: &[(1, 1)],
    after: &[(1, 1), (2, 2)],
    partial: false,
    prepare: |_| (),
    act: |place| place.save_to(2, &step_dir(place, 2)),
    next: 2,
    changes: false,
};

pub const OPERATIONS: [Operation; 13] = [
    SAVE,
    Operation {
        name: "save over",
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1), (2, 3)],
        act: |place| place.save_to(3, &step_dir(place, 2)),
        ..SAVE
    },
    Operation {
        name: "save with base",
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1), (2, 2), (3, 3)],
        prepare: |place| place.save_from(Base::none(), 2, &step_dir(place, 2)).unwrap(),
        act: |place| place.save_from(Base::at(step_dir(place, 2)), 3, &step_dir(place, 3)),
        next: 3,
        ..SAVE
    },
    Operation {
        name: "save over its base",
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1), (2, 3)],
        prepare: |place| place.save_from(Base::none(), 2, &step_dir(place, 2)).unwrap(),
        act: |place| place.save_from(Base::at(step_dir(place, 2)), 3, &step_dir(place, 2)),
        ..SAVE
    },
    Operation { name: "save in the background", act: save_in_background, ways: &SINGLE, ..SAVE },
    Operation {
        name: "copy to new",
        ways: &[Way::Plain, Way::Recycled],
        partial: true, // what it has sent stays for the next one
        prepare: |place| place.save_to(2, &elsewhere(place)).unwrap(),
        act: copy_here,
        ..SAVE
    },
    Operation {
        name: "copy over",
        ways: &[Way::Plain],
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1), (2, 3)],
        partial: true,
        prepare: |place| {
            let created =
                |dir: &Path| Checkpoint::open(dir).map_or(0, |c| c.manifest().created_unix_ms);
            // It replaces older ones alone.
            while created(&elsewhere(place)) <= created(&step_dir(place, 2)) {
                place.save_to(3, &elsewhere(place)).unwrap();
            }
        },
        act: copy_here,
        ..SAVE
    },
    Operation {
        name: "remove",
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1)],
        partial: true,
        act: |place| {
            let disposal = Disposal::of(place.config());
            let removed = store::remove_checkpoint(&step_dir(place, 2), disposal, place.config())?;
            nothing_left(&removed.left)
        },
        ..SAVE
    },
    Operation {
        name: "retain",
        before: &[(1, 1), (2, 2), (3, 3)],
        after: &[(3, 3)],
        partial: true,
        act: |place| {
            let disposal = Disposal::of(place.config());
            let retention = RetainOptions { disposal, ..RetainOptions::new(1) };
            nothing_left(&store::retain(place.run(), &retention, place.config())?.left)
        },
        ..SAVE
    },
    Operation {
        name: "prune",
        before: &[(1, 1), (2, 3)],
        after: &[(1, 1), (2, 3)],
        partial: true,
        prepare: leave_much,
        act: Place::prune,
        next: 4,
        ..SAVE
    },
    Operation {
        name: "slim",
        before: &[(1, 1), (2, 2)],
        after: &[(1, 1), (2, 2)],
        partial: true,
        prepare: |place| {
            let (state, dir) = (State::new(2, &SIZES), step_dir(place, 2));
            match place.way {
                Way::ByRanks => state.save_with_extra_by_ranks(&place.runtime, &dir).unwrap(),
                _ => drop(state.save_with_extra(&place.runtime, &dir).unwrap()),
            }
        },
        act: |place| {
            let drop = [EXTRA.to_owned()];
            nothing_left(&store::slim(&step_dir(place, 2), &drop, place.config())?.left)?;
            let slimmed = OpenOptions::of(place.config()).open(step_dir(place, 2))?;
            assert!(!slimmed.tensors().iter().any(|tensor| is_extra(&tensor.name)));
            Ok(())
        },
        changes: true,
        ..SAVE
    },
    Operation {
        name: "export",
        ways: &[Way::Plain],
        after: SAVE.before,
        act: |place| place.export_to(1, &place.root.join(MODEL)),
        ..SAVE
    },
    Operation { name: "load", after: SAVE.before, act: load, ..SAVE },
];

/// The ways of one process.
const SINGLE: [Way; 3] = [Way::Plain, Way::Recycled, Way::Striped];

/// The directory that an export writes to.
pub const MODEL: &str = "model";

pub fn step_dir(place: &Place, number: u32) -> PathBuf {
    place.run().join(format!("step-{number}"))
}

impl Operation {
    /// Saves what the run holds before.
    pub fn prepare(&self, place: &Place) {
        std::fs::create_dir(place.root.join("disk")).unwrap();
        for (number, state) in self.before {
            place.save_to(*state, &step_dir(place, *number)).unwrap();
        }
        (self.prepare)(place);
        if place.way == Way::Recycled {
            let removed = step_dir(place, 9);
            place.save_to(9, &removed).unwrap();
            store::remove_checkpoint(&removed, Disposal::Recycle, place.config()).unwrap();
        }
    }
}

/// A clean-up that leaves something alone, and says why, has not done all of its work.
fn nothing_left(left: &[Left]) -> Result<()> {
    left.first().map_or(Ok(()), |left| Err(Error::Busy { path: left.path.clone() }))
}

/// A checkpoint on another disk.
fn elsewhere(place: &Place) -> PathBuf {
    place.root.join("fast/source-2")
}

fn copy_here(place: &Place) -> Result<()> {
    let (job, to) = (Job::of(place.config()), step_dir(place, 2));
    let how = Promotion { replace_older: true, ..Promotion::default() };
    store::promote(&place.runtime, &elsewhere(place), &to, how, &job).map(drop)
}

fn save_in_background(place: &Place) -> Result<()> {
    let (store, state) = (Store::new(place.config().clone())?, State::new(2, &SIZES));
    store.save_async(state.into_save(), step_dir(place, 2))?.result().map(drop)
}

/// What is loaded is what was saved.
fn load(place: &Place) -> Result<()> {
    let loaded = load_all(&place.runtime, &step_dir(place, 1))?;
    State::new(1, &SIZES).assert_equals(&loaded);
    Ok(())
}

/// Leaves a save that was killed after its commit (to `step-2`), one that was killed before, and a killed removal.
fn leave_much(place: &Place) {
    let renamed =
        |call, on: &Path| call == Call::Rename && on.ends_with(names::UNCOMMITTED_MANIFEST);
    place.save_to(2, &step_dir(place, 2)).unwrap();
    die_after(|| place.save_to(3, &step_dir(place, 2)), renamed);
    die_after(|| place.save_to(4, &step_dir(place, 4)), |call, _| call == Call::WriteBlock);
    let removed = step_dir(place, 7);
    place.save_to(7, &removed).unwrap();
    std::fs::rename(removed.join(names::MANIFEST), removed.join(names::REMOVAL_MARK)).unwrap();
}

/// Lets no call pass after a certain one, as if the process had been killed.
fn die_after(
    act: impl FnOnce() -> Result<()>,
    last: impl Fn(Call, &Path) -> bool + Send + 'static,
) {
    let mut is_dead = false;
    let _dies = in_process(fail_if(nix::libc::EIO, move |call, on| {
        let was_dead = is_dead;
        is_dead |= last(call, on);
        was_dead
    }));
    act().unwrap_err();
}
