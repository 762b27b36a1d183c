//! What is refused to a saver: a path that another one saves to, a directory that is not its own.
#![cfg(unix)]

use crate::common::held::{self, HeldUp, made};
use crate::common::*;
use nix::libc;
use ringstow::{Dtype, Error, StateDict};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

// ---- two savers on one path ----

#[test]
fn second_saver_in_this_process_is_refused() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    let first = HeldUp::save(7, &dir);
    let error = State::new(2, &SIZES).save(&runtime(), &dir).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error:?}");
    assert_says(&error, &["ckpt", "in progress"]);
    ringstow::prune(root.path()).unwrap();
    first.end().unwrap();
    assert_eq!(step_at(&dir), 7);
    assert_no_litter(&dir);
}

/// Where the child of [`second_saver_elsewhere_is_refused_until_first_dies`] saves.
const CHILD_DIR: &str = "RINGSTOW_TEST_SAVER_DIR";

#[test]
fn child_whose_save_stands_still() {
    let Some(dir) = std::env::var_os(CHILD_DIR).map(PathBuf::from) else { return };
    let _save = HeldUp::save(7, &dir);
    println!("\nstarted");
    loop {
        std::thread::park();
    }
}

#[test]
fn second_saver_elsewhere_is_refused_until_first_dies() {
    use std::io::{BufRead, BufReader};
    let (_root, dir) = saved();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "refusals::child_whose_save_stands_still", "--nocapture"])
        .env(CHILD_DIR, &dir)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let started = lines.by_ref().map_while(Result::ok).any(|line| line == "started");
    let error = State::new(2, &SIZES).save(&runtime(), &dir);
    let found = step_at(&dir);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(started);
    assert!(matches!(error, Err(Error::Busy { .. })), "{error:?}");
    assert_eq!(found, 1, "the earlier checkpoint stands while a save is in progress");
    let after = State::new(3, &SIZES);
    after.save(&runtime(), &dir).expect("a dead saver holds no lock");
    after.assert_at(&runtime(), &dir);
    assert_no_litter(&dir);
}

// ---- a directory that may not be written to ----

/// On this thread, files are reached with an ordinary user's rights. False if that cannot be had.
#[cfg(target_os = "linux")]
fn become_nobody() -> bool {
    use nix::unistd::{Uid, setfsuid};
    const NOBODY: u32 = 65534;
    setfsuid(Uid::from_raw(NOBODY));
    // Answers what was set before, and changes nothing if it may not.
    setfsuid(Uid::from_raw(NOBODY)).as_raw() == NOBODY
}

#[test]
#[cfg(target_os = "linux")]
fn read_only_directory_is_named_and_still_loads() {
    use std::os::unix::fs::PermissionsExt;
    let (root, dir) = saved();
    let set_mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    set_mode(root.path(), 0o755);
    let (fresh, before) = (root.path().join("fresh"), names_in(&dir));
    let nobody = !nix::unistd::Uid::effective().is_root() || {
        std::thread::spawn(become_nobody).join().unwrap()
    };
    if !nobody {
        return rig::missing("this root cannot drop its rights");
    }
    set_mode(&dir, 0o555);
    set_mode(root.path(), 0o555);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if nix::unistd::Uid::effective().is_root() {
                become_nobody();
            }
            for path in [&dir, &fresh] {
                let error = State::new(2, &SIZES).save(&runtime(), path).unwrap_err();
                assert_eq!(errno(&error), Some(libc::EACCES), "{error}");
                assert_says(&error, &[path.to_str().unwrap(), "owner and mode"]);
            }
            State::new(1, &SIZES).assert_at(&runtime(), &dir);
        });
    });
    set_mode(root.path(), 0o755);
    set_mode(&dir, 0o755);
    assert_eq!(names_in(&dir), before);
    assert!(!fresh.exists());
}

#[cfg(feature = "cuda")]
#[test]
fn gpu_tensor_without_a_driver_says_what_it_needs() {
    use ringstow::internals::device::cuda::Device;
    match Device::get(0) {
        Err(Error::Unsupported { what, remedy }) => {
            assert!(what.contains("CUDA driver"), "{what}");
            assert!(remedy.contains("driver"), "{remedy}");
        }
        // A driver without GPUs, or with.
        Err(Error::Gpu { .. }) | Ok(_) => eprintln!("skipped: there is a CUDA driver here"),
        Err(error) => panic!("{error}"),
    }
}

// ---- a directory that is not the saver's ----

#[test]
fn link_that_leads_nowhere_is_named_as_one() {
    let root = scratch();
    let link = root.path().join("latest");
    std::os::unix::fs::symlink("step-1", &link).unwrap();
    let error = State::new(1, &SIZES).save(&runtime(), &link).unwrap_err();
    assert_says(&error, &["latest", "a link that leads nowhere"]);
    assert_eq!(names_in(root.path()), ["latest"]);
}

#[test]
fn manifest_of_another_program_is_not_replaced() {
    let root = scratch();
    let dir = root.path().join("app");
    let theirs = r#"{"name": "my web app", "loss": NaN}"#; // as Python writes it
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("manifest.json"), theirs).unwrap();
    let state = State::new(1, &SIZES);
    let refused = [
        state.save(&runtime(), &dir).map(drop),
        ringstow::Store::found().unwrap().begin(&dir, 2).map(drop),
        store().export(&StateDict::new(), &dir).map(drop),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert_says(&error, &["manifest.json", "to another directory, or remove"]);
        assert_eq!(names_in(&dir), ["manifest.json"]);
        assert_eq!(fs::read_to_string(dir.join("manifest.json")).unwrap(), theirs);
    }
    fs::remove_file(dir.join("manifest.json")).unwrap();
    state.save(&runtime(), &dir).unwrap();
    state.assert_at(&runtime(), &dir);
}

#[test]
fn manifest_of_ringstows_that_a_crash_damaged_is_replaced() {
    let (_root, dir) = saved();
    let whole = fs::read(dir.join("manifest.json")).unwrap();
    let half = &whole[..whole.len() / 2];
    for damaged in [&b""[..], half, &vec![0; whole.len()], b"garbage", b"{\"format\":\"ringstow\"}"]
    {
        fs::write(dir.join("manifest.json"), damaged).unwrap();
        let state = State::new(2, &SIZES);
        state.save(&runtime(), &dir).unwrap();
        state.assert_at(&runtime(), &dir);
        assert_no_litter(&dir);
    }
}

// ---- two entries of one name ----

#[test]
fn tensor_and_value_of_one_name_are_refused_at_the_call() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("step-1");
    let mut state = StateDict::new();
    state.value("a", 1);
    state.bytes("a", Dtype::U8, &[1], &[7]).unwrap();
    let error = ringstow::save_async(state, &path).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("\"a\""), "{error}");
    assert!(!path.exists());
}

// ---- tensors that somebody writes to meanwhile ----

#[test]
fn failed_staging_check_commits_nothing() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    State::new(1, &SIZES).save(&runtime(), &dir).unwrap();
    let before = step_at(&dir);
    let mut state = held::only(vec![1u8; 3 << 20]);
    state.check_staged(|| Err(Error::invalid("the trainer changed t")));
    let handle = store().save_async(state, &dir).unwrap();
    assert!(handle.wait(None));
    assert!(!handle.staged());
    assert_says(&handle.result().unwrap_err(), &["the trainer changed t"]);
    assert_eq!(step_at(&dir), before);
    assert_no_litter(&dir);
}

#[test]
fn staging_check_runs_once_after_the_last_byte() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let read = seen.clone();
    let mut state = held::only(made(3 << 20, move |_, to| {
        to.fill(7);
        read.lock().unwrap().push("read");
        Ok(())
    }));
    let checked = seen.clone();
    state.check_staged(move || {
        checked.lock().unwrap().push("checked");
        Ok(())
    });
    let handle = store().save_async(state, &dir).unwrap();
    assert!(handle.wait_staged(None));
    assert!(handle.staged());
    handle.result().unwrap();
    let seen = seen.lock().unwrap();
    let checks = seen.iter().filter(|&&what| what == "checked").count();
    assert_eq!((checks, seen.last()), (1, Some(&"checked")));
}

/// Unlocks when it is dropped.
struct Unlocks(Arc<Mutex<bool>>);

impl Drop for Unlocks {
    fn drop(&mut self) {
        *self.0.lock().unwrap() = false;
    }
}

#[test]
fn tensors_are_locked_from_the_call_until_they_are_copied_or_the_save_fails() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    let store = store();
    let locked = Arc::new(Mutex::new(false));
    let is_locked = || *locked.lock().unwrap();
    let state = || {
        let lock = locked.clone();
        let mut state = held::only(made(3 << 20, move |_, to| {
            assert!(*lock.lock().unwrap(), "it is not locked");
            to.fill(7);
            Ok(())
        }));
        let lock = locked.clone();
        state.lock_while_read(move || {
            assert!(!std::mem::replace(&mut *lock.lock().unwrap(), true), "it is locked once");
            Ok(Unlocks(lock.clone()))
        });
        state
    };
    let borrowed = state();
    assert!(!is_locked(), "a state alone locks nothing");
    for _ in 0..2 {
        store.save(&borrowed, &dir).unwrap();
        assert!(!is_locked());
    }
    let saving = store.save_async(state(), &dir).unwrap();
    assert!(saving.wait_staged(None) && !is_locked());
    saving.result().unwrap();

    let held = HeldUp::save(7, &dir);
    assert!(matches!(store.save(&borrowed, &dir).unwrap_err(), Error::Busy { .. }));
    assert!(!is_locked(), "a save that failed holds no lock");
    assert!(store.save_async(state(), &dir).unwrap().result().is_err() && !is_locked());
    held.end().unwrap();

    let mut broken = state();
    broken.lock_while_read(|| Err::<(), _>(Error::invalid("the trainer's lock is broken")));
    assert_says(&store.save(&broken, &dir).unwrap_err(), &["lock is broken"]);
    assert!(!is_locked());
    assert_says(&store.save_async(broken, &dir).unwrap_err(), &["lock is broken"]);
    assert_eq!(step_at(&dir), 7);
    assert_no_litter(&dir);
}
