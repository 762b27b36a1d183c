//! Disks that misbehave, through the whole library: what a save must survive it survives, what it
//! cannot it reports, and the earlier checkpoint is there as before. `tests/each_call` has every call that fails.
#![cfg(debug_assertions)] // the seam exists in these builds only

use crate::common::held::{self, made};
use crate::common::{
    ENGINES, State, assert_no_litter, assert_says, engine, errno, fault_seeds, load_all, names_in,
    scratch, small_config, step_at, store, verify,
};
use fake_engines::{Faults, Faulty, Twist, Twisted};
use nix::libc::{EINVAL, EIO, ENOSPC};
use ringstow::internals::engine::{Completion, Engine};
use ringstow::internals::sys::seam::{Call, Watch, fail_if, fail_nth, in_process};
use ringstow::{Config, Error, Runtime, Switch};
use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// Empty, tiny, odd, around a block, many blocks.
const SIZES: [usize; 8] = [0, 1, 4095, 4096, 4097, 10_000, 33_333, 100_000];

/// A runtime of this engine.
fn on_engine(config: Config, name: &'static str) -> Runtime {
    Runtime::with_engine(config, Arc::new(move || engine(name))).unwrap()
}

/// A runtime whose engines all make these faults.
fn faulty(name: &'static str, faults: Faults) -> Runtime {
    let build = move || {
        let faulty = Faulty::new(engine(name)?, faults.clone());
        Ok(Box::new(faulty) as Box<dyn Engine>)
    };
    Runtime::with_engine(small_config(), Arc::new(build)).unwrap()
}

fn sound() -> Runtime {
    Runtime::new(small_config()).unwrap()
}

/// A directory that holds the checkpoint of step 1, that state, and a path where nothing is.
struct Scene {
    _root: tempfile::TempDir,
    old: std::path::PathBuf,
    fresh: std::path::PathBuf,
    before: State,
    files: Vec<String>,
}

impl Scene {
    fn new() -> Self {
        let root = scratch();
        let (old, fresh) = (root.path().join("old"), root.path().join("new/er"));
        let before = State::new(1, &SIZES);
        before.save(&sound(), &old).unwrap();
        let files = names_in(&old);
        Self { _root: root, old, fresh, before, files }
    }

    /// The earlier checkpoint is whole, and there is not a file more than before.
    #[track_caller]
    fn assert_untouched(&self) {
        assert_eq!(names_in(&self.old), self.files);
        self.before.assert_at(&sound(), &self.old);
        assert!(!self.fresh.parent().unwrap().exists(), "a failed save leaves no directory");
    }

    /// What failed is over: the earlier checkpoint can be replaced.
    #[track_caller]
    fn assert_saves(&self, runtime: &Runtime) {
        let after = State::new(3, &SIZES);
        after.save(runtime, &self.old).unwrap();
        after.assert_at(runtime, &self.old);
        assert_no_litter(&self.old);
    }
}

/// Fails the test instead of hanging with it. The limit is no measure of speed: it only ends a test
/// that would never end.
fn must_end<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let worker = std::thread::spawn(move || send.send(work()));
    match receive.recv_timeout(Duration::from_secs(120)) {
        Ok(value) => {
            worker.join().unwrap().unwrap();
            value
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().unwrap_err())
        }
    }
}

#[test]
fn short_and_reordered_transfers_change_no_byte() {
    let (memory, disk) = (scratch(), tempfile::tempdir().unwrap());
    for seed in fault_seeds() {
        for name in ENGINES {
            let root = if seed % 20 == 0 { &disk } else { &memory };
            let path = root.path().join(format!("{name}-{}", seed % 3));
            let runtime = faulty(name, Faults::survivable(seed));
            let state = State::new(seed as i64, &SIZES);
            state.save(&runtime, &path).unwrap_or_else(|e| panic!("seed {seed}, {name}: {e}"));
            state.assert_at(&runtime, &path);
            let report = verify(&runtime, &path).unwrap();
            assert!(report.damage.is_empty(), "seed {seed}, {name}: {:?}", report.damage);
            assert_no_litter(&path);
        }
    }
}

/// A save or load with one failing transfer or sync.
struct Failing {
    call: Call,
    /// From 1 on; the first transfer is the trial of the I/O mode.
    nth: u64,
    errno: i32,
    says: &'static [&'static str],
}

const FAILING: [Failing; 8] = [
    Failing { call: Call::WriteBlock, nth: 1, errno: EIO, says: &["writing"] },
    Failing { call: Call::WriteBlock, nth: 2, errno: EIO, says: &["writing", "offset"] },
    Failing { call: Call::WriteBlock, nth: 2, errno: ENOSPC, says: &["writing", "offset"] },
    Failing { call: Call::WriteBlock, nth: 18, errno: ENOSPC, says: &["writing", "offset"] },
    Failing { call: Call::WriteBlock, nth: 31, errno: EIO, says: &["writing", "offset"] },
    Failing { call: Call::Sync, nth: 1, errno: EIO, says: &["syncing", "dmesg"] },
    Failing { call: Call::ReadBlock, nth: 2, errno: EIO, says: &["reading", "offset"] },
    Failing { call: Call::ReadBlock, nth: 21, errno: EIO, says: &["reading", "offset"] },
];

#[test]
fn failing_transfer_names_file_and_offset_and_the_next_works() {
    for name in ENGINES {
        for Failing { call, nth, errno: wanted, says } in FAILING {
            let (scene, runtime) = (Scene::new(), on_engine(small_config(), name));
            let failing = fail_nth(nth, call, &scene.old, wanted);
            let error = match call {
                Call::ReadBlock => load_all(&runtime, &scene.old).unwrap_err(),
                _ => State::new(2, &SIZES).save(&runtime, &scene.old).unwrap_err(),
            };
            drop(failing);
            assert_eq!(errno(&error), Some(wanted), "{error}");
            assert_says(&error, says);
            assert_says(&error, &["rank00000-0", ".safetensors"]);
            scene.assert_untouched();
            scene.assert_saves(&runtime);
        }
    }
}

#[test]
fn bad_sector_in_the_trial_of_the_io_mode_is_left_to_the_reads() {
    for name in ENGINES {
        let (scene, runtime) = (Scene::new(), on_engine(small_config(), name));
        let failing = fail_nth(1, Call::ReadBlock, &scene.old, EIO);
        assert!(load_all(&runtime, &scene.old).is_ok(), "{name}");
        drop(failing);
        scene.assert_saves(&runtime);
    }
}

/// I/O modes with O_DIRECT, each of which begins with a trial write: io_uring with and without fixed buffers, and the
/// portable engine.
const DIRECT_MODES: u64 = if cfg!(all(target_os = "linux", feature = "uring")) { 3 } else { 1 };

/// Refuses the trial writes with O_DIRECT.
fn refuse_direct(below: &Path) -> Watch {
    let (below, mut writes) = (below.to_path_buf(), 0);
    in_process(fail_if(EINVAL, move |call, on| {
        let is_write = call == Call::WriteBlock && on.starts_with(&below);
        writes += u64::from(is_write);
        is_write && writes <= DIRECT_MODES
    }))
}

#[test]
fn falls_back_when_direct_io_fails_at_first_write() {
    for name in ENGINES {
        let (scene, after) = (Scene::new(), State::new(2, &SIZES));
        let refusing = refuse_direct(&scene.old);
        let report = after.save(&on_engine(small_config(), name), &scene.old).unwrap();
        drop(refusing);
        assert!(!report.moved.direct);
        let told = report.moved.fallbacks.iter().find(|f| f.reason.contains("O_DIRECT")).unwrap();
        assert!(told.wanted.contains("O_DIRECT") && told.got.contains("buffered"), "{told:?}");
        assert!(told.remedy.contains("direct = off"), "{told:?}");
        after.assert_at(&sound(), &scene.old);
        assert_no_litter(&scene.old);
    }
}

#[test]
fn refused_direct_io_is_an_error_when_requested() {
    for name in ENGINES {
        let scene = Scene::new();
        let config = Config { direct: Switch::On, ..small_config() };
        let _refusing = refuse_direct(&scene.old);
        let error = State::new(2, &SIZES).save(&on_engine(config, name), &scene.old).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("O_DIRECT"), "{error}");
        scene.assert_untouched();
    }
}

/// Builds a broken engine the first time, and sound ones from then on.
fn broken_at_first(
    name: &'static str,
    breaks: impl Fn(Box<dyn Engine>) -> Box<dyn Engine> + Send + Sync + 'static,
) -> Runtime {
    let built = AtomicU64::new(0);
    let build = move || {
        let sound = engine(name)?;
        Ok(if built.fetch_add(1, Relaxed) == 0 { breaks(sound) } else { sound })
    };
    Runtime::with_engine(small_config(), Arc::new(build)).unwrap()
}

/// Makes an engine break after some completions.
fn breaking(after: u64) -> impl Fn(Box<dyn Engine>) -> Box<dyn Engine> {
    let faults = Faults { break_after: Some(after), ..Faults::default() };
    move |inner| Box::new(Faulty::new(inner, faults.clone()))
}

/// The error says that the engine, or the thread it ran in, is gone.
#[track_caller]
fn assert_says_that_the_engine_died(error: &Error) {
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("engine broke") || text.contains("I/O thread has ended"), "{text}");
}

/// The first save fails; the second finds a new engine.
fn assert_recovers(runtime: Runtime) {
    must_end(move || {
        let scene = Scene::new();
        let error = State::new(2, &SIZES).save(&runtime, &scene.old).unwrap_err();
        assert_says_that_the_engine_died(&error);
        scene.assert_untouched();
        scene.assert_saves(&runtime);
    });
}

#[test]
fn broken_engine_is_an_error_and_then_replaced() {
    for name in ENGINES {
        for after in [0, 1, 7, 30] {
            assert_recovers(broken_at_first(name, breaking(after)));
        }
    }
}

#[test]
fn an_engine_that_breaks_during_a_load_is_an_error() {
    for name in ENGINES {
        for after in [0, 1, 9] {
            let runtime = broken_at_first(name, breaking(after));
            must_end(move || {
                let scene = Scene::new();
                let error = load_all(&runtime, &scene.old).unwrap_err();
                assert_says_that_the_engine_died(&error);
                scene.before.assert_at(&runtime, &scene.old);
            });
        }
    }
}

/// Panics at its nth completion: its thread dies with transfers in flight.
struct Panics {
    left: u64,
}

impl Twist for Panics {
    fn wait(&mut self, inner: &mut dyn Engine, done: &mut Vec<Completion>) -> io::Result<()> {
        let before = done.len();
        inner.wait(done)?;
        let completed = (done.len() - before) as u64;
        assert!(completed <= self.left, "a panic on purpose, which this test is about");
        self.left -= completed;
        Ok(())
    }
}

#[test]
fn a_dying_io_thread_is_an_error_and_never_a_hang() {
    for name in ENGINES {
        for left in [0, 1, 12] {
            let breaks = move |inner| Twisted::engine(inner, Panics { left });
            assert_recovers(broken_at_first(name, breaks));
        }
    }
}

#[test]
fn an_engine_that_cannot_be_built_is_an_error() {
    let build = || -> io::Result<Box<dyn Engine>> { panic!("on purpose, while being built") };
    let runtime = Runtime::with_engine(small_config(), Arc::new(build)).unwrap();
    must_end(move || {
        let scene = Scene::new();
        State::new(2, &SIZES).save(&runtime, &scene.old).unwrap_err();
        load_all(&runtime, &scene.old).unwrap_err();
        scene.assert_untouched();
    });
}

#[test]
fn a_panicking_tensor_fails_its_save_alone() {
    let scene = Scene::new();
    let save = |path: &Path| {
        let torn = made(200_000, |offset, to| {
            assert!(offset < 60_000, "a panic on purpose, which this test is about");
            to.fill(7);
            Ok(())
        });
        store().save_async(held::only(torn), path).unwrap()
    };
    for path in [&scene.old, &scene.fresh] {
        let handle = save(path);
        let error = must_end(move || handle.result()).unwrap_err();
        assert!(matches!(error, Error::Panicked { .. }), "{error:?}");
        assert!(error.to_string().contains("panicked"), "{error}");
        scene.assert_untouched();
    }
    let after = State::new(3, &SIZES);
    let runtime = Runtime::shared(&small_config()).unwrap();
    after.save(&runtime, &scene.old).unwrap();
    assert_eq!(step_at(&scene.old), 3);
}

/// Says that its thread has ended, when that drops what is its own.
struct Ends(Arc<OnceLock<()>>);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.set(());
    }
}

thread_local!(static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) });

#[test]
fn panic_on_another_thread_reaches_the_caller() {
    let scene = Scene::new();
    let (path, reads) = (scene.old.clone(), Arc::new(AtomicU64::new(0)));
    let counted = reads.clone();
    let panic = must_end(move || {
        let (saver, ended) = (thread::current().id(), Arc::<OnceLock<()>>::default());
        // The thread that saves waits until another has ended.
        let state = held::only(made(200_000, move |_, to| {
            if thread::current().id() != saver {
                ENDS.set(Some(Ends(ended.clone())));
                panic!("a panic elsewhere, on purpose");
            }
            ended.wait();
            counted.fetch_add(1, Relaxed);
            to.fill(7);
            Ok(())
        }));
        let save = || store().save(&state, &path);
        catch_unwind(AssertUnwindSafe(save)).unwrap_err()
    });
    assert_eq!(panic.downcast_ref(), Some(&"a panic elsewhere, on purpose"));
    assert!(reads.load(Relaxed) <= 1, "the others went on for {reads:?} blocks");
    scene.assert_untouched();
}

#[test]
fn a_cancelled_save_leaves_the_old_checkpoint() {
    let scene = Scene::new();
    for path in [&scene.old, &scene.fresh] {
        let cell = Arc::<OnceLock<ringstow::SaveHandle>>::default();
        let own = cell.clone();
        // It cancels its own save in the middle: a moment that needs no clock.
        let cancels = made(200_000, move |offset, to| {
            if offset > 100_000 {
                own.wait().cancel();
            }
            to.fill(7);
            Ok(())
        });
        let handle = store().save_async(held::only(cancels), path).unwrap();
        assert!(cell.set(handle).is_ok());
        let watched = cell.clone();
        must_end(move || watched.get().unwrap().wait(None));
        let error = cell.get().unwrap().take().unwrap().unwrap_err();
        assert!(matches!(error, Error::Cancelled { .. }), "{error}");
        scene.assert_untouched();
    }
}
