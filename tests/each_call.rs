//! A save meets trouble at each of its system calls in turn: the call fails, all calls from it on fail, or the
//! process ends before it. Each time the earlier or the new checkpoint loads whole, and the next save works.
#![cfg(debug_assertions)] // the seam exists in these builds only

mod common;

use common::{State, assert_no_litter_in, names_in, scratch, small_config, step_with};
use ringstow::internals::sys::seam::{Outcome, Watch, from_nth, in_process, nth};
use ringstow::{Checkpoint, Config, Disposal, Dtype, Error, Runtime, Session, StateDict, Value};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of the tensors: each of the two shards has some.
const SIZES: [usize; 3] = [5000, 12_288, 20_001];

const EIO: i32 = 5;

/// Says to a child process where it saves, and in which way.
const CHILD_DIR: &str = "RINGSTOW_TEST_EACH_CALL_DIR";
const CHILD_WAY: &str = "RINGSTOW_TEST_EACH_CALL_WAY";

/// The seam is the whole process': one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The ways of saving that make different calls.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Recycled,
    Striped,
    ByRanks,
}

const WAYS: [Way; 4] = [Way::Plain, Way::Recycled, Way::Striped, Way::ByRanks];

/// A directory of checkpoints, and what saves into it.
struct Place {
    way: Way,
    root: PathBuf,
    runtime: Runtime,
}

impl Place {
    fn new(way: Way, root: &Path) -> Self {
        let mut config = Config { files: 2, recycle: way == Way::Recycled, ..small_config() };
        if way == Way::Striped {
            config.stripe = vec![root.join("disk")];
        }
        Self { way, root: root.into(), runtime: Runtime::new(config).unwrap() }
    }

    /// With the checkpoint of step 1.
    fn with_step_1(way: Way, root: &Path) -> Self {
        std::fs::create_dir(root.join("disk")).unwrap();
        let place = Self::new(way, root);
        if way == Way::Recycled {
            place.save(0).unwrap(); // its files are the recycled ones of the next saves
        }
        place.save(1).unwrap();
        place
    }

    fn dir(&self) -> PathBuf {
        self.root.join("run/checkpoint")
    }

    fn config(&self) -> &Config {
        self.runtime.config()
    }

    fn save(&self, step: i64) -> ringstow::Result<()> {
        let (state, dir) = (State::new(step, &SIZES), self.dir());
        if self.way != Way::ByRanks {
            return state.save(&self.runtime, &dir).map(drop);
        }
        let session = Session::begin_with(&dir, 2, self.config())?;
        let mut tree = vec![(Value::from("step"), Value::Int(step))];
        let mut receipts = Vec::new();
        for rank in 0..2 {
            let mut share = StateDict::new();
            for (name, data) in state.tensors.iter().skip(rank).step_by(2) {
                share.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
                tree.push((Value::from(name.as_str()), Value::Tensor(name.clone())));
            }
            let job = Arc::default();
            let written = ringstow::internals::store::write_rank(
                &self.runtime,
                &share,
                rank as u32,
                &dir,
                &job,
            )?;
            receipts.push(written.0);
        }
        session.commit(receipts, Value::Dict(tree).to_json()?).map(drop)
    }

    /// The checkpoint is the one of this step, byte by byte; and the next save replaces it and leaves nothing else.
    #[track_caller]
    fn assert_whole(&self, step: i64) {
        State::new(step, &SIZES).assert_at(&self.runtime, &self.dir());
        self.save(9).unwrap();
        State::new(9, &SIZES).assert_at(&self.runtime, &self.dir());
        assert_no_litter_in(self.config(), &self.dir());
    }
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
        let remove = |place: &Place| {
            let disposal = Disposal::of(place.config());
            ringstow::internals::store::remove_checkpoint(&place.dir(), disposal, place.config())
                .map(drop)
        };
        at_each_call(way, arm, remove, |place, n, done| {
            let (way, dir) = (place.way, place.dir());
            match Checkpoint::open_with(&dir, place.config()) {
                Ok(_) => {
                    assert!(done.is_err(), "{way:?}, call {n}: it is still there");
                    place.assert_whole(1);
                }
                Err(Error::NotCommitted { .. } | Error::NoCheckpoint { .. } | Error::Io { .. }) => {
                    ringstow::internals::store::prune(dir.parent().unwrap(), place.config())
                        .unwrap();
                    // An empty directory may be anybody's.
                    let left = if dir.exists() { names_in(&dir) } else { Vec::new() };
                    assert!(left.is_empty(), "{way:?}, call {n}: {left:?}");
                    place.save(2).unwrap();
                    place.assert_whole(2);
                }
                Err(error) => panic!("{way:?}, call {n}: {error}"),
            }
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

/// The child's life, when started by a test below.
#[test]
fn child_that_saves_once() {
    let Some(root) = std::env::var_os(CHILD_DIR).map(PathBuf::from) else { return };
    let way = std::env::var(CHILD_WAY).unwrap();
    let way = WAYS.into_iter().find(|known| format!("{known:?}") == way).unwrap();
    Place::new(way, &root).save(2).unwrap();
}

/// Saves step 2 in a child process; says whether it came to its end.
fn save_in_child(place: &Place, seam: &str) -> bool {
    let program = std::env::current_exe().unwrap();
    let status = Command::new(program)
        .args(["child_that_saves_once", "--exact"])
        .env(CHILD_DIR, &place.root)
        .env(CHILD_WAY, format!("{:?}", place.way))
        .env("RINGSTOW_TEST_SEAM", seam)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    status.success()
}

#[test]
fn save_killed_at_any_call_leaves_old_or_new() {
    let _alone = alone();
    for way in WAYS {
        let mut committed = 0;
        for n in 1.. {
            let root = scratch();
            let place = Place::with_step_1(way, root.path());
            let ended = save_in_child(&place, &format!("kill:{n}"));
            let found = step_with(place.config(), &place.dir());
            assert!(found == 2 || (found == 1 && !ended), "{way:?}, call {n}: step {found}");
            committed += u64::from(found == 2 && !ended);
            place.assert_whole(found);
            if ended {
                assert!(n > 20 && committed > 0, "{way:?}: {n} calls, {committed} committed");
                break;
            }
        }
    }
}

#[test]
fn child_process_gets_the_error_from_its_environment() {
    let _alone = alone();
    let root = scratch();
    let place = Place::with_step_1(Way::Plain, root.path());
    assert!(!save_in_child(&place, "fail-from:10:5"));
    place.assert_whole(1);
    assert!(!save_in_child(&place, "nonsense"));
    assert!(save_in_child(&place, "fail:100000:5"));
}
