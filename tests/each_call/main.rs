//! Every operation meets every trouble at each of its system calls in turn: the call fails, all calls from it on fail,
//! or the process dies before it. Each time every committed checkpoint is whole, `latest` names the newest, nothing
//! loads by half, the next save works, and `prune` finds everything else.
//!
//! `RINGSTOW_SEED` chooses a sixtieth of all calls, `RINGSTOW_EACH_CALL=all` takes every one (`make torture-calls`), and
//! `RINGSTOW_EACH_CALL=slim/ByRanks` every one of an operation, or of one of its ways. A failure prints its own name:
//! `RINGSTOW_EACH_CALL='save new/Plain/Dies/17'` repeats it alone.
#![cfg(debug_assertions)] // the seam exists in these builds only

#[path = "../common/mod.rs"]
mod common;
mod operations;
mod promises;

use common::place::{Place, Way};
use common::{copy_dir, scratch, small_config};
use fastrand::Rng;
use nix::libc::{EINTR, EIO, ENOSPC, ESTALE};
use operations::{OPERATIONS, Operation};
use promises::{End, Reader, check};
use ringstow::internals::sys::seam::{Call, Outcome, from_nth, in_process, nth};
use ringstow::{Config, EngineChoice, Switch};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// What happens at a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    /// It fails with this error number.
    Fails(i32),
    /// It is made, and fails all the same.
    FailsLate(i32),
    /// It fails, and so do all after it.
    AllFail(i32),
    /// It fails, and so do all from one soon after it on: the process dies while it clears up.
    FailsThenDies,
    /// The process ends before it, and so after the one before.
    Dies,
}

use Trouble::{AllFail, Dies, Fails, FailsLate, FailsThenDies};

const TROUBLES: [Trouble; 10] = [
    Fails(EIO),
    Fails(ENOSPC),
    Fails(EINTR),
    Fails(ESTALE),
    FailsLate(EIO),
    AllFail(EIO),
    AllFail(ENOSPC),
    AllFail(ESTALE),
    FailsThenDies,
    Dies,
];

/// Says to a child process what it does.
const CHILD_DOES: &str = "RINGSTOW_TEST_EACH_CALL_DOES";
/// Says to a child process which part of the trials it makes.
const CHILD_TRIES: &str = "RINGSTOW_TEST_EACH_CALL_TRIES";
/// What such a child says at its end begins with this.
const TALLY: &str = "tally: ";

/// A run that is made anew for each trial, at one path: stripe markers hold paths.
struct Scene<'a> {
    operation: &'a Operation,
    way: Way,
    /// Prepares, and checks without trouble.
    sound: Place,
    scratch: tempfile::TempDir,
}

impl<'a> Scene<'a> {
    fn new(operation: &'a Operation, way: Way) -> Self {
        let scratch = scratch();
        let root = scratch.path().join("root");
        fs::create_dir(&root).unwrap();
        let quick =
            Config { engine: EngineChoice::Portable, direct: Switch::Off, ..small_config() };
        let sound = Place::with_config(way, &root, quick);
        operation.prepare(&sound);
        copy_dir(&root, &scratch.path().join("template"));
        Self { operation, way, sound, scratch }
    }

    /// Makes trouble at the nth call. Returns whether there were so many, and fails if a promise is broken.
    fn trial(&self, trouble: Trouble, n: u64) -> bool {
        let root = self.scratch.path().join("root");
        fs::remove_dir_all(&root).unwrap();
        copy_dir(&self.scratch.path().join("template"), &root);
        let sound = &self.sound;
        let reader = Reader::open(sound, self.operation);
        let (end, happened) = match trouble {
            Fails(errno) => self.act(&root, n, nth(n, Outcome::Fail(errno))),
            FailsLate(errno) => self.act(&root, n, nth(n, Outcome::FailLate(errno))),
            AllFail(errno) => self.act(&root, n, from_nth(n, Outcome::Fail(errno))),
            FailsThenDies => {
                let dies = n + 1 + (n * 7) % 23;
                self.act(&root, n, move |number, _, _| match number == n || number >= dies {
                    true => Outcome::Fail(EIO),
                    false => Outcome::Pass,
                })
            }
            Dies => self.act_and_die(sound, n),
        };
        if trouble == Fails(EINTR) || !happened {
            assert!(matches!(end, End::Done), "{end:?}");
        }
        let is_alone = matches!(trouble, Fails(_));
        check(sound, self.operation, &end, &reader, is_alone, n.is_multiple_of(2));
        happened
    }

    fn act(
        &self,
        root: &Path,
        n: u64,
        decide: impl FnMut(u64, Call, &Path) -> Outcome + Send + 'static,
    ) -> (End, bool) {
        let place = Place::new(self.way, root);
        let watch = in_process(decide);
        let done = (self.operation.act)(&place);
        let calls = watch.take();
        drop(watch);
        if let Some(call) = calls.get(n as usize - 1) {
            CALL.set(format!("{call:?}"));
        }
        (done.map_or_else(End::Failed, |()| End::Done), calls.len() as u64 >= n)
    }

    fn act_and_die(&self, place: &Place, n: u64) -> (End, bool) {
        let seam = format!("kill:{n}");
        let variables = [(CHILD_DOES, self.operation.name), ("RINGSTOW_TEST_SEAM", &*seam)];
        let ended = place.in_child("child_that_does_one_thing", &variables);
        (if ended { End::Done } else { End::Died }, !ended)
    }
}

thread_local! {
    /// The call at which there was trouble last.
    static CALL: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

/// Which trials to make.
struct Choice {
    random: Rng,
    /// One of so many.
    share: u64,
    /// The groups of trials to make alone: an operation, its way, the trouble, or the first of these.
    only: Option<String>,
    /// The call to repeat alone.
    call: Option<u64>,
}

impl Choice {
    fn of_environment() -> Self {
        let text = |name| std::env::var(name).ok();
        let seed = text("RINGSTOW_SEED").map_or(0, |seed| seed.parse().expect("a number"));
        let asked = text("RINGSTOW_EACH_CALL");
        let share = if asked.is_some() { 1 } else { 60 };
        let only = asked.filter(|asked| *asked != "all");
        let last = only.as_deref().and_then(|only| only.rsplit_once('/'));
        let (only, call) = match last.map(|(group, call)| (group.to_owned(), call.parse().ok())) {
            Some((group, Some(call))) => (Some(group), Some(call)),
            _ => (only, None),
        };
        Self { random: Rng::with_seed(seed), share, only, call }
    }

    /// The calls of a group of trials; more than any operation has.
    fn calls(&mut self, group: &str) -> Box<dyn Iterator<Item = u64>> {
        let first = self.random.u64(1..=self.share);
        let is_asked = |only: &String| format!("{group}/").starts_with(&format!("{only}/"));
        match (self.only.as_ref().is_none_or(is_asked), self.call) {
            (false, _) => Box::new(std::iter::empty()),
            (true, Some(call)) => Box::new(std::iter::once(call)),
            (true, None) => Box::new((first..1000).step_by(self.share as usize)),
        }
    }
}

/// What came of some trials.
#[derive(Default, serde::Serialize, serde::Deserialize)]
struct Tally {
    trials: u64,
    broken: Vec<String>,
}

/// Makes every `parts`th group of the trials.
fn try_part(part: usize, parts: usize) -> Tally {
    let (mut choice, mut tally, mut groups) = (Choice::of_environment(), Tally::default(), 0);
    for operation in &OPERATIONS {
        for way in operation.ways {
            let scene = Scene::new(operation, *way);
            for trouble in TROUBLES {
                let group = format!("{}/{way:?}/{trouble:?}", operation.name);
                let calls = choice.calls(&group);
                groups += 1;
                if groups % parts == part {
                    try_group(&scene, trouble, &group, calls, &mut tally);
                }
            }
        }
    }
    tally
}

fn try_group(
    scene: &Scene,
    trouble: Trouble,
    group: &str,
    calls: impl Iterator<Item = u64>,
    tally: &mut Tally,
) {
    for n in calls {
        tally.trials += 1;
        CALL.take();
        match catch_unwind(AssertUnwindSafe(|| scene.trial(trouble, n))) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                eprintln!("broken: RINGSTOW_EACH_CALL='{group}/{n}' {}", CALL.take());
                tally.broken.push(format!("{group}/{n}"));
            }
        }
    }
}

/// A seam is the whole process'. So each core has a process of its own.
#[test]
fn no_call_that_fails_or_kills_breaks_a_promise() {
    let parts = std::thread::available_parallelism().map_or(1, usize::from);
    let start = |part: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["child_that_tries_a_part", "--exact", "--nocapture"])
            .env(CHILD_TRIES, format!("{part}/{parts}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let running: Vec<Child> = (0..parts).map(start).collect();
    let mut all = Tally::default();
    for child in running {
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let tally = said.lines().find_map(|line| line.strip_prefix(TALLY));
        let Tally { trials, broken } = serde_json::from_str(tally.expect(&said)).unwrap();
        all.trials += trials;
        all.broken.extend(broken);
    }
    println!(
        "promise: whatever call fails or kills, what was committed is whole, the next save works and prune finds the \
         rest: {} calls, {} broken",
        all.trials,
        all.broken.len()
    );
    let seed = std::env::var("RINGSTOW_SEED").unwrap_or_default();
    assert!(all.broken.is_empty(), "RINGSTOW_SEED={seed}: {:#?}", all.broken);
}

/// The life of a child that makes a part of the trials.
#[test]
fn child_that_tries_a_part() {
    let Ok(asked) = std::env::var(CHILD_TRIES) else { return };
    let (part, parts) = asked.split_once('/').unwrap();
    let tally = try_part(part.parse().unwrap(), parts.parse().unwrap());
    println!("\n{TALLY}{}", serde_json::to_string(&tally).unwrap());
}

/// The life of a child that dies.
#[test]
fn child_that_does_one_thing() {
    let Some(place) = Place::of_parent() else { return };
    let told = std::env::var(CHILD_DOES).unwrap();
    let operation = OPERATIONS.iter().find(|operation| operation.name == told).unwrap();
    (operation.act)(&place).unwrap();
}

#[test]
fn child_process_gets_the_error_from_its_environment() {
    let root = scratch();
    let place = Place::new(Way::Plain, root.path());
    let act = |seam| {
        place.in_child(
            "child_that_does_one_thing",
            &[(CHILD_DOES, "save new"), ("RINGSTOW_TEST_SEAM", seam)],
        )
    };
    assert!(!act("fail-from:10:5"));
    assert!(!act("nonsense"));
    assert!(act("fail:100000:5"));
}
