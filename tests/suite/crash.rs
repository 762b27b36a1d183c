//! Killed at any moment, a save leaves a whole checkpoint: the one before it or its own.
//!
//! A child process (this binary again) saves over one path without end and reports each commit
//! through a pipe; this one kills it, by SIGKILL, at moments told by what it sees and by a seed. `make
//! torture-kills` is the long form; RINGSTOW_KILLS sets how many, RINGSTOW_SEED which.
#![cfg(unix)]

use crate::common::{State, assert_no_litter_in, names_in, number, step_at, step_with};
use fastrand::Rng;
use ringstow::internals::store;
use ringstow::{Config, Disposal, EngineChoice, Pruning, Runtime, Status};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

/// Where the child saves; set only for it.
const CHILD_DIR: &str = "RINGSTOW_TEST_CRASH_DIR";
/// The engine that it uses, `ranks` for a save by several of them, `recycle` for saves over the files of
/// checkpoints that were replaced.
const CHILD_ENGINE: &str = "RINGSTOW_TEST_CRASH_ENGINE";

/// A directory that it stripes over, or nothing.
const CHILD_STRIPE: &str = "RINGSTOW_TEST_CRASH_STRIPE";

/// A few shards of some blocks each, with tensors across their ends.
const SIZES: [usize; 6] = [300_000, 1, 700_000, 65_536, 150_000, 400_001];

fn config(engine: EngineChoice, stripe: Option<PathBuf>) -> Config {
    let (block_bytes, shard_bytes) = (65_536, 700_000);
    let (pool_bytes, stripe) = (8 * block_bytes, stripe.into_iter().collect());
    Config { block_bytes, pool_bytes, engine, shard_bytes, stripe, ..Config::default() }
}

/// The child's life, when started by [`start`]; nothing in an ordinary run.
#[test]
fn child_that_saves_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD_DIR).map(PathBuf::from) else { return };
    let kind = std::env::var(CHILD_ENGINE).unwrap();
    let engine = match kind.as_str() {
        "portable" => EngineChoice::Portable,
        _ => EngineChoice::Auto,
    };
    let recycle = kind == "recycle";
    let stripe = std::env::var_os(CHILD_STRIPE).map(PathBuf::from);
    let runtime = Runtime::new(Config { recycle, ..config(engine, stripe) }).unwrap();
    let by_ranks = kind == "ranks";
    for step in step_with(runtime.config(), &dir) + 1.. {
        let state = State::new(step, &SIZES);
        if by_ranks {
            state.save_by_ranks(3, &runtime, &dir);
        } else {
            state.save(&runtime, &dir).unwrap();
        }
        println!("\ncommitted {step}");
    }
}

/// A saver in a process of its own.
struct Saver {
    child: Child,
    commits: Receiver<i64>,
    /// The last step that it said to have committed.
    last: i64,
}

impl Saver {
    fn start(dir: &Path, engine: &str, stripe: Option<&Path>, last: i64) -> Self {
        Self::run("crash::child_that_saves_until_it_is_killed", dir, engine, stripe, last)
    }

    /// Starts the test of this name in a process of its own.
    fn run(child: &str, dir: &Path, engine: &str, stripe: Option<&Path>, last: i64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .envs(stripe.map(|stripe| (CHILD_STRIPE, stripe)))
            .args(["--exact", child, "--nocapture"])
            .env(CHILD_DIR, dir)
            .env(CHILD_ENGINE, engine)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (send, commits) = channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(step) = line.strip_prefix("committed ") {
                    let _ = send.send(step.parse().unwrap());
                }
            }
        });
        Self { child, commits, last }
    }

    /// Waits for `count` more commits.
    fn await_commits(&mut self, count: u64) {
        for _ in 0..count {
            self.last = self.commits.recv().expect("the child saves until it is killed");
        }
    }

    /// Waits until `seen` or until two more commits have gone by.
    fn await_moment(&mut self, mut seen: impl FnMut() -> bool) {
        let mut passed = 0;
        while passed < 2 && !seen() {
            match self.commits.try_recv() {
                Ok(step) => (self.last, passed) = (step, passed + 1),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => panic!("the child saves until it is killed"),
            }
        }
    }

    /// Kills it, and returns the last step that it had said to have committed.
    fn kill(mut self) -> i64 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        while let Ok(step) = self.commits.recv() {
            self.last = step;
        }
        self.last
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the directory of a save in progress shows, from its first file to its last rename.
fn moment(number: u64, dir: &Path, spins: u64) -> Box<dyn FnMut() -> bool + '_> {
    let shows = |wanted: fn(&str) -> bool| move || names_now(dir).iter().any(|name| wanted(name));
    let mut left = spins;
    match number {
        0 => Box::new(shows(|name| name.ends_with(".safetensors.part"))),
        1 => Box::new(shows(|name| name == "manifest.json.part")),
        2 => {
            let manifest = std::fs::read(dir.join("manifest.json")).unwrap_or_default();
            Box::new(move || {
                std::fs::read(dir.join("manifest.json")).unwrap_or_default() != manifest
            })
        }
        3 => {
            let shards = |dir| names_now(dir).into_iter().filter(|n| n.ends_with(".safetensors"));
            let before: Vec<String> = shards(dir).collect();
            Box::new(move || shards(dir).any(|name| !before.contains(&name)))
        }
        // Any moment at all.
        _ => Box::new(move || {
            left = left.saturating_sub(1);
            left == 0
        }),
    }
}

/// Names in a directory that changes meanwhile.
fn names_now(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Kills a saver `kills` times, and looks at what each kill left.
fn kill_and_look(kills: u64, seed: u64, striped: bool) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("ckpt");
    let stripe = striped.then(|| tempfile::tempdir().unwrap());
    let stripe = stripe.as_ref().map(|dir| dir.path());
    let runtime = Runtime::new(config(EngineChoice::Auto, stripe.map(Path::to_path_buf))).unwrap();
    State::new(0, &SIZES).save(&runtime, &dir).unwrap();
    let mut random = Rng::with_seed(seed);
    let (mut last, mut of_the_killed_save) = (0, 0);
    for kill in 0..kills {
        let engine = ["auto", "recycle", "ranks", "recycle", "portable"][kill as usize % 5];
        let mut saver = Saver::start(&dir, engine, stripe, last);
        saver.await_commits(random.u64(..3));
        let seen = moment(random.u64(..6), &dir, random.u64(..200_000));
        saver.await_moment(seen);
        // A moment later than that, from none to about a save's time.
        let most = 1 << random.u64(..22);
        (0..random.u64(..most)).for_each(|_| std::hint::spin_loop());
        let reported = saver.kill();

        let found = step_with(runtime.config(), &dir);
        assert!(
            found == reported || found == reported + 1,
            "kill {kill} of seed {seed}: {found} is committed, {reported} was the last reported"
        );
        of_the_killed_save += u64::from(found == reported + 1);
        State::new(found, &SIZES).assert_at(&runtime, &dir);
        let report = store::verify(&runtime, &dir, &Arc::default()).unwrap();
        assert!(report.damage.is_empty(), "kill {kill} of seed {seed}: {:?}", report.damage);
        // Every other time, what was left is the next save's to clear away.
        if kill % 2 == 0 {
            store::prune(&dir, runtime.config()).unwrap();
            assert_no_litter_in(runtime.config(), &dir);
            State::new(found, &SIZES).assert_at(&runtime, &dir);
        }
        last = found;
    }
    println!("{kills} kills, {last} saves, {of_the_killed_save} killed between commit and report");
    State::new(last + 1, &SIZES).save(&runtime, &dir).unwrap();
    assert_no_litter_in(runtime.config(), &dir);
    let pruning = Pruning { recycled: true, ..Pruning::default() };
    store::prune_with(root.path(), pruning, runtime.config()).unwrap();
    assert_eq!(names_in(root.path()), ["ckpt"]);
}

/// The child's life, when started by [`rolling`]: saves a row of checkpoints and removes old ones.
#[test]
fn child_that_saves_and_retires_until_it_is_killed() {
    let Some(root) = std::env::var_os(CHILD_DIR).map(PathBuf::from) else { return };
    let runtime = Runtime::new(config(EngineChoice::Auto, None)).unwrap();
    let first = newest(&root) + 1;
    for step in first.. {
        State::new(step, &SIZES).save(&runtime, &root.join(format!("step-{step}"))).unwrap();
        println!("\ncommitted {step}");
        ringstow::retain(&root, 2, Disposal::Recycle).unwrap();
    }
}

/// The step of the newest checkpoint.
fn newest(root: &Path) -> i64 {
    step_at(&ringstow::latest(root).unwrap().expect("one stays at least"))
}

#[test]
fn kill_while_files_are_recycled_leaves_whole_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let runtime = Runtime::new(config(EngineChoice::Auto, None)).unwrap();
    State::new(0, &SIZES).save(&runtime, &root.path().join("step-0")).unwrap();
    let (mut random, mut last) = (Rng::with_seed(3), 0);
    for kill in 0..20 {
        let child = "crash::child_that_saves_and_retires_until_it_is_killed";
        let mut saver = Saver::run(child, root.path(), "auto", None, last);
        saver.await_commits(random.u64(..4));
        let most = 1 << random.u64(..22);
        (0..random.u64(..most)).for_each(|_| std::hint::spin_loop());
        let reported = saver.kill();
        last = newest(root.path());
        assert!(
            last == reported || last == reported + 1,
            "kill {kill}: {last}, {reported} reported"
        );
        let found = ringstow::Store::found().unwrap().list(root.path()).unwrap();
        for checkpoint in found.iter().filter(|found| found.status == Status::Committed) {
            State::new(step_at(&checkpoint.path), &SIZES).assert_at(&runtime, &checkpoint.path);
        }
    }
    ringstow::prune(root.path()).unwrap();
    ringstow::retain(root.path(), 1, Disposal::Remove).unwrap();
    // A kill between a checkpoint's last file and its directory leaves that, empty: it might be anybody's.
    let mut left = names_in(root.path());
    left.retain(|name| !names_in(&root.path().join(name)).is_empty());
    assert_eq!(left, [format!("step-{last}")]);
}

#[test]
fn kill_at_any_moment_leaves_the_old_or_the_new_save() {
    kill_and_look(15, 1, false);
}

#[test]
fn kill_at_any_moment_leaves_whole_striped_checkpoints() {
    kill_and_look(9, 3, true);
}

#[test]
#[ignore = "long: several hundred kills"]
fn hundreds_of_kills_leave_the_old_or_the_new_save() {
    let (kills, seed) = (number("RINGSTOW_KILLS", 600), number("RINGSTOW_SEED", 1));
    kill_and_look(kills.div_ceil(2), 2 * seed, false);
    kill_and_look(kills / 2, 2 * seed + 1, true);
    println!(
        "promise: killed at any moment, a save leaves the earlier checkpoint or its own: {kills} kills, 0 broken"
    );
}
