//! Nothing grows: after thousands of saves and loads, failures among them, the process has as many descriptors,
//! threads and children as before, and no more memory, mapped, resident or locked.
//!
//! A seed (`RINGSTOW_SEED`) chooses what each round does; `deeds.rs` has the list, and each deed checks what it saved.
//! `make torture-leaks` runs 50,000 rounds, `make torture-soak` goes on for an hour.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod deeds;
mod usage;

use common::number;
use deeds::World;
use std::time::{Duration, Instant};
use usage::{Usage, alone, assert_flat};

/// Rounds in `make test`: they take seconds, in memory.
const ROUNDS: u64 = 2000;

/// The first half warms up: pools, engines, allocator. The second may not need more.
fn rounds(count: u64, seed: u64) {
    let _alone = alone();
    let mut world = World::new(seed);
    (0..count / 2).for_each(|round| world.round(round));
    let before = Usage::settled();
    (count / 2..count).for_each(|round| world.round(round));
    assert_flat(&before, &format!("{count} rounds of seed {seed}"));
    println!("rounds: {:?}, of which failed: {}", world.done, world.failed);
    assert!(count < 100 || world.failed > 0, "no deed failed: {:?}", world.done);
}

#[test]
fn nothing_grows_over_2000_saves_and_loads() {
    rounds(ROUNDS, number("RINGSTOW_SEED", 0));
}

#[test]
#[ignore = "minutes: make torture-leaks"]
fn nothing_grows_over_many_thousands_of_saves_and_loads() {
    let (count, seed) = (number("RINGSTOW_ROUNDS", 50_000), number("RINGSTOW_SEED", 0));
    rounds(count, seed);
    println!(
        "promise: descriptors, threads, mappings and memory stay flat in Rust programs: {count} rounds, 0 broken"
    );
}

#[test]
#[ignore = "an hour: make torture-soak"]
fn nothing_grows_and_nothing_is_lost_for_an_hour() {
    let _alone = alone();
    let (minutes, seed) = (number("RINGSTOW_MINUTES", 60), number("RINGSTOW_SEED", 0));
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let mut world = World::new(seed);
    (0..ROUNDS).for_each(|round| world.round(round));
    let (before, mut count) = (Usage::settled(), ROUNDS);
    while Instant::now() < until {
        world.round(count);
        count += 1;
        if count.is_multiple_of(ROUNDS) {
            assert_flat(&before, &format!("{count} rounds of seed {seed}"));
        }
    }
    println!(
        "promise: saves, loads, failures and removals at random lose and leak nothing: {count} rounds in {minutes} \
         minutes, 0 broken"
    );
}
