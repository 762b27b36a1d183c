//! What is done to checkpoints while the power may go, and what each moment promises about them.

use crate::common::place::{Place, SIZES, Way};
use crate::common::{State, scratch};
use durable_image::{Journal, Recorder};
use ringstow::internals::format::names;
use ringstow::internals::store;
use ringstow::internals::sys::seam::Outcome;
use ringstow::{Base, Disposal, Error, RetainOptions, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock};

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Act {
    /// Creates a directory, as a save does that is killed then.
    MakeDir(&'static str),
    /// Saves a step to this name.
    Save(&'static str, i64),
    /// Saves a step, and what all such steps have, with the checkpoint of a name as its base: links what it has.
    SaveFrom(&'static str, i64, &'static str),
    /// [`Act::Save`] in the background.
    SaveAsync(&'static str, i64),
    /// Leaves the mark beside a checkpoint that a save under DCP leaves.
    Mark(&'static str),
    /// A save whose nth system call fails.
    SaveFailing(&'static str, i64, u64),
    Remove(&'static str),
    /// Keeps the newest of the steps.
    Retain,
    Prune,
    /// Exports a model to this name, which begins with `model`.
    Export(&'static str, i64),
}

/// Which steps each name may hold; `None`: nothing is committed there.
pub type World = BTreeMap<&'static str, BTreeSet<Option<i64>>>;

#[derive(Debug, Clone)]
pub struct Scenario {
    pub way: Way,
    /// Durable when the power may first go.
    pub before: Vec<Act>,
    pub acts: Vec<Act>,
}

/// A scenario that was carried out.
pub struct Recorded {
    pub place: Place,
    pub journal: Journal,
    /// From which moment on what is promised.
    promised: Vec<(usize, World)>,
    /// Whether every operation could do all it had to.
    pub is_smooth: bool,
    _root: tempfile::TempDir,
}

/// The seam is the whole process': what others do meanwhile would fail, too.
pub static SEAM: RwLock<()> = RwLock::new(());

/// Where the checkpoints are, and the second disk.
pub fn roots(place: &Place) -> [PathBuf; 2] {
    ["run", "disk"].map(|name| place.root.join(name))
}

/// What a name stands for.
pub fn path(place: &Place, name: &str) -> PathBuf {
    place.root.join("run").join(name)
}

impl Scenario {
    /// Carries it out for real.
    pub fn record(&self) -> Recorded {
        let _alone = SEAM.write().unwrap_or_else(PoisonError::into_inner);
        let root = scratch();
        let place = Place::new(self.way, root.path());
        roots(&place).iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let mut world = World::new();
        for act in &self.before {
            act.carry_out(&place).unwrap();
            world = act.after(&world, &Ok(()));
        }
        let recorder = Recorder::new(&roots(&place));
        let fails = Arc::new(AtomicU64::new(0)); // counts down to the call that fails
        let countdown = Arc::clone(&fails);
        let watch = recorder.watch(move |_, _, _| {
            let left = countdown.load(SeqCst);
            countdown.store(left.saturating_sub(1), SeqCst);
            if left == 1 { Outcome::Fail(nix::libc::EIO) } else { Outcome::Pass }
        });
        let mut promised = vec![(0, world.clone())];
        for act in &self.acts {
            promised.push((recorder.moment(), act.during(&world)));
            if let Act::SaveFailing(_, _, n) = act {
                fails.store(*n, SeqCst);
            }
            let done = act.carry_out(&place);
            fails.store(0, SeqCst);
            assert!(done.is_ok() || matches!(act, Act::SaveFailing(..)), "{act:?}: {done:?}");
            world = act.after(&world, &done);
            promised.push((recorder.moment(), world.clone()));
        }
        drop(watch);
        let is_smooth = !self.acts.iter().any(|act| matches!(act, Act::SaveFailing(..)));
        Recorded { place, journal: recorder.journal(), promised, is_smooth, _root: root }
    }
}

impl Recorded {
    /// The moments at which the disk may hold something else than before, or must.
    pub fn moments(&self, journal: &Journal) -> BTreeSet<usize> {
        let promised = self.promised.iter().map(|(moment, _)| *moment);
        journal.moments().into_iter().chain(promised).collect()
    }

    /// What must be there after a crash at a moment.
    pub fn promised(&self, moment: usize) -> &World {
        let so_far = self.promised.iter().take_while(|(from, _)| *from <= moment);
        &so_far.last().expect("the first moment is 0").1
    }
}

impl Act {
    fn carry_out(self, place: &Place) -> ringstow::Result<()> {
        let config = place.config();
        let disposal = Disposal::of(config);
        match self {
            Self::MakeDir(name) => {
                fs::create_dir(path(place, name)).unwrap();
                Ok(())
            }
            Self::Mark(name) => {
                fs::write(path(place, name).join(names::DCP_MARK), names::DCP_MARK_WORDS).unwrap();
                Ok(())
            }
            Self::Save(name, step) | Self::SaveFailing(name, step, _) => {
                place.save_to(step, &path(place, name))
            }
            Self::SaveFrom(name, step, base) => {
                let base = Base::at(path(place, base)).or_none();
                place.save_from(base, step, &path(place, name))
            }
            Self::SaveAsync(name, step) => {
                let store = Store::new(config.clone())?;
                let state = State::new(step, &SIZES).into_save();
                store.save_async(state, path(place, name))?.result().map(drop)
            }
            Self::Remove(name) => {
                let dir = path(place, name);
                store::remove_checkpoint(&dir, disposal, config).map(drop)
            }
            Self::Retain => {
                let retention = RetainOptions { disposal, ..RetainOptions::new(1) };
                store::retain(path(place, ""), &retention, config).map(drop)
            }
            Self::Prune => place.prune(),
            Self::Export(name, step) => place.export_to(step, &path(place, name)),
        }
    }

    /// What each name that it changes leads to afterwards.
    fn changes(self, world: &World) -> Vec<(&'static str, Option<i64>)> {
        match self {
            Self::Save(name, step)
            | Self::SaveFrom(name, step, _)
            | Self::SaveAsync(name, step)
            | Self::SaveFailing(name, step, _)
            | Self::Export(name, step) => vec![(name, Some(step))],
            Self::Remove(name) => vec![(name, None)],
            Self::Retain => {
                let newest = world.values().flatten().max();
                let old = world.iter().filter(|(_, steps)| steps.last() != newest);
                old.map(|(name, _)| (*name, None)).collect()
            }
            Self::MakeDir(_) | Self::Mark(_) | Self::Prune => Vec::new(),
        }
    }

    fn during(self, world: &World) -> World {
        let mut during = world.clone();
        for (name, step) in self.changes(world) {
            during.entry(name).or_insert_with(|| BTreeSet::from([None])).insert(step);
        }
        during
    }

    fn after(self, world: &World, done: &ringstow::Result<()>) -> World {
        let mut after = world.clone();
        match done {
            Ok(()) => after.extend(
                self.changes(world).into_iter().map(|(name, step)| (name, BTreeSet::from([step]))),
            ),
            Err(Error::NotDurable { .. }) => after = self.during(world),
            // What was there is still there, and if nothing was, nothing is.
            Err(_) => {
                for (name, _) in self.changes(world) {
                    after.entry(name).or_insert_with(|| BTreeSet::from([None]));
                }
            }
        }
        after
    }
}
