//! What is the newest step, what counts as one, and what a manager never removes or replaces.

use super::*;
use crate::sys::chance::{Chance, fix};

/// A clock that says these times, the last one for ever.
pub struct Clock(pub Vec<u64>);

impl Chance for Clock {
    fn now_unix_ms(&mut self) -> u64 {
        if self.0.len() > 1 { self.0.remove(0) } else { self.0[0] }
    }

    fn random(&mut self) -> u64 {
        std::process::id().into()
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap().map(std::result::Result::unwrap) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn last(last: usize) -> Retention {
    Retention { last: Some(last), ..Retention::default() }
}

fn newest(manager: &CheckpointManager) -> u64 {
    manager.restore(None, OnDamage::Raise).unwrap().unwrap().step
}

#[test]
fn copy_or_renamed_step_is_none_and_stays() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, last(2));
    (1..4).for_each(|step| drop(save(&mut manager, step)));
    for name in ["paper-figure-3", "best", "step-3", "step-00000003.bak", "step-00000900", "z-of-3"]
    {
        copy(&manager.path(3).unwrap(), &manager.root().join(name));
    }
    let good = manager.root().join("the good one");
    fs::rename(manager.path(2).unwrap(), &good).unwrap();
    assert_eq!(numbers(&manager), [3]);
    let saved = save(&mut manager, 4);
    assert_eq!(numbers(&manager), [3, 4], "a copy is not among the 2 newest");
    let left = saved.retained.unwrap().unwrap().left;
    let why = &left.iter().find(|left| left.path.ends_with("z-of-3")).unwrap().reason;
    assert!(why.contains("saved as \"step-00000003\", and has been copied or renamed"), "{why}");
    (5..9).for_each(|step| drop(save(&mut manager, step)));
    assert_eq!(numbers(&manager), [7, 8]);
    assert_eq!(newest(&manager), 8);
    for name in ["paper-figure-3", "best", "step-3", "step-00000003.bak", "step-00000900", "z-of-3"]
    {
        let copy = crate::load(manager.root().join(name)).unwrap();
        assert_eq!(copy.tensor("w").unwrap().data(), [3; 9000], "{name}");
    }
    assert!(good.exists());
    assert_eq!(save(&mut manager, 3).path, manager.path(3).unwrap(), "no copy is replaced");
    let taken = manager.save(900, &mut state(9), NO_METRICS).unwrap_err().to_string();
    assert!(taken.contains("is a copy of \"step-00000003\""), "{taken}");
}

#[test]
fn link_at_the_name_of_a_step_is_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, last(1));
    let precious = root.path().join("precious");
    crate::save(&state(42), &precious).unwrap();
    fs::create_dir(manager.root()).unwrap();
    std::os::unix::fs::symlink(&precious, manager.root().join("step-00000005")).unwrap();
    let refused = manager.save(5, &mut state(5), NO_METRICS).unwrap_err().to_string();
    assert!(refused.contains("is a link"), "{refused}");
    (6..9).for_each(|step| drop(save(&mut manager, step)));
    assert_eq!(crate::load(&precious).unwrap().tensor("w").unwrap().data(), [42; 9000]);
}

#[test]
fn order_is_that_of_the_saves_whatever_the_clock_says() {
    const HOUR: u64 = 3_600_000;
    // Of two hosts, steps back and forth, 1970, the year 12000.
    for times in [
        vec![500 * HOUR, 100 * HOUR, 300 * HOUR, 0],
        vec![316_540_000_000_000, 500 * HOUR, 500 * HOUR - 5, 500 * HOUR],
        vec![0],
        vec![u64::MAX],
    ] {
        let root = tempfile::tempdir().unwrap();
        fix(Clock(times.clone()));
        let mut manager = manager(&root, Retention { every: Some(10), ..last(1) });
        for step in [10, 20, 30, 11, 12, 13] {
            save(&mut manager, step);
            assert!(numbers(&manager).contains(&step), "{step} of {times:?}: what was saved stays");
            assert_eq!(newest(&manager), step, "{times:?}");
        }
        let mut steps = numbers(&manager);
        steps.sort_unstable();
        assert_eq!(steps, [10, 13, 20, 30], "{times:?}");
    }
}

#[test]
fn what_is_saved_after_going_back_is_newer_than_all_before() {
    let root = tempfile::tempdir().unwrap();
    let mut first = manager(&root, last(2));
    [10, 20, 30, 40].into_iter().for_each(|step| drop(save(&mut first, step)));
    drop(first);
    let mut back = manager(&root, last(2));
    assert_eq!(back.restore(Some(30), OnDamage::Raise).unwrap().unwrap().step, 30);
    assert_eq!(newest(&back), 40, "nothing was saved yet");
    [31, 32].into_iter().for_each(|step| drop(save(&mut back, step)));
    drop(back);
    let again = manager(&root, last(2));
    assert_eq!(newest(&again), 32);
    assert_eq!(numbers(&again), [31, 32]);
}

#[test]
fn newer_steps_are_dropped_but_for_those_that_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    (1..6).for_each(|step| drop(save(&mut manager, step)));
    manager.keep(4).unwrap();
    assert!(matches!(manager.drop_newer(9), Err(Error::NoCheckpoint { .. })));
    let dropped = manager.drop_newer(2).unwrap();
    assert_eq!(dropped, [5, 3].map(|step| manager.path(step).unwrap()));
    assert_eq!(numbers(&manager), [1, 2, 4]);
    let reasons: Vec<String> =
        crate::store::removals(manager.root()).into_iter().map(|one| one.reason).collect();
    assert_eq!(reasons, ["the run goes back to step 2"; 2]);
}

#[test]
fn history_says_that_a_newer_step_which_somebody_holds_is_not_removed() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, Retention::default());
    (1..4).for_each(|step| drop(save(&mut manager, step)));
    let held = crate::sys::lock::DirLock::take(&manager.path(3).unwrap()).unwrap();
    assert!(matches!(manager.drop_newer(2), Err(Error::Busy { .. })));
    drop(held);
    assert_eq!(numbers(&manager), [1, 2, 3]);
    let last = crate::store::removals(manager.root()).pop().unwrap();
    assert!(last.reason.starts_with("is not removed: "), "{last:?}");
}

#[test]
fn checkpoint_that_was_saved_with_a_step_s_number_beside_it_is_no_step_and_stays() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, last(1));
    save(&mut manager, 10);
    let (mut state, best) = (crate::StateDict::new(), root.path().join("best"));
    state.step(10);
    crate::save(&state, &best).unwrap();
    assert_eq!(
        manager.restore(Some(10), OnDamage::Raise).unwrap().unwrap().path,
        manager.path(10).unwrap()
    );
    assert_eq!(numbers(&manager), [10]);
    [11, 12].into_iter().for_each(|step| drop(save(&mut manager, step)));
    assert_eq!(numbers(&manager), [12]);
    assert!(best.exists());
}

#[test]
fn step_is_refused_as_the_directory_of_a_run() {
    let root = tempfile::tempdir().unwrap();
    let step = save(&mut manager(&root, last(1)), 1).path;
    let mut mistaken = CheckpointManager::found(&step, Retention::default()).unwrap();
    let refused = mistaken.save(2, &mut crate::StateDict::new(), [("loss", 1.0)]).unwrap_err();
    assert!(refused.to_string().contains("give it"), "{refused}");
    assert!(fs::read_dir(&step).unwrap().all(|one| one.unwrap().path().is_file()));
}

#[test]
fn kept_step_stays_until_it_is_released() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = manager(&root, last(1));
    save(&mut manager, 1);
    manager.keep(1).unwrap();
    manager.keep(1).unwrap();
    assert!(matches!(manager.keep(7), Err(Error::NoCheckpoint { .. })));
    (2..4).for_each(|step| drop(save(&mut manager, step)));
    assert_eq!(numbers(&manager), [1, 3]);
    assert!(manager.release(1).unwrap() && !manager.release(1).unwrap());
    save(&mut manager, 4);
    assert_eq!(numbers(&manager), [4]);
    manager.keep(4).unwrap();
    fs::remove_dir_all(manager.path(4).unwrap()).unwrap();
    assert!(manager.release(4).unwrap(), "else the next save of step 4 would be kept");
    assert!(matches!(manager.release(4), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn conversions_in_any_order_do_not_make_an_earlier_step_the_newest() {
    let root = tempfile::tempdir().unwrap();
    for step in [30, 10, 20] {
        let mut state = state(step);
        state.step(step);
        crate::save(&state, root.path().join(format!("run/step-{step}"))).unwrap();
    }
    assert_eq!(newest(&manager(&root, Retention::default())), 30);
}

#[test]
fn what_is_saved_to_an_emptied_directory_is_newer_than_copies_elsewhere() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    let there = root.path().join("there");
    let promoted = || {
        let how = crate::Promotion { replace_older: true, ..Default::default() };
        Store::found().unwrap().promote(run.join("step-1"), there.join("step-1"), how)
    };
    for value in 1..4 {
        let mut state = state(value);
        state.step(1);
        crate::save(&state, run.join("step-1")).unwrap();
    }
    promoted().unwrap();
    fs::remove_dir_all(&run).unwrap();
    let mut state = state(9);
    state.step(1);
    crate::save(&state, run.join("step-1")).unwrap();
    promoted().unwrap();
    assert_eq!(crate::load(there.join("step-1")).unwrap().tensor("w").unwrap().data(), [9; 9000]);
}
