//! Gives each save its place among the saves of its run: after all that are there, whatever the clock says.
//!
//! Reads the first bytes of the manifests beside it. What cannot be read does not count: a save never fails for that.

use crate::error::{Error, Result};
use crate::format::manifest::{Age, Head, Manifest, Order, Place};
use crate::format::{StepName, names};
use crate::store::layout::rank_dirs;
use crate::sys::chance::now_unix_ms;
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::run_lock::RunLock;
use crate::sys::{dir, file};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A clock that is further ahead than this is wrong: its time is not followed.
const AHEAD_MS_MAX: u64 = 24 * 60 * 60 * 1000;

/// A clock beyond this (the year 144683) gives no numbers: they stay exact in every reader of JSON.
const SEQUENCE_MAX: u64 = 1 << 52;

/// The newest step in another place, by the directory of the run.
static FOLLOWED: PerProcess<BTreeMap<PathBuf, Order>> =
    PerProcess::new([const { Mutex::new(BTreeMap::new()) }; GENERATIONS]);

/// Notes a step of the run in `root` that may be in another place: what this process saves there from now on is newer.
pub fn follow(root: &Path, order: Order) {
    let Some(mut followed) = FOLLOWED.lock() else { return };
    let newest = followed.entry(root.into()).or_default();
    let age = newest.age.max(order.age);
    *newest = (*newest).max(order);
    newest.age = age;
}

/// What was noted of a run.
fn followed(run: &Path) -> Order {
    let is_run = |root: &Path| root == run || dir::is_same(root, run);
    let followed = FOLLOWED.lock();
    let mut known = followed.iter().flat_map(|followed| followed.iter());
    known.find(|(root, _)| is_run(root)).map(|(_, newest)| *newest).unwrap_or_default()
}

/// Checks that a manager may save to a path that it has named by itself.
///
/// # Errors
/// [`Error::Invalid`] for a link, and for the copy of another step: a save would replace what is there.
pub fn check_own_name(path: &Path) -> Result<()> {
    if dir::is_link(path) {
        return Err(Error::invalid(format!(
            "{} is a link, and its name is that of a step that this manager makes: a save would replace what it leads to. \
             Remove the link, or give it another name",
            path.display()
        )));
    }
    match head(path).and_then(|head| head.place).filter(|place| !place.is_of(path)) {
        None => Ok(()),
        Some(place) => Err(Error::invalid(format!(
            "{} is a copy of {:?}, and its name is that of a step that this manager makes: a save would replace it. Give \
             it another name",
            path.display(),
            place.name
        ))),
    }
}

impl<T, S> Manifest<T, S> {
    /// Notes when this save is committed, and its place in its run if it is a step. `dir` is the checkpoint's directory, or
    /// that of a rank's share.
    pub(in crate::store) fn take_place(&mut self, dir: &Path) {
        let now = now_unix_ms();
        self.created_unix_ms = now;
        let real = dir::try_real(dir).unwrap_or_else(|_| dir.into());
        let own = if self.part_of.is_some() { real.parent() } else { Some(&*real) };
        let (Some(run), Some(name)) = (own.and_then(Path::parent), own.and_then(Path::file_name))
        else {
            return;
        };
        let number = self.step.or_else(|| Some(StepName::of(name.as_bytes()).ok()?.step));
        let (Some(step), Some(name)) = (number, name.to_str()) else { return };
        // An integration of a trainer renames it.
        let name = name.strip_prefix(names::UNNAMED_PREFIX).unwrap_or(name);
        let before = Before::of(run, &real);
        let age = before.age;
        self.created_unix_ms = match age.created_unix_ms {
            Some(last) if last < now.saturating_add(AHEAD_MS_MAX) => now.max(last + 1),
            _ => now,
        };
        // Saves without a manager may come in any order, as conversions do.
        let goes_back = RunLock::is_own(run) && Some(step) < before.newest.step;
        if goes_back {
            let newest = before.newest.step.unwrap_or_default();
            tracing::warn!(
                "step {step} is saved after step {newest} in {}: the run has gone back, and goes on from step {step}. It \
                 counts as newer than those that were saved before, which the rules remove first. If this is another \
                 training, save into another directory; to go on from step {newest}, restore before you save",
                run.display()
            );
        }
        self.place = Some(Place {
            name: name.into(),
            // By the clock, so that what is saved to an emptied directory is newer than its copies elsewhere.
            sequence: age.sequence.saturating_add(1).max(now.min(SEQUENCE_MAX)),
            branch: before.newest.branch + u64::from(goes_back),
        });
    }
}

/// Checks that a manager's directory is not itself a checkpoint, such as a step of the run that was meant: steps in it would
/// not be found there.
///
/// # Errors
/// [`Error::Invalid`] if it is, and holds no checkpoints.
pub fn check_run(run: &Path) -> Result<()> {
    let is_one = |dir: &Path| dir::has(&dir.join(names::MANIFEST));
    if !is_one(run) || dir::directories(run)?.iter().any(|below| is_one(below)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} is a checkpoint, and a manager saves steps below its directory: give it {}, or another one",
        run.display(),
        run.parent().unwrap_or(run).display()
    )))
}

/// What was saved to a run before.
struct Before {
    newest: Order,
    /// Of the last save.
    age: Age,
}

impl Before {
    /// `own` is where the save goes. What is there counts, too, but for the shares of this save by other ranks.
    fn of(run: &Path, own: &Path) -> Self {
        let newest = followed(run);
        let mut before = Self { newest, age: newest.age };
        for beside in dir::directories(run).unwrap_or_default() {
            let is_shared = beside != own && own.starts_with(&beside);
            if !is_shared && !names::is_unnamed(&beside) {
                before.add(&beside);
            }
        }
        before
    }

    fn add(&mut self, beside: &Path) {
        let Some(head) = head(beside) else { return };
        let named = || Some(StepName::of(beside.file_name()?.as_bytes()).ok()?.step);
        let is_copy = head.place.as_ref().is_some_and(|place| !place.is_of(beside));
        let order = Order {
            branch: head.place.as_ref().map_or(0, |place| place.branch),
            step: head.step.or_else(named),
            age: head.age(),
        };
        self.age = self.age.max(order.age);
        if !is_copy {
            self.newest = self.newest.max(order);
        }
    }
}

/// The first bytes of a checkpoint's manifest, or of that of its first rank.
fn head(dir: &Path) -> Option<Head> {
    let of =
        |dir: &Path| Head::parse(&file::read_start(&dir.join(names::MANIFEST), Head::BYTES).ok()?);
    of(dir).or_else(|| rank_dirs::dirs(dir).ok()?.iter().find_map(|part| of(part)))
}
