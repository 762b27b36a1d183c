//! The power goes at any moment: what a file system had on its disk by then is all that is left, its own
//! journal included. Every checkpoint that was reported as committed is there, and every one that is there
//! is whole, also where saves write over old files.
//!
//! A file system is cut off by its own emergency stop, with the last entries of its journal not written, and
//! mounted again, which has it recover. Data that went past the page cache stays: just what would make a
//! half-written checkpoint of a file that was written over too soon. What this does not show is a disk that loses
//! what it had in a cache of its own: file systems flush that at each fsync. Needs root, mkfs and xfs_io; each
//! test says so and does nothing without.
#![cfg(target_os = "linux")]

mod common;

use common::mounts::{EXT4, MIB, Mount, XFS, where_mounts_work};
use common::{State, step_at};
use fastrand::Rng;
use ringstow::internals::store::Status;
use ringstow::{Config, Disposal, EngineChoice, Runtime, latest, list, prune, retain};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

/// Three shards of some blocks each.
const SIZES: [usize; 5] = [300_000, 1, 700_000, 65_536, 400_001];

fn runtime(engine: EngineChoice) -> Runtime {
    let (block_bytes, shard_bytes) = (65_536, 700_000);
    let config = Config {
        block_bytes,
        pool_bytes: 8 * block_bytes,
        shard_bytes,
        engine,
        ..Config::default()
    };
    Runtime::new(Config { recycle: true, ..config }).unwrap()
}

/// The last steps that are known to be committed, and whether to go on.
#[derive(Default)]
struct Told {
    in_a_row: AtomicI64,
    in_place: AtomicI64,
    stop: AtomicBool,
}

/// Saves a row of checkpoints, of which two stay, and one in place, until the disk fails it.
fn save_until_it_fails(root: &Path, runtime: &Runtime, told: &Told) {
    let in_place = root.join("last");
    while !told.stop.load(SeqCst) {
        let step = told.in_a_row.load(SeqCst) + 1;
        let dir = root.join("row").join(format!("step-{step}"));
        if State::new(step, &SIZES).save(runtime, &dir).is_err() {
            return;
        }
        told.in_a_row.store(step, SeqCst);
        let step = told.in_place.load(SeqCst) + 1;
        if State::new(step, &SIZES).save(runtime, &in_place).is_err() {
            return;
        }
        told.in_place.store(step, SeqCst);
        if retain(root.join("row"), 2, Disposal::Recycle).is_err() {
            return;
        }
    }
}

/// What is there after a cut, given what was reported before it; the new last steps.
fn look(root: &Path, told: &Told, cut: u64) {
    let runtime = runtime(EngineChoice::Auto);
    let check = |dir: &Path, reported: i64| -> i64 {
        let step = step_at(dir);
        assert!(
            step == reported || step == reported + 1,
            "cut {cut}: {} is of step {step}, {reported} was the last reported",
            dir.display()
        );
        State::new(step, &SIZES).assert_at(&runtime, dir);
        step
    };
    let newest = latest(root.join("row")).unwrap().expect("one was committed");
    told.in_a_row.store(check(&newest, told.in_a_row.load(SeqCst)), SeqCst);
    told.in_place.store(check(&root.join("last"), told.in_place.load(SeqCst)), SeqCst);
    for found in list(root.join("row")).unwrap() {
        if found.status == Status::Committed {
            State::new(step_at(&found.path), &SIZES).assert_at(&runtime, &found.path);
        }
    }
}

fn cut_and_look(mount: &Mount, cuts: u64, seed: u64) -> Result<(), String> {
    let (told, mut random) = (Told::default(), Rng::with_seed(seed));
    std::fs::create_dir(mount.path().join("row")).unwrap();
    for cut in 0..cuts {
        let engine = [EngineChoice::Auto, EngineChoice::Portable][cut as usize % 2];
        let runtime = runtime(engine);
        let (before, awaited) = (told.in_a_row.load(SeqCst), random.u64(..5) as i64);
        std::thread::scope(|scope| {
            let saver = scope.spawn(|| save_until_it_fails(mount.path(), &runtime, &told));
            // The first time until there is something to lose; then any moment.
            let least = before + if cut == 0 { 3 } else { awaited };
            while told.in_a_row.load(SeqCst) < least && !saver.is_finished() {
                std::hint::spin_loop();
            }
            let most = 1 << random.u64(..23);
            (0..random.u64(..most)).for_each(|_| std::hint::spin_loop());
            let done = mount.cut_power();
            told.stop.store(true, SeqCst);
            done
        })?;
        drop(runtime);
        told.stop.store(false, SeqCst);
        mount.mount_again();
        look(mount.path(), &told, cut);
        if cut % 3 == 0 {
            prune(mount.path().join("row")).unwrap();
        }
    }
    println!(
        "{cuts} cuts, {} and {} saves",
        told.in_a_row.load(SeqCst),
        told.in_place.load(SeqCst)
    );
    Ok(())
}

/// How many cuts: RINGSTOW_CUTS, or a few.
fn cuts(few: u64) -> u64 {
    std::env::var("RINGSTOW_CUTS").ok().and_then(|n| n.parse().ok()).unwrap_or(few)
}

#[test]
fn power_cut_on_ext4_keeps_what_was_committed() {
    where_mounts_work(|| cut_and_look(&Mount::image(EXT4, 128 * MIB, 512, "rw")?, cuts(12), 1));
}

#[test]
fn power_cut_on_xfs_keeps_what_was_committed() {
    where_mounts_work(|| cut_and_look(&Mount::image(XFS, 320 * MIB, 512, "rw")?, cuts(12), 2));
}
