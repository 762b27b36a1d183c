//! Bases that cannot be used, wholly or in part: an error, or a whole checkpoint and the reason in the report.

use crate::base::*;
use crate::common::{assert_says, set_acl};
use ringstow::{Disposal, Error};
use std::os::unix::fs::{PermissionsExt, symlink};

#[test]
fn base_that_is_not_there_is_an_error_and_nothing_is_written() {
    let run = Run::of(1..=1);
    let error = run.save(2, Base::at(run.at(9))).unwrap_err();
    assert_says(&error, &["step-9", "base"]);
    assert!(!run.at(2).exists());
    let report = run.save(2, Base::at(run.at(9)).or_none()).unwrap();
    assert!(fallback(&report).contains("step-9"));
    run.check(1..3);
}

#[test]
fn base_with_a_damaged_manifest_is_an_error() {
    let run = Run::of(1..=2);
    crate::common::flip(&run.at(2).join("manifest.json"), 40);
    let error = run.save(3, Base::at(run.at(2))).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(!run.at(3).exists());
}

#[test]
fn another_programs_directory_is_no_base() {
    let run = Run::of(1..=1);
    let model = run.root.path().join("model");
    ringstow::Store::found().unwrap().export(&state(1).model().unwrap(), &model).unwrap();
    assert!(run.save(2, Base::at(&model)).is_err());
    let with_base = state(1);
    let mut dict = with_base.model().unwrap();
    dict.base(Base::at(run.at(1)));
    let error =
        ringstow::Store::found().unwrap().export(&dict, run.root.path().join("other")).unwrap_err();
    assert_says(&error, &["base"]);
}

#[test]
fn base_that_was_saved_without_one_is_reported_and_the_save_can_be_a_base() {
    let run = Run::new(small_config());
    state(1).save(&run.runtime, &run.at(1)).unwrap();
    let report = run.save(2, Base::at(run.at(1))).unwrap();
    assert!(fallback(&report).contains("no hashes"));
    run.save(3, Base::at(run.at(2))).unwrap();
    assert!(run.save(4, Base::at(run.at(3))).unwrap().linked_bytes > 40_000);
    run.check(1..5);
}

#[test]
fn base_with_other_checksum_chunks_is_reported() {
    let run = Run::of(1..=2);
    let block_bytes = 8192;
    let config = Config { block_bytes, pool_bytes: 8 * block_bytes, ..small_config() };
    let other = Run { root: run.root, runtime: Runtime::new(config).unwrap() };
    let report = other.save(3, Base::at(other.at(2))).unwrap();
    assert!(fallback(&report).contains("8192"));
    other.check(1..4);
}

/// Changes the file that the next save would link, and says what the report must contain.
type Change = (fn(&Path), &'static str);

#[test]
fn file_that_is_not_what_the_base_lists_is_written_again() {
    let changes: [Change; 5] = [
        (
            |file| fs::OpenOptions::new().write(true).open(file).unwrap().set_len(9000).unwrap(),
            "bytes",
        ),
        (|file| fs::remove_file(file).unwrap(), "No such file"),
        (
            |file| {
                fs::rename(file, file.with_extension("moved")).unwrap();
                symlink(file.with_extension("moved"), file).unwrap();
            },
            "link",
        ),
        (|file| fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap(), "mode"),
        (
            |file| {
                if !set_acl(file) {
                    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
                }
            },
            "ACL",
        ),
    ];
    for (change, said) in changes {
        let run = Run::of(1..=3);
        change(&stable(&run.at(3)));
        let report = run.save(4, Base::at(run.at(3))).unwrap();
        assert_eq!((report.linked_bytes, report.unchanged_bytes), (0, 42_293), "{said}");
        assert!(fallback(&report).contains(said), "{}", fallback(&report));
        run.check([4]);
    }
}

#[test]
fn bit_that_rots_in_a_shared_file_is_found_in_each_checkpoint_that_has_it() {
    let run = Run::of(1..=4);
    crate::common::flip(&stable(&run.at(4)), 5000);
    for step in [2, 3, 4] {
        assert!(load_all(&run.runtime, &run.at(step)).is_err(), "step {step}");
    }
    run.check([1]);
    // A whole save ends that.
    run.save(5, Base::at(run.at(4)).rewritten()).unwrap();
    run.check([5]);
}

#[test]
fn removed_base_whose_files_are_shared_is_not_recycled() {
    let run = Run::of(1..=4);
    // The third's unchanged file is the fourth's, too.
    let removed = ringstow::remove(run.at(3), Disposal::Recycle).unwrap();
    assert_eq!(removed.recycled, 1);
    run.write_over_recycled_files();
    run.check([2, 4]);
}
