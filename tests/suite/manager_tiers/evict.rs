//! Steps that leave the run's directory once the other disk has them (`Tiers::keep_here`).

use crate::manager_tiers::*;

#[test]
fn steps_leave_once_the_other_disk_has_them() {
    let disks = Disks::new();
    let mut manager = disks.manager_of_one(Retention { every: Some(2), ..Retention::default() });
    for step in 1..=4 {
        save(&mut manager, step, step as u8);
        manager.wait_promoted().unwrap();
    }
    assert_eq!(manager.restore(Some(2), OnDamage::Raise).unwrap().unwrap().step, 2);
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [4]);
    assert_eq!(steps_in(&disks.shared()), [1, 2, 3, 4]);
}

#[test]
fn what_the_rules_keep_for_good_is_on_the_other_disk_whatever_else_is_removed_there() {
    let disks = Disks::new();
    let best = Some("distance:min:1".parse().unwrap());
    let (hour, two_hours) = (Some(Duration::from_secs(3600)), Some(Duration::from_secs(7200)));
    let times = Retention { every_time: hour, within: hour, ..Retention::default() };
    let keep = Retention { last: Some(1), every: Some(2), best, ..times };
    let tiers = |there: Retention| {
        let there = Retention { last: Some(2), ..there };
        let places = vec![disks.shared()];
        Tiers { places, keep: there, keep_here: Some(1), ..Tiers::default() }
    };
    let manager = || CheckpointManager::found(disks.run(), keep.clone()).unwrap();
    let none = Retention::default();
    for fewer in [
        Retention { every: Some(4), ..none.clone() },
        Retention { every_time: two_hours, ..none.clone() },
        Retention { within: Some(Duration::from_secs(60)), ..none.clone() },
    ] {
        let said = manager().tiers(tiers(fewer)).unwrap_err().to_string();
        assert!(said.contains("leave it out there"), "{said}");
    }
    let more = Retention {
        every: Some(1),
        every_time: Some(Duration::from_secs(60)),
        within: two_hours,
        ..none.clone()
    };
    manager().tiers(tiers(more)).unwrap();
    // From here on all that was saved in the test's hour would stay: the rules of time have scenarios of their own.
    let keep = Retention { every_time: None, within: None, ..keep.clone() };
    let manager = || CheckpointManager::found(disks.run(), keep.clone()).unwrap();
    let mut manager = manager().tiers(tiers(none)).unwrap();
    for step in 1..=7_u64 {
        let mut state = StateDict::new();
        state.value("step", step);
        manager.save(step, &mut state, [("distance", step.abs_diff(3) as f64)]).unwrap();
        manager.wait_promoted().unwrap();
    }
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [7]);
    assert_eq!(steps_in(&disks.shared()), [2, 3, 4, 6, 7]);
}

#[test]
fn step_whose_copy_was_refused_is_copied_after_a_later_save() {
    let disks = Disks::new();
    fs::create_dir_all(disks.shared()).unwrap();
    let label = disks.shared().join(".ringstow-run.json");
    fs::write(&label, "notes").unwrap();
    let mut manager = disks.manager_of_one(Retention::default());
    save(&mut manager, 1, 1);
    let refused = manager.wait_promoted().unwrap_err();
    assert!(refused.to_string().contains("remove it"), "{refused}");
    fs::remove_file(label).unwrap();
    for step in 2..=4 {
        save(&mut manager, step, step as u8);
        manager.wait_promoted().unwrap();
    }
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [4]);
    assert_eq!(steps_in(&disks.shared()), [1, 2, 3, 4]);
}

#[test]
fn slimmed_step_leaves_too_and_is_whole_on_the_other_disk() {
    let disks = Disks::new();
    let keep = Retention { slim: Some(Slim::after(1)), ..Retention::default() };
    for keep_here in [None, Some(2)] {
        let tiers = Tiers { places: vec![disks.shared()], keep_here, ..Tiers::default() };
        let manager = CheckpointManager::found(disks.run(), keep.clone()).unwrap();
        let mut manager = manager.tiers(tiers).unwrap();
        let restored = manager.restore(None, OnDamage::Raise).unwrap();
        let next = restored.map_or(1, |found| found.step + 1);
        for step in next..next + 3 {
            let mut state = StateDict::new();
            for name in ["model.w", "optimizer.m"] {
                held::add(&mut state, name, Filled { byte: step as u8, bytes: 9000 });
            }
            manager.save(step, &mut state, [("loss", 1.0)]).unwrap();
            manager.wait_promoted().unwrap();
        }
    }
    assert_eq!(steps_in(&disks.run()), [5, 6]);
    for step in 1..=6 {
        let path = disks.shared().join(format!("step-{step:08}"));
        assert!(ringstow::load(path).unwrap().tensor("optimizer.m").is_some(), "{step}");
    }
}

#[test]
fn steps_stay_until_the_other_disk_has_them_and_none_is_passed_over() {
    let disks = Disks::new();
    fs::create_dir_all(disks.shared()).unwrap();
    let in_the_way = disks.shared().join("step-00000001");
    fs::write(&in_the_way, "").unwrap();
    let mut manager = disks.manager_of_one(Retention::default());
    for step in 1..=3 {
        save(&mut manager, step, step as u8);
    }
    manager.wait_promoted().unwrap_err();
    save(&mut manager, 4, 4);
    manager.wait_promoted().unwrap_err();
    assert_eq!(steps_in(&disks.run())[0], 1);
    fs::remove_file(&in_the_way).unwrap();
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [4]);
    assert_eq!(steps_in(&disks.shared()), [1, 2, 3, 4]);
}

#[test]
fn next_process_finds_out_what_the_other_disk_has() {
    let disks = Disks::new();
    let mut manager = disks.manager(Retention::default()); // it keeps all here
    for step in 1..=3 {
        save(&mut manager, step, step as u8);
        manager.wait_promoted().unwrap();
    }
    drop(manager);
    ringstow::remove(disks.shared().join("step-00000002"), Disposal::Remove).unwrap();
    let mut manager = disks.manager_of_one(Retention::default());
    assert_eq!(restored(&manager).step, 3);
    save(&mut manager, 4, 4);
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [4]);
    assert_eq!(steps_in(&disks.shared()), [1, 2, 3, 4]);
}

#[test]
fn step_that_a_link_leads_to_or_that_is_damaged_stays() {
    let disks = Disks::new();
    let mut manager = disks.manager_of_one(Retention::default());
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap();
    symlink("step-00000001", disks.run().join("good")).unwrap();
    drop(manager);
    let mut alone = CheckpointManager::found(disks.run(), Retention::default()).unwrap();
    save(&mut alone, 2, 2);
    drop(alone);
    let shard = disks.run().join("step-00000002/rank00000-0.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let mut manager = disks.manager_of_one(Retention::default());
    for step in 3..=4 {
        save(&mut manager, step, step as u8);
    }
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [1, 2, 4]);
    assert_eq!(steps_in(&disks.shared()), [1, 3, 4]);
}

#[test]
fn step_that_the_other_disk_has_lost_or_has_in_part_stays_and_is_copied_again() {
    let losses: [fn(&Path); 4] = [
        |step| fs::remove_dir_all(step).unwrap(),
        |step| fs::remove_dir_all(step.parent().unwrap()).unwrap(), // a new, empty disk
        |step| fs::remove_file(&shards_in(step)[0]).unwrap(),
        |step| fs::write(&shards_in(step)[0], "cut").unwrap(),
    ];
    for lose in losses {
        let disks = Disks::new();
        let mut manager = disks.manager_of_one(Retention::default());
        save(&mut manager, 1, 1);
        manager.wait_promoted().unwrap();
        lose(&disks.shared().join("step-00000001"));
        save(&mut manager, 2, 2);
        manager.wait_promoted().unwrap();
        assert_eq!(steps_in(&disks.run()), [1, 2]);
        assert_eq!(steps_in(&disks.shared()), [1, 2]);
        save(&mut manager, 3, 3);
        drop(manager);
        assert_eq!((steps_in(&disks.run()), steps_in(&disks.shared())), (vec![3], vec![1, 2, 3]));
    }
}

#[test]
fn another_save_of_the_step_on_the_other_disk_is_no_copy() {
    let disks = Disks::new();
    let mut manager = disks.manager_of_one(Retention::default());
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap();
    let copy = disks.shared().join("step-00000001");
    fs::remove_dir_all(&copy).unwrap();
    let mut state = StateDict::new();
    state.value("step", 1).step(1);
    ringstow::save(&state, &copy).unwrap();
    save(&mut manager, 2, 2);
    manager.wait_promoted().unwrap_err(); // it is newer, and stays
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [1, 2]);
}

#[test]
fn why_a_step_stays_is_told() {
    let disks = Disks::new();
    let (said, warnings) = mpsc::channel();
    tracing::subscriber::with_default(Warnings(said), || {
        let mut manager = disks.manager_of_one(Retention::default());
        let mut save = |step: u64| {
            let mut state = StateDict::new();
            state.value("step", step);
            manager.save(step, &mut state, [("loss", 1.0)]).unwrap();
            manager.wait_promoted().unwrap();
        };
        save(1);
        fs::remove_dir_all(disks.shared().join("step-00000001")).unwrap();
        save(2);
    });
    let warnings: Vec<String> = warnings.try_iter().collect();
    let stays = |said: &&String| {
        said.contains("run/step-00000001 stays: ") && said.contains("step-00000001 is not there")
    };
    assert!(warnings.iter().any(|said| stays(&said)), "{warnings:?}");
}

#[test]
fn link_to_a_file_in_a_step_keeps_the_step_here() {
    let disks = Disks::new();
    let mut manager = disks.manager_of_one(Retention::default());
    save(&mut manager, 1, 1);
    manager.wait_promoted().unwrap();
    symlink(&shards_in(&disks.run().join("step-00000001"))[0], disks.run().join("best")).unwrap();
    save(&mut manager, 2, 2);
    drop(manager);
    assert_eq!(steps_in(&disks.run()), [1, 2]);
}

#[test]
fn step_that_a_rule_removed_before_its_copy_is_no_failure() {
    let disks = Disks::new();
    let tiers = Tiers { places: vec![disks.shared()], rate: 30_000, ..Tiers::default() };
    let keep = Retention { last: Some(1), every: Some(2), ..Retention::default() };
    let mut manager = CheckpointManager::found(disks.run(), keep).unwrap().tiers(tiers).unwrap();
    (1..=3).for_each(|step| save(&mut manager, step, 1));
    manager.wait().unwrap();
    // 2 waits for its copy, since it stays for good: another program's rules remove it before that.
    ringstow::retain(disks.run(), 1, ringstow::Disposal::Remove).unwrap();
    manager.wait_promoted().unwrap();
    drop(manager);
    assert!(!steps_in(&disks.run()).contains(&2));
}

#[test]
fn tier_that_keeps_less_than_the_run_is_refused() {
    let disks = Disks::new();
    let tiers = |there: Option<usize>, keep_here| {
        let keep = Retention { last: there, ..Retention::default() };
        Tiers { places: vec![disks.shared()], keep, keep_here, ..Tiers::default() }
    };
    let manager = |last| {
        let keep = Retention { last, ..Retention::default() };
        CheckpointManager::found(disks.run(), keep).unwrap()
    };
    for (last, there, keep_here, names) in [
        (
            None,
            Some(1),
            3,
            "Tiers.keep.last=1 keeps fewer steps in the further places than keep_here=3:",
        ),
        (Some(10), Some(1), 3, "keep_here=3 and Retention.last=10:"),
        (Some(10), Some(5), 3, "than Retention.last=10:"),
    ] {
        let said = manager(last).tiers(tiers(there, Some(keep_here))).unwrap_err().to_string();
        assert!(said.contains(names), "{said}");
    }
    manager(Some(2)).tiers(tiers(Some(3), Some(3))).unwrap();
    manager(Some(10)).tiers(tiers(None, Some(3))).unwrap();
    manager(Some(10)).tiers(tiers(Some(1), None)).unwrap();
}

#[test]
fn keep_here_that_means_nothing_is_refused() {
    let disks = Disks::new();
    for (places, keep_here) in [(vec![disks.shared()], 0), (vec![], 1)] {
        let manager = CheckpointManager::found(disks.run(), Retention::default()).unwrap();
        let tiers = Tiers { places, keep_here: Some(keep_here), ..Tiers::default() };
        let said = manager.tiers(tiers).unwrap_err().to_string();
        assert!(said.contains("keep_here"), "{said}");
    }
}
