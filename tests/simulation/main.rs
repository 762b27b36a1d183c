//! A simulation: programs that save, load and clean up at the same time, in an order of their system calls that a seed
//! decides, with calls that fail and programs that are killed. A seed that breaks a promise is printed, and breaks it
//! again each time.
//!
//! `make torture-simulation` runs 100,000 seeds; `RINGSTOW_SEED=7 RINGSTOW_SEEDS=1 cargo test --test simulation` one.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

mod calls;
#[path = "../common/mod.rs"]
mod common;
mod history;
mod program;
mod turns;
mod world;

use calls::{Broken, Step};
use common::number;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use world::Ended;

/// What many seeds did.
#[derive(Debug, Default)]
struct Sum {
    saved: usize,
    not_saved: usize,
    cuts: usize,
    calls: usize,
    /// A seed that broke a promise, and how.
    broken: Option<(u64, String)>,
}

/// Runs seeds on all cores, until one breaks a promise.
fn simulate(first: u64, count: u64, broken: Broken) -> Sum {
    let (next, sum) = (AtomicU64::new(first), Mutex::new(Sum::default()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, SeqCst);
            if seed >= first + count {
                return;
            }
            let ended = catch_unwind(|| world::run(seed, broken));
            let ended = ended.unwrap_or_else(|_| Ended::panicked());
            let mut sum = sum.lock().expect("nobody panics with it");
            if let Some(why) = ended.broken {
                let why = why + &steps_of(&ended.steps, count);
                sum.broken.get_or_insert((seed, why));
            }
            if sum.broken.is_some() {
                return;
            }
            sum.saved += ended.saves[0];
            sum.not_saved += ended.saves[1];
            sum.cuts += ended.cuts;
            sum.calls += ended.steps.len();
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        (0..cores).for_each(|_| drop(scope.spawn(work)));
    });
    sum.into_inner().expect("nobody panicked with it")
}

/// All calls, for somebody who looks at one seed.
fn steps_of(steps: &[Step], count: u64) -> String {
    let all = steps.iter().filter(|_| count == 1);
    all.map(|step| format!("\n    {step}")).collect()
}

#[test]
fn programs_break_no_promise() {
    let (first, count) = (number("RINGSTOW_SEED", 0), number("RINGSTOW_SEEDS", 300));
    let Sum { saved, not_saved, cuts, calls, broken } = simulate(first, count, Broken::Nothing);
    if let Some((seed, why)) = broken {
        panic!(
            "seed {seed} (RINGSTOW_SEED={seed} RINGSTOW_SEEDS=1 cargo test --test simulation \
             programs_break_no_promise): {why}"
        );
    }
    println!(
        "{count} seeds: {calls} calls, {saved} saves returned, {not_saved} were refused or killed, \
         {cuts} cuts of the power"
    );
    println!(
        "promise: programs that save, load and clean up at the same time lose and mix nothing: \
         {count} seeds, 0 broken"
    );
    let is_long = count >= 100;
    assert!(!is_long || saved > not_saved, "most saves should work: too few test anything");
    assert!(!is_long || cuts > 0, "the power was never cut");
}

#[test]
fn seed_replays_call_by_call() {
    for seed in 0..20 {
        let [one, other] = [0, 1].map(|_| world::run(seed, Broken::Nothing).steps);
        for (number, (one, other)) in one.iter().zip(&other).enumerate() {
            assert_eq!(one, other, "seed {seed}, call {number}");
        }
        assert_eq!(one.len(), other.len(), "seed {seed}");
    }
}

#[test]
fn syncs_that_make_nothing_durable_are_found() {
    let found = simulate(0, 400, Broken::Syncs).broken;
    assert!(found.is_some(), "no seed finds it");
}
