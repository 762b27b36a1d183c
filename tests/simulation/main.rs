//! A simulation: programs that save, load and clean up at the same time, in an order of their system calls that a seed
//! decides, with calls that fail and programs that are killed. A seed that breaks a promise is printed, and breaks it
//! again each time.
//!
//! `make torture-simulation` runs 100,000 seeds; `RINGSTOW_SEED=7 RINGSTOW_SEEDS=1 cargo test --test simulation` one.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

#[path = "../common/mod.rs"]
mod common;
mod history;
mod program;
mod turns;
mod world;

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use world::Ended;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// Runs seeds on all cores; returns how many saves returned and how many did not.
///
/// # Panics
/// With the first seed that breaks a promise.
fn simulate(first: u64, count: u64) -> [usize; 2] {
    let (next, broken) = (AtomicU64::new(first), Mutex::new(None));
    let total = Mutex::new([0; 2]);
    let work = || {
        while broken.lock().is_ok_and(|broken| broken.is_none()) {
            let seed = next.fetch_add(1, SeqCst);
            if seed >= first + count {
                return;
            }
            let ended = catch_unwind(|| world::run(seed)).unwrap_or_else(|_| Ended::panicked());
            let mut total = total.lock().expect("nobody panics with it");
            (0..2).for_each(|kind| total[kind] += ended.saves[kind]);
            if let Some(why) = ended.broken {
                let text = why_of(seed, count, &why, &ended.steps);
                broken.lock().expect("nobody panics with it").get_or_insert(text);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    std::thread::scope(|scope| {
        (0..cores).for_each(|_| drop(scope.spawn(work)));
    });
    if let Some(why) = broken.into_inner().expect("nobody panicked with it") {
        panic!("{why}");
    }
    total.into_inner().expect("nobody panicked with it")
}

fn why_of(seed: u64, count: u64, why: &str, steps: &[turns::Step]) -> String {
    let mut text = format!(
        "seed {seed} (RINGSTOW_SEED={seed} RINGSTOW_SEEDS=1 cargo test --test simulation programs_break): {why}"
    );
    // All calls, for who looks at one seed.
    for step in steps.iter().filter(|_| count == 1) {
        text.push_str(&format!("\n    {step}"));
    }
    text
}

#[test]
fn programs_break_no_promise() {
    let (first, count) = (number("RINGSTOW_SEED", 0), number("RINGSTOW_SEEDS", 100));
    let [saved, not] = simulate(first, count);
    println!("{count} seeds: {saved} saves returned, {not} were refused or killed");
    assert!(saved > not || count < 10, "most saves should work: too few of them test anything");
}

#[test]
fn seed_replays_call_by_call() {
    for seed in 0..10 {
        let [one, other] = [0, 1].map(|_| world::run(seed).steps);
        assert_eq!(one.len(), other.len());
        for (number, (one, other)) in one.iter().zip(&other).enumerate() {
            assert_eq!(one, other, "seed {seed}, call {number}");
        }
    }
}
