//! What a clean-up does where the system fails or refuses.
#![cfg(debug_assertions)] // the seam exists in these builds only

use super::*;
use crate::common::{retain_as_planned, shards_in};
use nix::libc::{EACCES, EIO, ESTALE};
use ringstow::Wanted;
use ringstow::internals::{
    format::names,
    store::{latest, prune, retain},
    sys::seam::{Call, Outcome, fail_call, on_thread},
};
use std::sync::atomic::{AtomicBool, Ordering};

fn left(removed: &ringstow::Removed) -> Vec<&Path> {
    removed.left.iter().map(|left| &*left.path).collect()
}

fn says(reason: &str, words: &[&str]) {
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
}

#[test]
fn a_stripe_directory_that_stays_because_the_lock_fails_is_reported() {
    let disks = Disks::new(1);
    disks.save(1);
    let dir = disks.dir().canonicalize().unwrap();
    let failing = fail_call(Call::Lock, &dir, EIO);
    let removed = disks.remove(Disposal::Remove).unwrap();
    drop(failing);
    assert!(!dir.exists());
    assert_eq!(names_in(&disks.companion(0)), ["companion.json"]);
    assert_eq!(left(&removed), [disks.companion(0)]);
    says(&removed.left[0].reason, &["marker", "no lock", "ringstow prune"]);
    // A later clean-up of the disk finds it, and cannot know whose save may come.
    let swept = prune(&disks.stripe(0), &small_config()).unwrap();
    assert_eq!(swept.left.len(), 1, "{swept:?}");
    assert_eq!(swept.left[0].path, disks.companion(0));
    says(&swept.left[0].reason, &["only the marker of", "step-1"]);
    // The run's own knows that its checkpoint is gone.
    let swept = disks.prune();
    assert_eq!(swept.removed.last(), Some(&disks.companion(0)));
    disks.assert_empty();
}

#[test]
fn prune_removes_markers_that_are_nobodys_and_no_others() {
    let disks = Disks::new(1);
    let (run, stripe) = (disks.run(), disks.stripe(0));
    fs::create_dir(&run).unwrap();
    let run = run.canonicalize().unwrap();
    let write = |dir: &str, name: &str, text: &str| {
        fs::create_dir_all(stripe.join(dir)).unwrap();
        fs::write(stripe.join(dir).join(name), text).unwrap();
    };
    let marker = |of: &Path| format!("{{\"checkpoint\":\"{}\"}}", of.display());
    write("torn", "companion.json.part", "");
    write("gone", "companion.json", &marker(&run.join("gone")));
    write("elsewhere", "companion.json", &marker(Path::new("/other/elsewhere")));
    write("shards", "companion.json", &marker(&run.join("shards")));
    write("shards", "rank00000-1.safetensors", "all that is left of it");
    write("theirs", "notes.txt", "mine");
    write("app", "companion.json", r#"{"name": "companion"}"#);
    write("cut", "companion.json", r#"{"check"#);
    fs::create_dir(stripe.join("empty")).unwrap();
    disks.prune();
    assert_eq!(names_in(&stripe), ["app", "elsewhere", "empty", "shards", "theirs"]);
}

#[test]
fn prune_passes_over_directories_on_a_stripe_disk_that_it_may_not_list() {
    let disks = Disks::new(1);
    disks.save(1);
    let denied = disks.stripe(0).join("lost+found");
    fs::create_dir(&denied).unwrap();
    let _failing = fail_call(Call::List, &denied, EACCES);
    disks.prune();
}

#[test]
fn prune_says_that_it_failed_where_the_disk_does_and_not_where_it_may_not_look() {
    let disks = Disks::new(1);
    let [first, ..] = run_of_three(&disks);
    for (errno, failed) in [(EIO, true), (EACCES, false)] {
        let _failing = fail_call(Call::List, &first, errno);
        let swept = disks.prune();
        assert_eq!((swept.left.len(), &swept.left[0].path), (1, &first), "{swept:?}");
        assert_eq!(swept.left[0].failed, failed, "{swept:?}");
    }
}

/// A run of three steps that are striped over one disk.
fn run_of_three(disks: &Disks) -> [PathBuf; 3] {
    [1, 2, 3].map(|step| {
        let dir = disks.dir().with_file_name(format!("step-{step}"));
        State::new(step, &SIZES).save(&disks.runtime(), &dir).unwrap();
        dir
    })
}

/// Checks that nothing but the third step of a run is left, on its disk too.
fn assert_third_alone(disks: &Disks, run: &Path) {
    assert_eq!(
        (names_in(run), names_in(&disks.stripe(0))),
        (vec!["step-3".into()], vec!["step-3".into()])
    );
}

/// Turns a checkpoint into what a save leaves that is killed before its commit.
fn uncommit(dirs: &[&Path]) {
    for dir in dirs {
        for shard in shards_in(dir) {
            fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
        }
    }
    fs::remove_file(dirs[0].join("manifest.json")).unwrap();
}

#[test]
fn clean_ups_leave_the_checkpoint_whose_marker_cannot_be_read_and_do_the_rest() {
    let disks = Disks::new(1);
    let run = disks.run();
    let [first, second, third] = run_of_three(&disks);
    let retention = RetainOptions::new(1);
    let failing = fail_call(Call::Read, &disks.companion(0).join("companion.json"), EIO);
    State::new(1, &SIZES).assert_at(&disks.runtime(), &first);
    let retained = retain_as_planned(&run, &retention, &disks.config());
    assert_eq!((&*retained.kept, &*retained.removed), (&[third.clone()][..], &[second][..]));
    let swept = disks.prune();
    for left in [retained.left, swept.left] {
        assert_eq!((left.len(), &left[0].path, left[0].failed), (1, &first, true), "{left:?}");
        says(&left[0].reason, &["companion.json", "reading", "dmesg"]);
    }
    drop(failing);
    State::new(1, &SIZES).assert_at(&disks.runtime(), &first);
    retain(&run, &retention, &disks.config()).unwrap();
    assert_third_alone(&disks, &run);
}

#[test]
fn stripe_directory_whose_marker_cannot_be_read_does_not_hide_the_checkpoints_own() {
    let disks = Disks::new(2);
    let other = disks.root.path().join("other/step-1");
    for (step, dir, disk) in [(1, disks.dir(), 1), (2, other, 0)] {
        let config = Config { stripe: vec![disks.stripe(disk)], ..small_config() };
        State::new(step, &SIZES).save(&Runtime::new(config).unwrap(), &dir).unwrap();
    }
    let _failing = fail_call(Call::Read, &disks.companion(0).join("companion.json"), EIO);
    disks.assert_holds(1);
}

#[test]
fn save_goes_on_if_prune_removes_an_empty_stripe_directory_meanwhile() {
    let disks = Disks::new(1);
    fs::create_dir_all(disks.dir()).unwrap();
    fs::create_dir(disks.companion(0)).unwrap();
    let (own, companion, first) = (disks.dir(), disks.companion(0), AtomicBool::new(true));
    let watch = on_thread(move |_, call, on| {
        if call == Call::List && on == own && first.swap(false, Ordering::Relaxed) {
            fs::remove_dir(&companion).unwrap();
        }
        Outcome::Pass
    });
    disks.save(1);
    drop(watch);
    disks.assert_holds(1);
}

/// What the system does not say is not "missing": nobody goes back to an earlier checkpoint for it.
#[test]
fn directory_that_the_system_does_not_show_is_an_error_and_no_missing_file() {
    let disks = Disks::new(1);
    disks.save(1);
    let run = disks.run();
    for (call, path) in
        [(Call::Look, disks.stripe(0)), (Call::List, disks.companion(0)), (Call::Look, disks.dir())]
    {
        for errno in [EIO, ESTALE] {
            let failing = fail_call(call, &path, errno);
            let error = load_all(&disks.runtime(), &disks.dir()).unwrap_err();
            assert_eq!(error.io_error().unwrap().raw_os_error(), Some(errno), "{error}");
            assert!(!error.is_incomplete(), "{error}");
            let newest = latest(&run, &Wanted::default(), &disks.config(), &Arc::default());
            assert!(!matches!(newest, Ok(None)), "{call:?} {}", path.display());
            drop(failing);
        }
    }
    let _failing = fail_call(Call::Look, &disks.companion(0).join("rank00000-1.safetensors"), EIO);
    let removed = disks.remove(Disposal::Remove).unwrap_err();
    assert_eq!(removed.io_error().unwrap().raw_os_error(), Some(EIO), "{removed}");
}

#[test]
fn file_that_is_lost_is_missing_whatever_other_disks_refuse() {
    let disks = Disks::new(2);
    let config = Config { stripe: vec![disks.stripe(0)], ..small_config() };
    State::new(1, &SIZES).save(&Runtime::new(config).unwrap(), &disks.dir()).unwrap();
    fs::remove_file(disks.companion(0).join("rank00000-1.safetensors")).unwrap();
    let _failing = fail_call(Call::Look, &disks.stripe(1), EACCES);
    let error = load_all(&disks.runtime(), &disks.dir()).unwrap_err();
    assert!(matches!(error, Error::MissingFiles { .. }), "{error}");
}

#[test]
fn prune_leaves_the_killed_save_whose_marker_cannot_be_read_and_clears_the_others() {
    let disks = Disks::new(1);
    let run = disks.run();
    let [first, second, _] = run_of_three(&disks);
    uncommit(&[&first, &disks.companion(0)]);
    uncommit(&[&second, &disks.stripe(0).join("step-2")]);
    let before = names_in(&first);
    let failing = fail_call(Call::Read, &disks.companion(0).join("companion.json"), EIO);
    let swept = disks.prune();
    drop(failing);
    assert_eq!((swept.left.len(), &swept.left[0].path), (1, &first), "{swept:?}");
    assert_eq!(names_in(&first), before);
    assert!(!second.exists() && !disks.stripe(0).join("step-2").exists());
    disks.prune();
    assert_third_alone(&disks, &run);
}

#[test]
fn prune_leaves_a_marker_alone_that_it_cannot_read_and_removes_the_others() {
    let disks = Disks::new(1);
    let run = disks.run();
    fs::create_dir(&run).unwrap();
    let run = run.canonicalize().unwrap();
    for name in ["step-1", "step-2"] {
        let dir = disks.stripe(0).join(name);
        fs::create_dir(&dir).unwrap();
        let marker = format!("{{\"checkpoint\":\"{}\"}}", run.join(name).display());
        fs::write(dir.join("companion.json"), marker).unwrap();
    }
    let _failing = fail_call(Call::Read, &disks.companion(0).join("companion.json"), EIO);
    let swept = disks.prune();
    assert_eq!((swept.left.len(), &swept.left[0].path), (1, &disks.companion(0)), "{swept:?}");
    assert!(swept.left[0].failed);
    assert_eq!(names_in(&disks.stripe(0)), ["step-1"]);
}

#[test]
fn removal_that_cannot_know_whose_the_dcp_mark_is_changes_nothing() {
    let disks = Disks::new(1);
    disks.save(1);
    let mark = disks.dir().join(names::DCP_MARK);
    fs::write(&mark, names::DCP_MARK_WORDS).unwrap();
    let before = names_in(&disks.dir());
    let remove = || disks.remove(Disposal::Remove);
    let failing = fail_call(Call::Read, &mark, EIO);
    let error = remove().unwrap_err();
    drop(failing);
    says(&error.to_string(), &[names::DCP_MARK, "reading"]);
    assert_eq!(names_in(&disks.dir()), before);
    remove().unwrap();
    disks.assert_empty();
}

#[test]
fn directories_that_the_system_refuses_to_remove_are_reported() {
    let disks = Disks::new(1);
    disks.save(1);
    let both = [disks.companion(0), disks.dir()];
    let _refused = both.each_ref().map(|dir| fail_call(Call::RemoveDir, dir, EACCES));
    let removed = disks.remove(Disposal::Remove).unwrap();
    assert!(names_in(&disks.dir()).is_empty());
    assert!(both.iter().all(|dir| !removed.removed.contains(dir)), "{removed:?}");
    assert_eq!(left(&removed), both.each_ref().map(|dir| &**dir));
    says(&removed.left[0].reason, &["Permission denied", "remove it yourself"]);
}
