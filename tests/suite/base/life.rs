//! What a run with bases writes and links, and what its checkpoints hold.

use crate::base::*;
use ringstow::{Disposal, Dtype, Error};

#[test]
fn third_save_links_what_has_not_changed_and_writes_the_rest() {
    let run = Run::new(small_config());
    let first = run.save(1, Base::none()).unwrap();
    assert_eq!((first.linked_bytes, first.unchanged_bytes, first.files), (0, 0, 1));

    let second = run.save(2, Base::at(run.at(1))).unwrap();
    assert_eq!((second.linked_bytes, second.unchanged_bytes, second.files), (0, 42_293, 2));
    assert_eq!(shared(&run.at(1), &run.at(2)), 0);

    for step in 3..6 {
        let third = run.save(step, Base::at(run.at(step - 1))).unwrap();
        assert_eq!((third.unchanged_bytes, third.files), (42_293, 2));
        assert_eq!(third.linked_bytes + 4096 + 700, third.file_bytes);
        assert_eq!(shared(&run.at(step - 1), &run.at(step)), 1);
        assert!(!third.moved.fallbacks.iter().any(|f| f.kind == ringstow::FallbackKind::Base));
    }
    run.check(1..6);
}

#[test]
fn state_that_has_not_changed_at_all_is_linked_whole_from_the_first_save_on() {
    let run = Run::of(1..=1);
    let mut same = state(1);
    same.step = 2;
    let report = run.save_state(&same, Base::at(run.at(1))).unwrap();
    assert_eq!((report.linked_bytes, report.files), (report.file_bytes, 1));
    assert_eq!(inodes(&run.at(1)), inodes(&run.at(2)));
    same.assert_at(&run.runtime, &run.at(2));
}

#[test]
fn removal_of_earlier_checkpoints_leaves_what_later_ones_share() {
    for disposal in [Disposal::Remove, Disposal::Recycle] {
        let run = Run::of(1..=5);
        for step in 1..5 {
            ringstow::remove(run.at(step), disposal).unwrap();
            run.check(step + 1..6);
        }
        assert!(fs::metadata(run.at(5).join("manifest.json")).is_ok());
        let report = run.save(6, Base::at(run.at(5))).unwrap();
        assert!(report.linked_bytes > 40_000);
        run.check(5..7);
    }
}

#[test]
fn tensor_that_changes_again_is_written_with_its_file_alone() {
    // Each tensor has a file of its own.
    let run = Run::new(Config { shard_bytes: 4096, ..small_config() });
    for step in 1..=3 {
        run.save(step, run.base(step, 1)).unwrap();
    }
    let mut thawed = state(4);
    thawed.tensors[2].1[12_287] ^= 1;
    let report = run.save_state(&thawed, Base::at(run.at(3))).unwrap();
    assert_eq!(report.unchanged_bytes, 30_005);
    assert_eq!(shared(&run.at(3), &run.at(4)), 2);
    thawed.assert_at(&run.runtime, &run.at(4));
    // It is as it was before, which is not what the base has.
    let report = run.save(5, Base::at(run.at(4))).unwrap();
    assert_eq!(report.unchanged_bytes, 30_005);
    run.check([3, 5]);
}

#[test]
fn every_byte_of_a_tensor_counts() {
    let run = Run::of(1..=2);
    for (tensor, at) in [(0, 0), (0, 4095), (0, 15_000), (0, 29_999), (1, 4), (2, 4096)] {
        let mut changed = state(3);
        changed.tensors[tensor].1[at] ^= 0x80;
        let report = run.save_state(&changed, Base::at(run.at(2))).unwrap();
        assert_eq!(report.unchanged_bytes as usize, 42_293 - SIZES[tensor], "byte {at}");
        changed.assert_at(&run.runtime, &run.at(3));
    }
}

#[test]
fn tensor_of_another_name_type_or_shape_is_written() {
    let run = Run::of(1..=2);
    let same = state(3);
    let [a, b, c] = [&same.tensors[0].1, &same.tensors[1].1, &same.tensors[2].1];
    let mut dict = StateDict::new();
    dict.bytes("another", Dtype::U8, &[30_000], a).unwrap();
    dict.bytes("layer.1.weight", Dtype::I8, &[5], b).unwrap();
    dict.bytes("layer.2.weight", Dtype::U8, &[3, 4096], c).unwrap();
    let report = run.save_dict(dict.base(Base::at(run.at(2))), &run.at(3)).unwrap();
    assert_eq!((report.linked_bytes, report.unchanged_bytes), (0, 0));
    let loaded = load_all(&run.runtime, &run.at(3)).unwrap();
    assert_eq!(loaded.tensor("another").unwrap().data(), a);
    assert_eq!(loaded.tensor("layer.2.weight").unwrap().data(), c);
}

#[test]
fn save_to_one_path_takes_its_own_checkpoint_as_base() {
    for recycle in [false, true] {
        let run = Run::new(Config { recycle, ..small_config() });
        let dir = run.root.path().join("last");
        for step in 1..6 {
            let state = state(step);
            let before = if step == 1 { Vec::new() } else { inodes(&dir) };
            let report =
                run.save_dict(state.to_save().unwrap().base(Base::at(&dir)), &dir).unwrap();
            assert_eq!(report.linked_bytes > 40_000, step > 2);
            let kept = inodes(&dir).iter().filter(|inode| before.contains(inode)).count();
            assert_eq!(kept, usize::from(step > 2));
            state.assert_at(&run.runtime, &dir);
            crate::common::assert_no_litter(&dir);
        }
        for inode in names_in(&dir) {
            assert_eq!(fs::metadata(dir.join(inode)).unwrap().nlink(), 1);
        }
    }
}

#[test]
fn rewritten_checkpoint_shares_nothing_and_the_next_one_links_it() {
    let run = Run::of(1..=3);
    let report = run.save(4, Base::at(run.at(3)).rewritten()).unwrap();
    assert_eq!((report.linked_bytes, report.unchanged_bytes, report.files), (0, 42_293, 2));
    assert_eq!(shared(&run.at(3), &run.at(4)), 0);
    assert!(run.save(5, Base::at(run.at(4))).unwrap().linked_bytes > 40_000);
    run.check(1..6);
}

#[test]
fn linked_files_keep_parts_apart_so_that_slimming_still_frees_them() {
    let run = Run::of(1..=2);
    let apart = |step: i64| {
        let state = state(step);
        let mut dict = state.to_save().unwrap();
        dict.droppable("layer.2").base(Base::at(run.at(step - 1)));
        run.save_dict(&dict, &run.at(step)).unwrap()
    };
    // The base has both parts in one file.
    assert_eq!(apart(3).linked_bytes, 0);
    assert!(apart(4).linked_bytes > 40_000);
    let names = ["layer.2".to_owned()];
    let config = run.runtime.config();
    ringstow::internals::store::slim(&run.at(4), &names, config).unwrap();
    run.check([1, 2, 3]);
    // What is left of a slimmed base is linked; what was dropped is written.
    let report = apart(5);
    assert_eq!(report.unchanged_bytes, 30_005);
    assert_eq!(shared(&run.at(4), &run.at(5)), 1);
    run.check([3, 5]);
}

/// Which is what `tests/each_call` does.
#[test]
fn part_that_is_set_apart_and_does_not_change_is_linked_by_the_second_save() {
    let run = Run::new(small_config());
    let save = |step: i64, base| {
        let state = State::new(step, &SIZES);
        state.save_with_extra_from(Some(base), &run.runtime, &run.at(step)).unwrap()
    };
    save(1, Base::none());
    let second = save(2, Base::at(run.at(1)));
    assert_eq!((second.unchanged_bytes, shared(&run.at(1), &run.at(2))), (30_000, 1));
    assert!(second.linked_bytes > 30_000);
}

#[test]
fn checkpoint_says_how_many_of_its_bytes_are_shared() {
    let run = Run::of(1..=3);
    let shared = |step| Checkpoint::open(run.at(step)).unwrap().info().shared_bytes;
    assert_eq!((shared(1), shared(2), shared(3)), (0, 4096 + 42_293, 4096 + 42_293));
    ringstow::remove(run.at(2), Disposal::Remove).unwrap();
    assert_eq!(shared(3), 0);
}

#[test]
fn linked_files_are_no_longer_than_the_limit_of_this_save() {
    let run = Run::of(1..=2);
    let limited = Run {
        root: run.root,
        runtime: Runtime::new(Config { shard_bytes: 20_000, ..small_config() }).unwrap(),
    };
    let report = limited.save(3, Base::at(limited.at(2))).unwrap();
    assert_eq!((report.linked_bytes, report.unchanged_bytes), (0, 42_293));
    let report = limited.save(4, Base::at(limited.at(3))).unwrap();
    assert!(report.linked_bytes > 40_000);
    limited.check(2..5);
}

#[test]
fn stripes_are_linked_each_on_its_own_disk() {
    let disk = tempfile::tempdir().unwrap();
    let config = Config { stripe: vec![disk.path().into()], ..small_config() };
    let run = Run::new(config.clone());
    for step in 1..5 {
        let report = run.save(step, run.base(step, 1)).unwrap();
        assert_eq!(report.linked_bytes > 40_000, step > 2);
        state(step).assert_at(&run.runtime, &run.at(step));
        crate::common::assert_no_litter_in(&config, &run.at(step));
    }
    let [old, new] = [3, 4].map(|step| disk.path().join(format!("step-{step}")));
    assert!(shared(&old, &new) > 0 && shared(&run.at(3), &run.at(4)) > 0);
}

#[test]
fn change_that_a_check_detects_fails_a_save_that_writes_nothing() {
    let run = Run::of(1..=1);
    let same = state(1);
    let mut dict = same.to_save().unwrap();
    dict.base(Base::at(run.at(1))).check_staged(|| Err(Error::invalid("a tensor was torn")));
    let error = run.save_dict(&dict, &run.at(2)).unwrap_err();
    assert!(error.to_string().contains("torn"), "{error}");
    assert!(!run.at(2).exists());
    run.check([1]);
}

#[test]
fn manifest_without_a_base_has_no_hashes_and_one_with_a_base_has_one_per_tensor() {
    let run = Run::of(1..=1);
    let hashes = |step| {
        let manifest = Checkpoint::open(run.at(step)).unwrap().manifest().clone();
        manifest.files.iter().map(|file| file.hashes.len()).sum::<usize>()
    };
    assert_eq!(hashes(1), 4);
    State::new(2, &SIZES).save(&runtime(), &run.at(2)).unwrap();
    assert_eq!(hashes(2), 0);
}
