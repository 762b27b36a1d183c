//! A manager whose steps are copied to another disk. `python/tests/test_tiers.py` has object stores.

mod evict;

use crate::common::held::{self, Filled};
use crate::common::shards_in;
use crate::common::warnings::Warnings;
use ringstow::{
    CheckpointManager, Config, Disposal, Error, OnDamage, Restored, Retention, Slim, StateDict,
    Store, Tiers,
};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

struct Disks(tempfile::TempDir);

impl Disks {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn run(&self) -> PathBuf {
        self.0.path().join("fast/run")
    }

    fn shared(&self) -> PathBuf {
        self.0.path().join("shared/run")
    }

    fn manager(&self, keep: Retention) -> CheckpointManager {
        self.manager_in(&self.run(), keep)
    }

    fn manager_in(&self, root: &Path, keep: Retention) -> CheckpointManager {
        let keep_there = Retention { last: keep.last.map(|last| last + 1), ..Retention::default() };
        let tiers = Tiers { places: vec![self.shared()], keep: keep_there, ..Tiers::default() };
        CheckpointManager::found(root, keep).unwrap().tiers(tiers).unwrap()
    }

    /// A manager of which only the newest step stays once the other disk has it, and there all stay.
    fn manager_of_one(&self, keep: Retention) -> CheckpointManager {
        let places = vec![self.shared()];
        let tiers = Tiers { places, keep_here: Some(1), ..Tiers::default() };
        CheckpointManager::found(self.run(), keep).unwrap().tiers(tiers).unwrap()
    }
}

fn save(manager: &mut CheckpointManager, step: u64, value: u8) {
    let state = held::only(Filled { byte: value, bytes: 9000 });
    manager.save_async(step, state, [("loss", 1.0)]).unwrap();
}

fn restored(manager: &CheckpointManager) -> Restored {
    manager.restore(None, OnDamage::Raise).unwrap().unwrap()
}

fn value(restored: &Restored) -> u8 {
    restored.loaded.tensor("t").unwrap().data()[0]
}

fn steps_in(dir: &Path) -> Vec<u64> {
    ringstow::steps(dir).unwrap().iter().filter_map(|found| found.step).collect()
}

#[test]
fn steps_are_copied_and_outlive_the_directory() {
    let disks = Disks::new();
    let mut manager = disks.manager(Retention { last: Some(1), ..Retention::default() });
    for step in 1..=4 {
        save(&mut manager, step, step as u8);
        manager.wait_promoted().unwrap();
    }
    drop(manager);
    assert_eq!((steps_in(&disks.run()), steps_in(&disks.shared())), (vec![4], vec![3, 4]));
    let manager = disks.manager(Retention::default());
    assert!(restored(&manager).path.starts_with(disks.run()), "the nearest");
    assert_eq!(manager.restore(Some(3), OnDamage::Raise).unwrap().unwrap().step, 3);
    drop(manager);
    fs::remove_dir_all(disks.run()).unwrap();
    let mut manager = disks.manager(Retention::default());
    let found = restored(&manager);
    assert_eq!((found.step, value(&found)), (4, 4));
    assert!(found.path.starts_with(disks.shared()));
    save(&mut manager, 5, 5);
    manager.wait_promoted().unwrap();
    assert_eq!(steps_in(&disks.shared()), [3, 4, 5]);
}

#[test]
fn steps_that_stay_for_good_are_not_passed_over() {
    let disks = Disks::new();
    let places = vec![disks.shared()];
    let rate = 20_000; // half a second a step, and saves are faster
    let tiers = Tiers { places, rate, ..Tiers::default() };
    let keep = Retention { last: Some(1), every: Some(3), ..Retention::default() };
    let mut manager = CheckpointManager::found(disks.run(), keep).unwrap().tiers(tiers).unwrap();
    for step in 1..=7 {
        save(&mut manager, step, step as u8);
    }
    drop(manager);
    let copied = steps_in(&disks.shared());
    assert!([3, 6, 7].iter().all(|step| copied.contains(step)), "{copied:?}");
    assert_eq!(steps_in(&disks.run()), [3, 6, 7]);
}

#[test]
fn dropped_step_whose_copy_is_in_progress_does_not_come_back() {
    let disks = Disks::new();
    let tiers = Tiers { places: vec![disks.shared()], rate: 20_000, ..Tiers::default() };
    let root = disks.run();
    let mut manager =
        CheckpointManager::found(&root, Retention::default()).unwrap().tiers(tiers).unwrap();
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap();
    save(&mut manager, 2, 2); // its copy takes half a second
    manager.wait().unwrap();
    while !disks.shared().join("step-00000002").exists() {
        std::thread::yield_now();
    }
    assert!(manager.drop_newer(1).unwrap().contains(&root.join("step-00000002")));
    manager.wait_promoted().unwrap();
    drop(manager);
    assert_eq!((steps_in(&root), steps_in(&disks.shared())), (vec![1], vec![1]));
}

#[test]
fn step_that_is_the_newest_again_is_copied_if_its_copy_gave_way() {
    let disks = Disks::new();
    let tiers = Tiers { places: vec![disks.shared()], rate: 20_000, ..Tiers::default() };
    let mut manager =
        CheckpointManager::found(disks.run(), Retention::default()).unwrap().tiers(tiers).unwrap();
    // The copy of 1 takes half a second; that of 3 overtakes that of 2.
    (1..=3).for_each(|step| save(&mut manager, step, step as u8));
    manager.drop_newer(2).unwrap();
    manager.wait_promoted().unwrap();
    drop(manager);
    assert_eq!((steps_in(&disks.run()), steps_in(&disks.shared())), (vec![1, 2], vec![1, 2]));
}

#[test]
fn step_that_stays_for_good_and_was_not_copied_is_tried_again_with_the_next() {
    let disks = Disks::new();
    let in_the_way = disks.shared().join("step-00000003");
    fs::create_dir_all(disks.shared()).unwrap();
    fs::write(&in_the_way, "").unwrap();
    let mut manager =
        disks.manager(Retention { last: Some(1), every: Some(3), ..Retention::default() });
    save(&mut manager, 3, 3);
    assert!(manager.wait_promoted().is_err());
    fs::remove_file(&in_the_way).unwrap();
    save(&mut manager, 4, 4);
    manager.wait_promoted().unwrap();
    assert_eq!(steps_in(&disks.shared()), [3, 4]);
}

#[test]
fn dropped_manager_has_copied_its_last_step() {
    let disks = Disks::new();
    save(&mut disks.manager(Retention::default()), 1, 1);
    assert_eq!(steps_in(&disks.shared()), [1]);
}

#[test]
fn what_a_step_lacks_is_read_from_its_copy() {
    for damage in
        [|path: &Path| fs::write(path, [0; 9]).unwrap(), |path| fs::remove_file(path).unwrap()]
            as [fn(&Path); 2]
    {
        let disks = Disks::new();
        save(&mut disks.manager(Retention::default()), 1, 1);
        damage(&disks.run().join("step-00000001/rank00000-0.safetensors"));
        let found = restored(&disks.manager(Retention::default()));
        assert!(found.path.starts_with(disks.run()) && found.passed_over.is_empty());
        assert_eq!(value(&found), 1);
        assert!(found.loaded.report.moved.fallbacks.iter().any(|step| step.got.contains("copy")));
    }
}

#[test]
fn step_that_cannot_be_opened_is_restored_from_its_copy() {
    let disks = Disks::new();
    save(&mut disks.manager(Retention::default()), 1, 1);
    fs::write(disks.run().join("step-00000001/manifest.json"), "damaged").unwrap();
    let found = restored(&disks.manager(Retention::default()));
    assert!(found.path.starts_with(disks.shared()));
    assert_eq!(value(&found), 1);
}

#[test]
fn two_runs_do_not_replace_each_others_steps() {
    let disks = Disks::new();
    save(&mut disks.manager(Retention::default()), 1, 1);
    let mut other = disks.manager_in(&disks.0.path().join("other"), Retention::default());
    save(&mut other, 1, 7);
    let refused = other.wait_promoted().unwrap_err();
    assert!(refused.to_string().contains("has steps of another run"), "{refused}");
    assert!(matches!(other.restore(None, OnDamage::Raise), Err(Error::Invalid { .. })));
    drop(other);
    fs::remove_dir_all(disks.run()).unwrap();
    assert_eq!(value(&restored(&disks.manager(Retention::default()))), 1);
}

#[test]
fn program_whose_run_was_taken_over_is_shut_out() {
    let disks = Disks::new();
    let mut first = disks.manager(Retention::default());
    save(&mut first, 1, 1);
    first.wait_promoted().unwrap();
    let mut second = disks.manager_in(&disks.0.path().join("other"), Retention::default());
    assert_eq!(value(&restored(&second)), 1);
    save(&mut second, 2, 2);
    second.wait_promoted().unwrap();
    save(&mut first, 2, 7);
    let shut_out = first.wait_promoted().unwrap_err();
    assert!(shut_out.to_string().contains("has taken them over"), "{shut_out}");
    drop((first, second));
    fs::remove_dir_all(disks.run()).unwrap();
    assert_eq!(value(&restored(&disks.manager(Retention::default()))), 2);
}

/// A manager whose first step is not copied, and the file that is in the way.
fn failed_copy(disks: &Disks) -> (CheckpointManager, PathBuf) {
    fs::create_dir_all(disks.shared()).unwrap();
    let in_the_way = disks.shared().join("step-00000001");
    fs::write(&in_the_way, "").unwrap();
    let mut manager = disks.manager(Retention::default());
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap_err();
    (manager, in_the_way)
}

#[test]
fn copy_that_failed_is_made_after_the_next_restore() {
    let disks = Disks::new();
    let (manager, in_the_way) = failed_copy(&disks);
    drop(manager);
    fs::remove_file(in_the_way).unwrap();
    let mut manager = disks.manager(Retention::default());
    restored(&manager);
    manager.wait_promoted().unwrap();
    assert_eq!(steps_in(&disks.shared()), [1]);
}

#[test]
fn copy_that_failed_is_tried_again_when_the_manager_closes() {
    let disks = Disks::new();
    let (manager, in_the_way) = failed_copy(&disks);
    fs::remove_file(in_the_way).unwrap();
    drop(manager);
    assert_eq!(steps_in(&disks.shared()), [1]);
}

#[test]
fn places_in_one_another_are_refused() {
    let disks = Disks::new();
    let elsewhere = disks.0.path().join("elsewhere");
    for places in [
        vec![disks.run()],
        vec![disks.run().join("x")],
        vec![disks.0.path().into()],
        vec![elsewhere.clone(), elsewhere.join("step-00000001")],
    ] {
        let manager = CheckpointManager::found(disks.run(), Retention::default()).unwrap();
        let tiers = Tiers { places, ..Tiers::default() };
        assert!(matches!(manager.tiers(tiers), Err(Error::Invalid { .. })));
    }
}

#[test]
fn tiers_of_the_configuration_are_the_managers_and_refused_by_saves_without_one() {
    let disks = Disks::new();
    let config = Config { tiers: vec![disks.shared()], ..Config::default() };
    let store = Store::new(config).unwrap();
    let alone = [
        store.save(&StateDict::new(), disks.run()).map(drop),
        store.save_async(StateDict::new(), disks.run()).map(drop),
        store.begin(disks.run(), 1).map(drop),
        store.write_rank(&StateDict::new(), 0, disks.run()).map(drop),
        store.write_rank_async(StateDict::new(), 0, disks.run()).map(drop),
    ];
    for refused in alone {
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("only a CheckpointManager copies to tiers"), "{said}");
    }
    let mut manager = CheckpointManager::new(store, disks.run(), Retention::default()).unwrap();
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap();
    assert_eq!(steps_in(&disks.shared()), [1]);
}

#[test]
fn latest_and_best_look_at_all_places() {
    let disks = Disks::new();
    let mut manager = disks.manager(Retention::default());
    save(&mut manager, 1, 1);
    save(&mut manager, 2, 2);
    manager.wait_promoted().unwrap();
    drop(manager);
    fs::remove_dir_all(disks.run()).unwrap();
    let manager = disks.manager_in(&disks.0.path().join("new/run"), Retention::default());
    let newest = disks.shared().join("step-00000002");
    assert_eq!(manager.latest().unwrap(), Some(newest.clone()));
    assert_eq!(manager.best("loss", ringstow::Direction::Min).unwrap().unwrap().path, newest);
    for step in [1, 2] {
        let path = disks.shared().join(format!("step-{step:08}"));
        shards_in(&path).iter().for_each(|shard| fs::remove_file(shard).unwrap());
    }
    manager.latest().expect_err("training must not begin anew");
}

#[test]
fn copy_neither_replaces_nor_removes_what_a_planted_link_leads_to() {
    let disks = Disks::new();
    let precious = disks.0.path().join("precious");
    let mut state = StateDict::new();
    state.value("step", 42).step(5);
    ringstow::save(&state, &precious).unwrap();
    fs::create_dir_all(disks.shared()).unwrap();
    for step in [4, 5] {
        symlink(&precious, disks.shared().join(format!("step-0000000{step}"))).unwrap();
    }
    let keep = Retention { last: Some(1), ..Retention::default() };
    let tiers = Tiers { places: vec![disks.shared()], keep, ..Tiers::default() };
    let manager = CheckpointManager::found(disks.run(), Retention::default()).unwrap();
    let mut manager = manager.tiers(tiers).unwrap();
    save(&mut manager, 5, 5);
    let refused = manager.wait_promoted().unwrap_err().to_string();
    assert!(refused.contains("step-00000005 is a symbolic link to"), "{refused}");
    save(&mut manager, 6, 6);
    manager.wait_promoted().unwrap();
    drop(manager);
    let loaded = ringstow::load(&precious).unwrap();
    assert_eq!(loaded.value("step").unwrap(), &ringstow::Value::Int(42));
}

#[test]
fn start_without_a_step_warns_of_a_directory_that_may_be_mistyped() {
    let disks = Disks::new();
    let restore = |manager: &CheckpointManager| {
        let (said, warnings) = mpsc::channel();
        let restored = tracing::subscriber::with_default(Warnings(said), || {
            manager.restore(None, OnDamage::Raise).unwrap()
        });
        (restored.map(|restored| restored.step), warnings.try_iter().collect::<Vec<_>>())
    };
    let root = disks.run();
    let run = root.display();
    let alone = CheckpointManager::found(&root, Retention::default()).unwrap();
    let missing = format!("nothing in {run} (no such directory): starting anew");
    assert_eq!(restore(&alone), (None, vec![missing]));
    fs::create_dir_all(&root).unwrap();
    assert_eq!(restore(&alone), (None, vec![format!("nothing in {run}: starting anew")]));
    let mut manager = disks.manager(Retention::default());
    let (none, said) = restore(&manager);
    assert_eq!(none, None);
    assert!(said.contains(&format!("nothing in {run} and its tiers: starting anew")), "{said:?}");
    save(&mut manager, 1, 7);
    manager.wait_promoted().unwrap();
    assert_eq!(restore(&manager), (Some(1), vec![]));
}
