//! The staging memory of saves and loads: each takes only what it needs, and none waits forever for some.

use crate::common::held::{self, made};
use crate::common::{State, engine, load_all, load_opened, rig, scratch, small_config, verify};
use fake_engines::{AtOnce, Twist, Twisted};
use ringstow::internals::engine::{Completion, Engine, Op};
use ringstow::{Checkpoint, Config, Error, Runtime, Switch};
use std::io;
use std::sync::{Arc, Barrier};

/// Several fillers, and a large pool of small buffers.
fn config() -> Config {
    Config { fillers: 4, pool_bytes: 64 * 4096, ..small_config() }
}

/// Keeps the blocks' writes back until all of them are there: until then no buffer comes back.
struct Hoards {
    had_trial: bool,
    blocks: usize,
    kept: Vec<Op>,
}

impl Twist for Hoards {
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        if op.action.transfer().is_none() || !std::mem::replace(&mut self.had_trial, true) {
            return inner.submit(op);
        }
        self.kept.push(op);
        if self.kept.len() == self.blocks {
            self.kept.drain(..).for_each(|op| inner.submit(op));
        }
    }
}

/// Bytes of a block that takes a while to get memory for.
const LARGE: usize = 2 << 20;

#[test]
fn fillers_racing_for_the_last_block_take_one_buffer() {
    let root = scratch();
    for round in 0..50 {
        let build = || {
            let hoards = Hoards { had_trial: false, blocks: 3, kept: Vec::new() };
            Ok(Twisted::engine(Box::new(AtOnce::null(4)), hoards))
        };
        let (block_bytes, pool_bytes) = (LARGE as u64, 8 * LARGE as u64);
        let two = Config { fillers: 2, block_bytes, pool_bytes, ..Config::default() };
        let runtime = Runtime::with_engine(two, Arc::new(build)).unwrap();
        // Three blocks, with the header, of which two are read at the same moment: who has read them goes for the
        // last one then.
        let both = Barrier::new(2);
        let state = held::only(made(3 * LARGE - 4096, move |offset, _| {
            if offset == 0 || offset == LARGE - 4096 {
                both.wait();
            }
            Ok(())
        }));
        let path = root.path().join(round.to_string());
        let report =
            ringstow::internals::store::save(&runtime, &state, &path, &Arc::default()).unwrap();
        assert_eq!(report.file_bytes, 3 * LARGE as u64);
        assert_eq!(runtime.pool().unwrap().used(), 3);
        std::fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn no_load_takes_more_buffers_than_it_has_blocks() {
    let root = scratch();
    let path = root.path().join("ckpt");
    State::new(1, &[3 * 4096]).save(&crate::common::runtime(), &path).unwrap();
    for _ in 0..100 {
        let runtime = Runtime::new(config()).unwrap();
        let report = verify(&runtime, &path).unwrap();
        let used = runtime.pool().unwrap().used();
        assert!(used <= report.blocks, "{used} buffers to read {} blocks", report.blocks);
    }
}

#[test]
fn small_save_registers_only_the_buffers_it_uses() {
    let root = scratch();
    let runtime = Runtime::new(Config::default()).unwrap();
    let report = State::new(1, &[5000]).save(&runtime, &root.path().join("ckpt")).unwrap();
    assert_eq!(runtime.pool().unwrap().used(), 1);
    assert!(report.moved.fixed_buffers <= 1, "{}", report.moved.fixed_buffers);
    let report = State::new(2, &[20 << 20]).save(&runtime, &root.path().join("more")).unwrap();
    let used = runtime.pool().unwrap().used();
    assert!((2..=6).contains(&used), "{used}");
    let limited = report.moved.fallbacks.iter().any(|step| step.reason.contains("RLIMIT_MEMLOCK"));
    assert!(report.moved.engine != "uring" || limited || report.moved.fixed_buffers == used);
}

/// Takes buffers and never gives them back: a ring that breaks, and that cannot be drained.
struct Keeps(Vec<Op>);

impl Twist for Keeps {
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        // The trial is let through.
        match op.action.transfer().is_some_and(|transfer| transfer.offset > 0) {
            true => self.0.push(op),
            false => inner.submit(op),
        }
    }

    fn wait(&mut self, inner: &mut dyn Engine, done: &mut Vec<Completion>) -> io::Result<()> {
        match self.0.len() < 2 {
            true => inner.wait(done),
            false => Err(io::Error::other("broken on purpose")),
        }
    }
}

impl Drop for Keeps {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut self.0).into_iter();
        kept.filter_map(|op| op.action.into_buffer()).for_each(|buffer| buffer.give_up());
    }
}

#[test]
fn broken_ring_with_all_buffers_is_an_error() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let built = std::sync::atomic::AtomicBool::new(false);
    let build = move || {
        let sound = engine("portable")?;
        let first = !built.swap(true, std::sync::atomic::Ordering::Relaxed);
        Ok(if first { Twisted::engine(sound, Keeps(Vec::new())) } else { sound })
    };
    let two = Config { pool_bytes: 2 * 4096, ..small_config() };
    let runtime = Runtime::with_engine(two, Arc::new(build)).unwrap();
    let state = State::new(1, &[100_000]);
    let error = state.save(&runtime, &path).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
    assert!(error.to_string().contains("broke"), "{error}");
    state.save(&runtime, &path).unwrap();
    state.assert_at(&runtime, &path);
}

#[test]
fn requested_fixed_buffers_serve_loads_too() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let state = State::new(1, &[0, 5000, 100_000]);
    state.save(&crate::common::runtime(), &path).unwrap();
    let fixed = Runtime::new(Config { fixed: Switch::On, ..config() }).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let loaded = match load_opened(&fixed, &checkpoint) {
        Err(Error::Unsupported { .. }) if !cfg!(feature = "uring") => return,
        Err(Error::Unsupported { what, .. }) => return rig::missing(&what),
        loaded => loaded.unwrap(),
    };
    assert_eq!(loaded.report.moved.fixed_buffers, fixed.pool().unwrap().count());
    state.assert_at(&fixed, &path);
    assert!(load_all(&fixed, &path).is_ok());
}

#[test]
fn fixed_buffers_too_small_for_a_load_are_refused() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let large = Config { block_bytes: 3 * 4096, pool_bytes: 8 * 4096, ..small_config() };
    State::new(1, &[100_000]).save(&Runtime::new(large).unwrap(), &path).unwrap();
    let fixed = Runtime::new(Config { fixed: Switch::On, ..config() }).unwrap();
    let error = load_all(&fixed, &path).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains("block_bytes to 12288"), "{error}");
}
