//! The power goes at any moment of any operation. Afterwards every checkpoint that was reported as committed is there,
//! every one that is there is whole, the next save works, and `prune` finds what is left over.
//!
//! ext4, XFS and btrfs live on disks that lose what they had not flushed (`tests/cut-disk`). `RINGSTOW_CUTS` sets the
//! number of cuts, `RINGSTOW_SEED` what each loses; `make torture-cuts` is the long form.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod control;
mod lost_journal;
mod operations;
mod saved;

use common::mounts::where_mounts_work;
use common::number;
use cut_disk::{BTRFS, EXT4, FileSystem, Powered, XFS};
use fastrand::Rng;
use operations::{Machine, OPERATIONS, Operation};
use ringstow::EngineChoice;
use saved::Saved;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Operations before the one that is cut.
const BEFORE_MAX: usize = 3;

/// So many cuts meet every operation, before its commit and after it.
const ENOUGH: u64 = 100;

/// Runs operations, then one again and again, and cuts the power so long after that began.
fn cut_within(
    powered: &Powered,
    saved: &Saved,
    machine: &Machine,
    (before, target): (&[Operation], Operation),
    delay: Duration,
) {
    let (begins, begun) = channel();
    let dead = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let dead = &dead;
        scope.spawn(move || {
            let work = || -> ringstow::Result<()> {
                before.iter().try_for_each(|operation| saved.run(machine, *operation))?;
                let _ = begins.send(());
                loop {
                    saved.run(machine, target)?;
                }
            };
            let error = work().unwrap_err();
            assert!(dead.load(SeqCst), "{target:?}: there was power, and yet: {error}");
        });
        let _ = begun.recv();
        std::thread::sleep(delay); // chooses the moment
        dead.store(true, SeqCst);
        powered.cut();
    });
}

/// Cuts the power in each operation in turn, at a random moment.
fn cut_and_check(of: FileSystem, cuts: u64, seed: u64) -> Result<(), String> {
    let mut powered = Powered::new(of, 2, seed)?;
    let mut random = Rng::with_seed(seed);
    let saved = Saved::new(powered.path(0), powered.path(1));
    let mut took = BTreeMap::new();
    let mut hits = BTreeMap::<_, u64>::new();
    let mut found = [0u64; 2];
    for cut in 0..cuts {
        let engine = [EngineChoice::Auto, EngineChoice::Portable][random.usize(..2)];
        let machine = Machine::new(&saved, engine);
        let target = OPERATIONS[cut as usize % OPERATIONS.len()];
        let before: Vec<_> = (0..random.usize(..=BEFORE_MAX))
            .map(|_| OPERATIONS[random.usize(..OPERATIONS.len())])
            .collect();
        let usual = took.get(&target).copied().unwrap_or(Duration::from_millis(20));
        let delay = usual.mul_f64(random.f64() * 1.2);
        cut_within(&powered, &saved, &machine, (&before, target), delay);
        drop(machine);
        let what = format!("cut {cut} of seed {seed}, in {:?}", saved.under_way());
        powered.restore().unwrap_or_else(|why| panic!("{what}: it cannot be mounted: {why}"));
        *hits.entry(saved.under_way()).or_default() += 1;
        let machine = Machine::new(&saved, engine);
        found[usize::from(saved.check(&machine, &what))] += 1;
        if random.bool() {
            saved.prune(&machine, &what);
        }
        for operation in OPERATIONS {
            let started = Instant::now();
            let done = saved.run(&machine, operation);
            done.unwrap_or_else(|e| panic!("{what}: afterwards {operation:?} fails: {e}"));
            took.insert(operation, started.elapsed());
        }
        saved.check(&machine, &what);
        saved.prune(&machine, &what);
    }
    let [old, new] = found;
    println!(
        "{}: {cuts} cuts of seed {seed}: {old} old and {new} new states, in {hits:?}",
        of.name
    );
    println!(
        "promise: a power cut on {} in any operation loses and mixes no committed checkpoint: {cuts} cuts, 0 broken",
        of.name
    );
    if cuts >= ENOUGH {
        assert!(old > 0 && new > 0, "every cut found the same state");
        assert_eq!(hits.len(), OPERATIONS.len(), "an operation was never cut");
    }
    Ok(())
}

fn power_cut_on(of: FileSystem) {
    where_mounts_work(|| cut_and_check(of, number("RINGSTOW_CUTS", 8), number("RINGSTOW_SEED", 1)));
}

#[test]
fn power_cut_on_ext4_keeps_what_was_committed() {
    power_cut_on(EXT4);
}

#[test]
fn power_cut_on_xfs_keeps_what_was_committed() {
    power_cut_on(XFS);
}

#[test]
fn power_cut_on_btrfs_keeps_what_was_committed() {
    power_cut_on(BTRFS);
}
