mod order;
mod table;

use super::*;
use crate::Dtype;
use crate::format::names;
use std::fs;

fn state(step: u64) -> StateDict<'static> {
    let mut state = StateDict::new();
    let info = crate::TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![9000] };
    state.source(info, Box::new(vec![step as u8; 9000]));
    state
}

/// A manager of an empty directory below `root`.
fn manager(root: &tempfile::TempDir, keep: Retention) -> CheckpointManager {
    manager_at(&root.path().join("run"), keep)
}

fn manager_at(root: &Path, keep: Retention) -> CheckpointManager {
    CheckpointManager::found(root, keep).unwrap()
}

const NO_METRICS: [(&str, f64); 0] = [];

fn save(manager: &mut CheckpointManager, step: u64) -> Saved {
    manager.save(step, &mut state(step), [("loss", 1.0 / step as f64)]).unwrap()
}

fn numbers(manager: &CheckpointManager) -> Vec<u64> {
    manager.steps().unwrap().iter().filter_map(|found| found.step).collect()
}

/// Flips a byte of a step's tensor.
fn damage(path: &Path) {
    let shard = path.join("rank00000-0.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(shard, bytes).unwrap();
}

#[test]
fn without_rules_nothing_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    assert!(numbers(&manager).is_empty() && manager.latest().unwrap().is_none());
    for step in 1..5 {
        assert!(save(&mut manager, step).retained.is_none());
    }
    assert_eq!(numbers(&manager), [1, 2, 3, 4]);
}

#[test]
fn each_rule_keeps_its_steps_and_the_newest_always_stays() {
    let best = |text: &str| Some(text.parse().unwrap());
    for (keep, stay) in [
        (Retention { last: Some(2), ..Retention::default() }, &[5, 6][..]),
        (Retention { every: Some(4), ..Retention::default() }, &[4, 6]),
        (Retention { best: best("loss:max:1"), ..Retention::default() }, &[1, 6]),
        (
            Retention {
                last: Some(1),
                every: Some(3),
                best: best("loss:max:2"),
                ..Retention::default()
            },
            &[1, 2, 3, 6],
        ),
    ] {
        let root = tempfile::tempdir().unwrap();
        let mut manager = manager(&root, keep.clone());
        for step in 1..7 {
            manager.save_async(step, state(step), [("loss", 1.0 / step as f64)]).unwrap();
        }
        let saved = manager.wait().unwrap().unwrap();
        assert!(saved.path.ends_with("step-00000006") && saved.retained.unwrap().is_ok());
        assert!(manager.wait().unwrap().is_none(), "nobody waits twice for one save");
        assert_eq!(numbers(&manager), stay, "{keep:?}");
    }
    let nothing = Retention { last: Some(0), ..Retention::default() };
    CheckpointManager::found("run", nothing).unwrap_err();
}

#[test]
fn a_save_is_in_progress_until_old_steps_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    assert!(!manager.is_saving());
    let shared = manager.shared.clone();
    let restoring = shared.in_use.read().unwrap();
    manager.save_async(1, state(1), NO_METRICS).unwrap();
    assert!(manager.is_saving(), "nothing is removed during a restore");
    drop(restoring);
    manager.wait().unwrap();
    assert!(!manager.is_saving());
}

#[test]
fn best_is_among_numbers_that_can_be_loaded_and_the_newer_of_equals() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    for (step, loss) in [(1, 0.5), (2, 0.1), (3, 0.1), (4, f64::NAN), (5, 0.0)] {
        manager.save(step, &mut state(step), [("loss", loss)]).unwrap();
    }
    fs::write(manager.path(5).unwrap().join(names::MANIFEST), "rubbish").unwrap();
    let best =
        |metric, direction| manager.best(metric, direction).unwrap().map(|best| best.step.unwrap());
    assert_eq!(best("loss", Direction::Min), Some(3));
    assert_eq!(best("loss", Direction::Max), Some(1));
    assert_eq!(best("accuracy", Direction::Max), None);
}

#[test]
fn failed_background_save_is_the_error_of_the_next_call_which_begins_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention { last: Some(1), ..Retention::default() });
    save(&mut manager, 1);
    fs::write(manager.path(2).unwrap(), "a file is in the way").unwrap();
    manager.save_async(2, state(2), NO_METRICS).unwrap();
    let error = manager.save_async(3, state(3), NO_METRICS).unwrap_err();
    assert!(error.to_string().contains("step-00000002"), "{error}");
    assert_eq!(numbers(&manager), [1], "a failed save removes nothing");
    manager.save_async(3, state(3), NO_METRICS).unwrap();
    drop(manager);
    assert!(
        root.path().join("run/step-00000003").join(names::MANIFEST).exists(),
        "the drop waited"
    );
}

#[test]
fn full_disk_names_the_rules_and_the_room_that_they_need() {
    let best = Some("loss:min:1".parse().unwrap());
    for (keep, said) in [
        (
            Retention { last: Some(3), ..Retention::default() },
            &["keep + 1", "`Retention::last` of 3 for 4"][..],
        ),
        (
            Retention {
                every: Some(100),
                every_time: Some(std::time::Duration::from_secs(3600)),
                best,
                ..Retention::default()
            },
            &[
                "`Retention::last` of 1 for 2",
                "`Retention::every` of 100 and `Retention::every_time` of 1h and `Retention::best` by loss",
            ],
        ),
        (Retention::default(), &["no rule", "n + 1"]),
    ] {
        let root = tempfile::tempdir().unwrap();
        let manager = manager(&root, keep);
        let error = |number| std::io::Error::from_raw_os_error(number);
        let failed = |number| {
            let path = root.path().join("step-00000001");
            let error = Error::io("writing", path.clone(), error(number));
            manager.shared.failed(&path, error).to_string()
        };
        let text = failed(nix::libc::ENOSPC);
        for part in said.iter().chain(&["free some space", "has been removed"]) {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(
            !failed(nix::libc::EACCES).contains("Retention"),
            "another failure has other remedies"
        );
    }
}

#[test]
fn step_with_a_shorter_name_is_replaced_where_it_is() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    let short = manager.root().join("step-2");
    crate::save(&state(7), &short).unwrap();
    assert_eq!(save(&mut manager, 2).path, short);
    assert_eq!(numbers(&manager), [2]);
}

#[test]
fn step_with_a_shorter_name_is_found_again_after_a_listing_that_failed() {
    use crate::sys::seam::{Call, fail_call};
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    let short = manager.root().join("step-2");
    crate::save(&state(7), &short).unwrap();
    let failing = fail_call(Call::List, manager.root(), nix::libc::EIO);
    manager.path(9).unwrap();
    drop(failing);
    assert_eq!(save(&mut manager, 2).path, short);
}

#[test]
fn restore_goes_to_the_newest_intact_step_only_if_told_to() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    assert!(manager.restore(None, OnDamage::Raise).unwrap().is_none(), "nothing was saved yet");
    (1..6).for_each(|step| drop(save(&mut manager, step)));
    let killed = manager.path(6).unwrap();
    fs::create_dir(&killed).unwrap();
    fs::write(killed.join("rank00000-0.safetensors.part"), "half").unwrap();
    let restored = manager.restore(None, OnDamage::Raise).unwrap().unwrap();
    assert_eq!((restored.step, restored.passed_over.len()), (5, 0), "a killed save is no step");

    damage(&manager.path(5).unwrap());
    fs::write(manager.path(4).unwrap().join(names::MANIFEST), "rubbish").unwrap();
    fs::remove_file(manager.path(3).unwrap().join("rank00000-0.safetensors")).unwrap();
    for step in [None, Some(5), Some(4), Some(3)] {
        let error = manager.restore(step, OnDamage::Raise).unwrap_err();
        let name = format!("step-{:08}", step.unwrap_or(5));
        assert!(error.is_of_checkpoint() && error.to_string().contains(&name), "{error}");
    }
    let error = manager.restore(None, OnDamage::Previous).unwrap_err();
    assert!(matches!(error, Error::MissingFiles { .. }), "a disk may not be mounted: {error}");
    fs::remove_dir_all(manager.path(3).unwrap()).unwrap();
    let restored = manager.restore(None, OnDamage::Previous).unwrap().unwrap();
    assert_eq!(restored.step, 2);
    let passed: Vec<PathBuf> = restored.passed_over.into_iter().map(|(path, _)| path).collect();
    assert_eq!(passed, [5, 4].map(|step| manager.path(step).unwrap()));
    let error = manager.restore(Some(4), OnDamage::Previous).unwrap_err();
    assert!(error.to_string().contains("no other is restored"), "{error}");

    (1..3).for_each(|step| damage(&manager.path(step).unwrap()));
    let error = manager.restore(None, OnDamage::Previous).unwrap_err();
    assert!(
        error.to_string().contains("step-00000005"),
        "why the newest cannot be loaded: {error}"
    );
}

#[test]
fn failure_that_is_not_the_checkpoints_is_raised() {
    use crate::sys::seam::{Call, fail_call};
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    (1..3).for_each(|step| drop(save(&mut manager, step)));
    let _refused =
        fail_call(Call::Open, &manager.path(2).unwrap().join(names::MANIFEST), nix::libc::EACCES);
    let error = manager.restore(None, OnDamage::Previous).unwrap_err();
    assert!(
        matches!(error, Error::Io { .. }) && error.to_string().contains("step-00000002"),
        "{error}"
    );
}

#[test]
fn manifest_on_bad_sectors_is_damage() {
    use crate::sys::seam::{Call, fail_call};
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    (1..4).for_each(|step| drop(save(&mut manager, step)));
    let bad = manager.path(3).unwrap().join(names::MANIFEST);
    let _failing = fail_call(Call::Read, &bad, nix::libc::EIO);
    let error = manager.restore(None, OnDamage::Raise).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    damage(&manager.path(2).unwrap());
    let restored = manager.restore(None, OnDamage::Previous).unwrap().unwrap();
    assert_eq!(restored.step, 1, "the newest that is intact");
}

#[test]
fn failed_removal_is_reported_and_fails_no_save() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention { last: Some(1), ..Retention::default() });
    save(&mut manager, 1);
    fs::create_dir(manager.path(1).unwrap().join(names::REMOVAL_MARK)).unwrap(); // no manifest can take the name
    manager.save_async(2, state(2), NO_METRICS).unwrap();
    let saved = manager.wait().unwrap().unwrap();
    let retained = saved.retained.unwrap().unwrap();
    assert!(
        retained.left[0].failed && retained.left[0].path == manager.path(1).unwrap(),
        "{retained:?}"
    );
    assert_eq!(numbers(&manager), [1, 2]);
}

#[test]
fn removal_waits_for_a_restore_and_follows_the_commit() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention { last: Some(1), ..Retention::default() });
    save(&mut manager, 1);
    let restoring = manager.shared.clone();
    let in_use = restoring.in_use.read().unwrap();
    let job = manager.save_async(2, state(2), NO_METRICS).unwrap();
    while !manager.path(2).unwrap().join(names::MANIFEST).exists() {
        std::thread::yield_now();
    }
    assert!(!job.ended() && manager.path(1).unwrap().join(names::MANIFEST).exists());
    drop(in_use);
    let retained = manager.wait().unwrap().unwrap().retained.unwrap().unwrap();
    assert_eq!(retained.removed, [manager.path(1).unwrap()]);
    assert!(!manager.path(1).unwrap().exists());
}

/// A state with a model and a part that older steps may lose.
fn with_optimizer(step: u64) -> StateDict<'static> {
    let mut state = state(step);
    let info =
        crate::TensorInfo { name: "optimizer.m".into(), dtype: Dtype::U8, shape: vec![9000] };
    state.source(info, Box::new(vec![step as u8; 9000]));
    state.value("optimizer.lr", 0.5);
    state
}

fn slims(after: usize) -> Retention {
    Retention { slim: Some(Slim::after(after)), ..Retention::default() }
}

fn save_all(manager: &mut CheckpointManager, steps: &[u64]) -> Vec<Saved> {
    let save = |step: &u64| manager.save(*step, &mut with_optimizer(*step), NO_METRICS).unwrap();
    steps.iter().map(save).collect()
}

/// The steps that have all parts.
fn whole(manager: &CheckpointManager) -> Vec<u64> {
    let steps = manager.steps().unwrap();
    steps.iter().filter(|found| found.dropped.is_empty()).filter_map(|found| found.step).collect()
}

#[test]
fn older_steps_lose_the_optimizer_and_keep_the_model() {
    let root = tempfile::tempdir().unwrap();
    let best = Some("loss:max:1".parse().unwrap());
    let mut manager = manager(&root, Retention { last: Some(3), best, ..slims(2) });
    for step in 1..7 {
        let metrics = [("loss", 1.0 / step as f64)];
        manager.save_async(step, with_optimizer(step), metrics).unwrap();
    }
    let saved = manager.wait().unwrap().unwrap();
    let slimmed: Vec<_> = saved.slimmed.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(slimmed, [manager.root().join("step-00000004")]);
    assert_eq!((numbers(&manager), whole(&manager)), (vec![1, 4, 5, 6], vec![5, 6]));
    let restored = manager.restore(Some(4), OnDamage::Raise).unwrap().unwrap();
    assert_eq!(restored.dropped, ["optimizer"]);
    assert_eq!(restored.loaded.tensor("w").unwrap().data(), vec![4; 9000]);
    assert!(restored.loaded.tensor("optimizer.m").is_none());
    assert!(manager.restore(None, OnDamage::Raise).unwrap().unwrap().dropped.is_empty());
}

#[test]
fn last_saves_and_targets_of_links_stay_whole() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, slims(1));
    save_all(&mut manager, &[10]);
    std::os::unix::fs::symlink("step-00000010", manager.root().join("mine")).unwrap();
    save_all(&mut manager, &[20, 30, 11]);
    assert_eq!(
        whole(&manager),
        [10, 11],
        "the run has gone back: 11 is the newest, and saved last"
    );
}

#[test]
fn step_that_was_not_saved_apart_stays_whole_and_is_not_tried_again() {
    let root = tempfile::tempdir().unwrap();
    save_all(&mut manager(&root, Retention::default()), &[1]);
    let mut manager = manager(&root, slims(1));
    let saved = save_all(&mut manager, &[2, 3]);
    assert!(matches!(saved[0].slimmed[..], [(_, Err(Error::Invalid { .. }))]), "{saved:?}");
    assert!(matches!(saved[1].slimmed[..], [(_, Ok(_))]), "{saved:?}");
    assert_eq!(whole(&manager), [1, 3]);
}

#[test]
fn step_that_is_saved_again_with_the_part_apart_is_slimmed() {
    let root = tempfile::tempdir().unwrap();
    save_all(&mut manager(&root, Retention::default()), &[1, 2, 3, 4]);
    let mut manager = manager(&root, slims(1));
    save_all(&mut manager, &[2, 3, 4, 5]); // the run went back to step 1
    assert_eq!(whole(&manager), [1, 5]);
}

#[test]
fn files_that_a_killed_slimming_left_go_after_the_next_save() {
    let root = tempfile::tempdir().unwrap();
    let step = root.path().join("run/step-00000001");
    save_all(&mut manager(&root, slims(1)), &[1]);
    let files = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let before: Vec<_> =
        files(&step).into_iter().map(|path| (fs::read(&path).unwrap(), path)).collect();
    crate::Store::found().unwrap().slim(&step, &["optimizer".into()]).unwrap();
    let after = files(&step);
    for (bytes, path) in before.iter().filter(|(_, path)| !path.exists()) {
        fs::write(path, bytes).unwrap();
    }
    assert!(files(&step).len() > after.len());
    save_all(&mut manager(&root, slims(1)), &[2]);
    assert_eq!(files(&step).len(), after.len());
}

#[test]
fn state_without_the_part_and_rules_that_drop_nothing_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let error = manager(&root, slims(1)).save(1, &mut state(1), NO_METRICS).unwrap_err();
    assert!(error.to_string().contains("nothing named \"optimizer\""), "{error}");
    for slim in [Slim::after(0), Slim { drop: Vec::new(), ..Slim::after(1) }] {
        let keep = Retention { slim: Some(slim), ..Retention::default() };
        let refused = CheckpointManager::found(root.path(), keep);
        assert!(matches!(refused, Err(Error::Invalid { .. })));
    }
}

/// A state of which one tensor never changes.
fn partly_frozen(step: u64) -> StateDict<'static> {
    let mut state = state(step);
    let info = crate::TensorInfo { name: "frozen".into(), dtype: Dtype::U8, shape: vec![50_000] };
    state.source(info, Box::new(vec![7; 50_000]));
    state
}

#[test]
fn linking_manager_links_what_the_step_before_has_also_after_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let keep = Retention { last: Some(1), ..Retention::default() };
    let start = || {
        let store = Store::new(crate::Config::default()).unwrap();
        CheckpointManager::linking(store, root.path(), keep.clone(), Some(3)).unwrap()
    };
    let mut manager = start();
    let save = |manager: &mut CheckpointManager, step| {
        let saved = manager.save(step, &mut partly_frozen(step), NO_METRICS).unwrap();
        assert!(saved.retained.unwrap().is_ok());
        assert!(saved.report.moved.fallbacks.iter().all(|f| f.kind != crate::FallbackKind::Base));
        saved.report.linked_bytes > 50_000
    };
    // The first writes all, the second sorts it, and every third shares nothing.
    let linked: Vec<bool> = (1..=8).map(|step| save(&mut manager, step)).collect();
    assert_eq!(linked, [false, false, true, false, true, true, false, true]);
    drop(manager);
    let mut manager = start();
    assert!(save(&mut manager, 9));
    assert_eq!(numbers(&manager), [9]);
    let restored = manager.restore(None, OnDamage::Raise).unwrap().unwrap();
    assert_eq!(restored.loaded.tensor("frozen").unwrap().data(), [7; 50_000]);
    assert_eq!(restored.loaded.tensor("w").unwrap().data(), [9; 9000]);
}

#[test]
fn linking_manager_saves_even_if_the_step_before_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(crate::Config::default()).unwrap();
    let mut manager =
        CheckpointManager::linking(store.clone(), root.path(), Retention::default(), None).unwrap();
    let saved = manager.save(1, &mut partly_frozen(1), NO_METRICS).unwrap();
    fs::remove_dir_all(&saved.path).unwrap();
    let saved = manager.save(2, &mut partly_frozen(2), NO_METRICS).unwrap();
    assert!(saved.report.moved.fallbacks.iter().any(|f| f.kind == crate::FallbackKind::Base));
    assert_eq!(numbers(&manager), [2]);
    let never = CheckpointManager::linking(store, root.path(), Retention::default(), Some(0));
    assert!(never.is_err());
}

#[test]
fn save_for_which_there_is_no_room_waits_until_copies_let_steps_go() {
    let root = tempfile::tempdir().unwrap();
    let places = vec![root.path().join("shared")];
    let rate = 30_000; // copies are slower than saves
    let tiers = Tiers { places, rate, keep_here: Some(1), ..Tiers::default() };
    let mut manager = manager(&root, Retention::default()).tiers(tiers).unwrap();
    save(&mut manager, 1);
    save(&mut manager, 2);
    manager.shared.clearing.expect(u64::MAX); // more than any disk has
    save(&mut manager, 3);
    assert_eq!(numbers(&manager), [3]);
    drop(manager);
    assert_eq!(crate::steps(root.path().join("shared")).unwrap().len(), 3);
}

#[test]
fn step_that_a_rule_keeps_and_copies_have_passed_over_is_copied_later() {
    let root = tempfile::tempdir().unwrap();
    let places = vec![root.path().join("shared")];
    let rate = 30_000; // copies are slower than saves
    let tiers = Tiers { places, rate, keep_here: Some(1), ..Tiers::default() };
    let keep = Retention {
        last: Some(1),
        best: Some("distance:min:1".parse().unwrap()),
        ..Retention::default()
    };
    let mut manager = manager(&root, keep).tiers(tiers).unwrap();
    let mut save = |step: u64| {
        manager.save(step, &mut state(step), [("distance", step.abs_diff(2) as f64)]).unwrap();
    };
    // While 1 is copied, 3 overtakes 2, the best.
    (1..=4).for_each(&mut save);
    save(5);
    drop(manager);
    let numbers = |dir: &str| -> Vec<u64> {
        let found = crate::steps(root.path().join(dir)).unwrap();
        found.iter().filter_map(|found| found.step).collect()
    };
    assert_eq!(numbers("run"), [5]);
    assert!(numbers("shared").contains(&2), "{:?}", numbers("shared"));
}

#[test]
fn program_that_restored_nothing_asks_the_places_when_there_is_no_room() {
    let root = tempfile::tempdir().unwrap();
    let tiers = |keep_here| {
        let places = vec![root.path().join("shared")];
        Tiers { places, keep_here, ..Tiers::default() }
    };
    let mut first = manager(&root, Retention::default()).tiers(tiers(None)).unwrap();
    (1..=3).for_each(|step| drop(save(&mut first, step)));
    drop(first);
    let mut manager = manager(&root, Retention::default()).tiers(tiers(Some(1))).unwrap();
    manager.shared.clearing.expect(u64::MAX); // more than any disk has
    save(&mut manager, 4);
    assert_eq!(numbers(&manager), [4]);
    drop(manager);
    assert_eq!(crate::steps(root.path().join("shared")).unwrap().len(), 4);
}
