//! Other processes that change the base, or recycle its files, while a save links them.

use crate::base::*;
use ringstow::Disposal;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, fail_call, fail_if, on_thread};

/// Does something on another thread before the first link is made.
fn at_first_link(act: impl FnOnce() + Send + 'static) -> Watch {
    let mut act = Some(act);
    on_thread(move |_, call, _| {
        if let Some(act) = act.take_if(|_| call == Call::Link) {
            std::thread::spawn(act).join().unwrap();
        }
        Outcome::Pass
    })
}

#[test]
fn base_that_is_removed_after_it_was_opened_leaves_a_whole_checkpoint() {
    for recycle in [Disposal::Remove, Disposal::Recycle] {
        let run = Run::of(1..=3);
        let base = run.at(3);
        let removing = at_first_link(move || drop(ringstow::remove(base, recycle).unwrap()));
        let report = run.save(4, Base::at(run.at(3))).unwrap();
        drop(removing);
        assert_eq!(report.linked_bytes, 0);
        fallback(&report);
        run.check([1, 2, 4]);
    }
}

#[test]
fn base_that_is_removed_after_its_files_are_linked_is_linked_or_written_and_never_lost() {
    let run = Run::of(1..=3);
    let base = run.at(3);
    let (mut links, mut is_removed) = (0, false);
    let removing = on_thread(move |_, call, _| {
        links += usize::from(call == Call::Link);
        if links == 2 && call != Call::Link && !std::mem::replace(&mut is_removed, true) {
            let base = base.clone();
            let removed = move || drop(ringstow::remove(base, Disposal::Recycle).unwrap());
            std::thread::spawn(removed).join().unwrap();
        }
        Outcome::Pass
    });
    run.save(4, Base::at(run.at(3))).unwrap();
    drop(removing);
    // Whatever could be recycled is written over now.
    run.write_over_recycled_files();
    run.check([1, 2, 4]);
}

/// The file of the new base has the name and the length of the old one's.
#[test]
fn other_checkpoint_with_the_same_names_is_not_taken_for_the_base() {
    let run = Run::of(1..=1);
    let base = run.at(1);
    let replacing = at_first_link(move || {
        ringstow::remove(&base, Disposal::Remove).unwrap();
        State::new(9, &SIZES).save(&runtime(), &base).unwrap();
    });
    let mut same = state(1);
    same.step = 2;
    let report = run.save_state(&same, Base::at(run.at(1))).unwrap();
    drop(replacing);
    assert_eq!(report.linked_bytes, 0);
    assert!(fallback(&report).contains("replaced"), "{}", fallback(&report));
    same.assert_at(&run.runtime, &run.at(2));
}

#[test]
fn file_that_gets_a_second_name_while_it_is_recycled_is_not_written_over() {
    let run = Run::of(1..=3);
    let (shard, copy) = (stable(&run.at(3)), run.root.path().join("copy"));
    let before = fs::read(&shard).unwrap();
    fs::remove_dir_all(run.at(2)).unwrap(); // the third has its files alone
    let (from, to) = (shard.clone(), copy.clone());
    let linking = on_thread(move |_, call, on| {
        if call == Call::Rename && on == from {
            fs::hard_link(on, &to).unwrap();
        }
        Outcome::Pass
    });
    ringstow::remove(run.at(3), Disposal::Recycle).unwrap();
    drop(linking);
    assert!(copy.exists() && !shard.exists());
    run.write_over_recycled_files();
    assert_eq!(fs::read(&copy).unwrap(), before);
}

#[test]
fn file_system_without_links_gets_a_whole_checkpoint_and_the_report_says_why() {
    use nix::libc::{EMLINK, EPERM, EXDEV};
    for errno in [EPERM, EXDEV, EMLINK] {
        let run = Run::of(1..=3);
        let refusing = on_thread(fail_if(errno, |call, _| call == Call::Link));
        let report = run.save(4, Base::at(run.at(3))).unwrap();
        drop(refusing);
        assert_eq!((report.linked_bytes, report.unchanged_bytes), (0, 42_293));
        assert!(fallback(&report).contains(&format!("os error {errno}")));
        run.check(1..5);
    }
}

#[test]
fn link_that_is_made_although_its_answer_is_lost_counts() {
    let run = Run::of(1..=3);
    let losing = on_thread(
        |_, call, _| if call == Call::Link { Outcome::FailLate(5) } else { Outcome::Pass },
    );
    let report = run.save(4, Base::at(run.at(3))).unwrap();
    drop(losing);
    assert!(report.linked_bytes > 40_000);
    run.check(1..5);
}

#[test]
fn linked_file_is_synced_before_the_commit() {
    let run = Run::of(1..=3);
    let number = u32::from(!stable(&run.at(3)).ends_with("rank00000-0.safetensors"));
    let linked = run.at(4).join(format!("rank00000-{number}.safetensors.part"));
    let failing = fail_call(Call::Sync, &linked, 5);
    let error = run.save(4, Base::at(run.at(3))).unwrap_err();
    drop(failing);
    assert!(error.to_string().contains("syncing"), "{error}");
    assert!(!run.at(4).exists());
    run.check(1..4);
}
