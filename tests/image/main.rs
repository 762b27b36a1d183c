//! The power goes at any moment of any operation, and the disk keeps any part of what was not synced. Afterwards every
//! checkpoint that was reported as committed is there, every one that is there is whole, the next save works, and
//! `prune` finds what is left over.
//!
//! `tests/durable-image` computes what the disk may hold. `RINGSTOW_STATES` sets how many of these contents are checked
//! for each scenario, `RINGSTOW_SEED` which; `make torture-image` is the long form.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

mod check;
#[path = "../common/mod.rs"]
mod common;
// Which crashes a missing sync shows in depends on the engine's order; the default's is enough to prove the rig.
#[cfg(feature = "uring")]
mod needed;
mod scenario;

use check::check;
use common::number;
use common::place::{WAYS, Way};
use durable_image::{Journal, MODES, Mode, State};
use fastrand::Rng;
use scenario::{Act, Recorded, SEAM, Scenario, World, roots};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Contents of the disk at each moment that are picked at random.
const RANDOM: usize = 6;

/// One content of the disk, and what must be on it.
struct Case<'a> {
    moment: usize,
    mode: Mode,
    state: State,
    world: &'a World,
}

impl Recorded {
    /// Every content that the disk may have, up to a bound, with these of the syncs. None of those in `seen`, and none
    /// twice.
    fn cases(&self, journal: &Journal, seen: &mut HashSet<u64>, rng: &mut Rng) -> Vec<Case<'_>> {
        let mut cases = Vec::new();
        for moment in self.moments(journal) {
            let world = self.promised(moment);
            for mode in MODES {
                for state in journal.states(moment, mode, RANDOM, rng) {
                    if seen.insert(id(&state, world)) {
                        cases.push(Case { moment, mode, state, world });
                    }
                }
            }
        }
        cases
    }

    /// Writes the content to the disk, and checks it.
    fn check(&self, case: &Case<'_>, rng: &mut Rng) -> check::Outcome {
        let _shared = SEAM.read().unwrap_or_else(PoisonError::into_inner);
        case.state.write_to(&roots(&self.place)).map_err(|error| error.to_string())?;
        let (world, is_smooth, prune_first) = (case.world, self.is_smooth, rng.bool());
        let checked = || check(&self.place, world, is_smooth, prune_first);
        let checked = catch_unwind(AssertUnwindSafe(checked));
        checked.unwrap_or_else(|_| Err("it panics".into()))
    }

    /// For people: what was lost when.
    fn tell(&self, case: &Case<'_>) -> String {
        let call = self.journal.call(case.moment);
        let lost = self.journal.tell(&case.state);
        format!("{:?}, before call {} ({call})\n{lost}", case.mode, case.moment)
    }
}

fn id(state: &State, world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    (state.fingerprint(), world).hash(&mut hasher);
    hasher.finish()
}

fn scenarios(way: Way, rng: &mut Rng) -> Vec<Scenario> {
    use Act::{MakeDir, Prune, Remove, Retain, Save, SaveAsync, SaveFailing, SaveFrom};
    let kept = match way {
        // The files of step 0 are the recycled ones of step 2.
        Way::Recycled => vec![Save("a", 0), Save("a", 1)],
        _ => vec![Save("a", 1)],
    };
    let scenario =
        |before: &[Act], acts: &[Act]| Scenario { way, before: before.into(), acts: acts.into() };
    let steps = [Save("step-1", 1), Save("step-2", 2), Save("step-3", 3)];
    let mut all = vec![
        scenario(&[], &[Save("new/a", 1), Save("new/a", 2)]),
        scenario(&kept, &[Save("a", 2), Save("a", 3)]),
        scenario(&[], &[MakeDir("a"), Save("a", 1)]),
        scenario(&kept, &[Remove("a"), Save("a", 2)]),
        scenario(&steps, &[Retain, Save("step-4", 4), Prune]),
        scenario(
            &[SaveFrom("a", 1, "a")],
            &[SaveFrom("b", 2, "a"), Remove("a"), SaveFrom("b", 3, "b")],
        ),
        scenario(&kept, &[SaveFailing("a", 2, rng.u64(1..120)), Save("a", 3)]),
        scenario(&[], &[SaveFailing("a", 1, rng.u64(1..120)), Prune, Save("a", 2)]),
    ];
    if way == Way::Plain {
        all.push(scenario(&kept, &[SaveAsync("a", 2), SaveAsync("b", 3)]));
        all.push(scenario(&[], &[Act::Export("model", 1)]));
        all.push(scenario(&[Save("a", 1), Act::Mark("a")], &[Remove("a"), Save("a", 2)]));
    }
    all
}

/// Checks so many contents of each scenario, and returns how many these were.
fn lose_power(way: Way, seed: u64, states: usize) -> usize {
    let (mut checked, mut broken) = (0, Vec::new());
    let mut rng = Rng::with_seed(seed);
    for scenario in scenarios(way, &mut rng) {
        let recorded = scenario.record();
        let mut cases = recorded.cases(&recorded.journal, &mut HashSet::new(), &mut rng);
        rng.shuffle(&mut cases);
        cases.truncate(states);
        let first = cases.iter().find_map(|case| {
            checked += 1;
            let found = recorded.check(case, &mut rng).err()?;
            Some(format!("{:?}: {found}\n{}", scenario.acts, recorded.tell(case)))
        });
        broken.extend(first);
    }
    assert!(broken.is_empty(), "{way:?}, seed {seed}:\n{}", broken.join("\n"));
    checked
}

fn share(way: Way) {
    let (seed, states) = (number("RINGSTOW_SEED", 1), number("RINGSTOW_STATES", 30));
    let checked = lose_power(way, seed, states as usize);
    println!("{way:?}: {checked} contents of seed {seed}");
}

#[test]
fn power_loss_keeps_what_was_committed() {
    share(Way::Plain);
}

#[test]
fn power_loss_over_recycled_files_keeps_what_was_committed() {
    share(Way::Recycled);
}

#[test]
fn power_loss_of_two_disks_keeps_what_was_committed() {
    share(Way::Striped);
}

#[test]
fn power_loss_of_several_ranks_keeps_what_was_committed() {
    share(Way::ByRanks);
}

/// Contents of each sequence for one seed of the long form, which takes other ones with the next.
const STATES_A_SEED: usize = 400;

/// The long form.
#[test]
#[ignore = "make torture-image"]
fn power_loss_at_every_call_keeps_what_was_committed() {
    let minutes = number("RINGSTOW_MINUTES", 10);
    let (started, first) = (Instant::now(), number("RINGSTOW_SEED", 1));
    let mut checked = 0;
    for seed in first.. {
        checked += std::thread::scope(|scope| {
            let all = WAYS.map(|way| scope.spawn(move || lose_power(way, seed, STATES_A_SEED)));
            all.into_iter().map(|way| way.join().expect("a promise was broken")).sum::<usize>()
        });
        if started.elapsed() > Duration::from_secs(60 * minutes) {
            break;
        }
    }
    println!(
        "promise: a loss of power at any call, whatever the disk keeps of what was not synced, loses and mixes no \
         committed checkpoint: {checked} contents of the disk, 0 broken"
    );
}
