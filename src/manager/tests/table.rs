//! The scenarios that Python's manager passes, too: `python/tests/manager/test_manager_table.py` reads the same file.

use super::order::Clock;
use super::*;
use crate::Best;
use crate::sys::chance::fix;
use crate::units::parse_span;
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};

const NOON: u64 = 1_800_000_000_000;

/// A run, its places, and the manager that is open.
struct Scene<'a> {
    scenario: &'a Value,
    dir: tempfile::TempDir,
    manager: Option<CheckpointManager>,
}

fn number(of: &Value) -> u64 {
    of.as_u64().unwrap()
}

impl Scene<'_> {
    /// The directory `here`, or of a place.
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn step(&self, of: &Value) -> PathBuf {
        self.at(of[0].as_str().unwrap()).join(format!("step-{:08}", number(&of[1])))
    }

    /// Opens a manager with the scenario's rules, some of which may be others from now on.
    fn open(&mut self, others: &Value) {
        self.manager = None;
        let rule = |name: &str| others.get(name).or_else(|| self.scenario.get(name));
        let count = |name: &str| rule(name).map(|value| number(value) as usize);
        let best = rule("best").map(|best| Best {
            metric: best[0].as_str().unwrap().into(),
            direction: best[1].as_str().unwrap().parse().unwrap(),
            count: number(&best[2]) as usize,
        });
        let (last, every) = (count("last"), rule("every").map(number));
        let slim = count("slim_after").map(Slim::after);
        let time = |name: &str| rule(name).map(|text| parse_span(text.as_str().unwrap()).unwrap());
        let (every_time, within) = (time("every_time"), time("within"));
        let keep = Retention { last, every, every_time, within, best, slim };
        let mut manager = manager_at(&self.at("here"), keep);
        if let Some(places) = rule("places") {
            let places = places.as_array().unwrap().iter();
            let places = places.map(|name| self.at(name.as_str().unwrap())).collect();
            let keep = Retention { last: count("last_there"), ..Retention::default() };
            let tiers = Tiers { places, keep, keep_here: count("keep_here"), rate: 0 };
            manager = manager.tiers(tiers).unwrap();
        }
        self.manager = Some(manager);
    }

    fn act(&mut self, act: &Value) {
        let acts: Vec<_> = act.as_object().unwrap().iter().collect();
        let (what, of) = (acts[0].0.as_str(), acts[0].1);
        let step = || number(of);
        let path = if of[0].is_string() { self.step(of) } else { PathBuf::new() };
        match what {
            "open" => return self.open(of),
            "clock" => {
                let time = NOON.saturating_add_signed(1000 * of.as_i64().unwrap());
                return fix(Clock(vec![time]));
            }
            "away" => {
                let place = self.at(of.as_str().unwrap());
                let _ = fs::rename(&place, place.with_extension("away"));
                return fs::write(place, "not mounted").unwrap();
            }
            "back" => {
                let place = self.at(of.as_str().unwrap());
                fs::remove_file(&place).unwrap();
                return drop(fs::rename(place.with_extension("away"), place));
            }
            "is_here" => return assert_eq!(steps_in(&self.at("here")), numbers_of(of)),
            "lose" => return fs::remove_dir_all(path).unwrap(),
            "lose_file" => return fs::remove_file(shard(&path)).unwrap(),
            "cut" => {
                return fs::File::options()
                    .write(true)
                    .open(shard(&path))
                    .unwrap()
                    .set_len(9)
                    .unwrap();
            }
            "flip" => return damage(&path),
            "link" => {
                let to = self.step(&serde_json::json!(["here", of])).join(names::MANIFEST);
                return symlink(to, self.at("here").join("mine")).unwrap();
            }
            _ => {}
        }
        let manager = self.manager.as_mut().unwrap();
        match what {
            "save" => {
                let loss = act.get("loss").map(|loss| ("loss", loss.as_f64().unwrap()));
                manager.save(step(), &mut with_optimizer(step()), loss).unwrap();
                let _ = manager.wait_promoted(); // a place may be away
            }
            "restore" => drop(manager.restore(Some(step()), OnDamage::Raise).unwrap()),
            "drop_newer" => {
                manager.restore(Some(step()), OnDamage::Raise).unwrap();
                manager.drop_newer(step()).unwrap();
                manager.wait_promoted().unwrap();
            }
            "keep" => manager.keep(step()).unwrap(),
            "release" => assert!(manager.release(step()).unwrap()),
            other => panic!("no act {other}"),
        }
    }

    /// What is where once the manager is closed, and what the next one finds.
    fn check(&mut self) {
        self.manager = None;
        for place in ["here", "a", "b"] {
            if let Some(steps) = self.scenario.get(place) {
                assert_eq!(steps_in(&self.at(place)), numbers_of(steps), "{place}");
            }
        }
        if let Some(steps) = self.scenario.get("whole") {
            let all = crate::steps(self.at("here")).unwrap();
            let whole = all.iter().filter(|found| found.dropped.is_empty());
            let mut whole: Vec<u64> = whole.filter_map(|found| found.step).collect();
            whole.sort_unstable();
            assert_eq!(whole, numbers_of(steps), "whole");
        }
        self.open(&Value::Null);
        let manager = self.manager.as_ref().unwrap();
        if let Some(step) = self.scenario.get("best_step") {
            let (metric, direction) = ("loss", &self.scenario["best"][1]);
            let best = manager.best(metric, direction.as_str().unwrap().parse().unwrap());
            assert_eq!(best.unwrap().unwrap().step, step.as_u64());
        }
        let Some(expected) = self.scenario.get("restored") else { return };
        let passes_over = self.scenario.get("passes_over").is_some();
        let on_damage = if passes_over { OnDamage::Previous } else { OnDamage::Raise };
        match (expected.as_u64(), manager.restore(None, on_damage)) {
            (Some(step), restored) => {
                let restored = restored.unwrap().unwrap();
                assert_eq!(restored.step, step);
                assert_eq!(restored.loaded.tensor("w").unwrap().data()[0], step as u8);
            }
            (None, restored) => drop(restored.unwrap_err()),
        }
    }
}

fn shard(step: &Path) -> PathBuf {
    let files = fs::read_dir(step).unwrap().map(|file| file.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|end| end == "safetensors")).min().unwrap()
}

fn numbers_of(steps: &Value) -> Vec<u64> {
    steps.as_array().unwrap().iter().map(number).collect()
}

fn steps_in(dir: &Path) -> Vec<u64> {
    let found = crate::steps(dir).unwrap();
    let mut steps: Vec<u64> = found.iter().filter_map(|found| found.step).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn both_managers_leave_the_same_steps_in_the_same_places() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manager_scenarios.json");
    let scenarios: Vec<Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let fails = |scenario: &&Value| catch_unwind(AssertUnwindSafe(|| play(scenario))).is_err();
    let failed: Vec<&Value> = scenarios.iter().filter(fails).map(|one| &one["name"]).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

fn play(scenario: &Value) {
    fix(Clock(vec![NOON]));
    let mut scene = Scene { scenario, dir: tempfile::tempdir().unwrap(), manager: None };
    scene.open(&Value::Null);
    scenario["acts"].as_array().unwrap().iter().for_each(|act| scene.act(act));
    scene.check();
}
