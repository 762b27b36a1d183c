//! Saves, and what they leave or clear up.

use crate::common::held::HeldUp;
use crate::common::{State, assert_says, names_in, scratch, small_config};
use crate::{ALONE, Hosts, LOCK, assert_holds, assert_nothing_else, parts, shards, state, store};
use ringstow::internals::sys::file_system::play;
use ringstow::internals::sys::seam::{Call, Outcome, in_process, on_thread};
use ringstow::{Checkpoint, Config, Runtime};
use std::fs;
use std::path::Path;

#[test]
fn two_hosts_that_save_to_one_path_share_no_file() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    let first = HeldUp::save(2, &dir);
    store().save(&state(3), &dir).unwrap();
    assert_holds(&dir, 3);
    assert_eq!(parts(&dir).len(), 1, "the first save's file: {:?}", names_in(&dir));
    first.end().unwrap();
    assert_holds(&dir, 2);
    assert_nothing_else(&dir);
}

#[test]
fn failed_save_removes_nothing_of_another_host() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let first = HeldUp::save(1, &dir);
    let fails = |state| store().save_async(state, &dir).unwrap();
    assert!(HeldUp::start(2, true, fails).end().is_err());
    assert_eq!(parts(&dir).len(), 1);
    first.end().unwrap();
    assert_holds(&dir, 1);
    assert_nothing_else(&dir);
}

#[test]
fn save_whose_files_were_removed_commits_nothing() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    let saving = HeldUp::save(2, &dir);
    // Somebody promises what is not so.
    let swept = store().prune_with(&dir, ALONE).unwrap();
    assert_eq!(swept.removed.len(), 1, "{swept:?}");
    let error = saving.end().unwrap_err();
    assert_says(&error, &["is gone", "nothing was committed"]);
    assert_holds(&dir, 1);
    assert_nothing_else(&dir);
}

#[test]
fn save_whose_file_was_cut_commits_nothing() {
    let dir = scratch();
    let saving = HeldUp::save(2, dir.path());
    let part = dir.path().join(&parts(dir.path())[0]);
    let cut = in_process(move |_, call, on| {
        // After the data is written and before the manifest is.
        if call == Call::Create && on.ends_with("manifest.json.part") {
            fs::File::options().write(true).open(&part).unwrap().set_len(100).unwrap();
        }
        Outcome::Pass
    });
    let error = saving.end().unwrap_err();
    drop(cut);
    assert_says(&error, &["has 100 bytes now", "nothing was committed"]);
    assert!(names_in(dir.path()).is_empty());
}

#[test]
fn save_removes_what_it_replaced_and_no_other_leftovers() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    let leftovers = [
        "manifest.json.00ff00ff00ff00ff.part",
        "manifest.json.part",
        "rank00000-0.g5.safetensors",
        "rank00000-0.g6.safetensors.part",
        "rank00001-0.g6.safetensors.00ff00ff00ff00ff.part",
        "rank00001.done.part",
    ];
    for name in leftovers {
        fs::write(dir.join(name), "{}").unwrap();
    }
    store().save(&state(2), &dir).unwrap();
    assert_holds(&dir, 2);
    let mut expected: Vec<String> = leftovers.map(String::from).into();
    expected.extend(shards(&dir));
    expected.push("manifest.json".into());
    expected.sort();
    assert_eq!(names_in(&dir), expected);
    let swept = store().prune(hosts.root.path()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    let swept = store().prune_with(hosts.root.path(), ALONE).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (leftovers.len(), 0), "{swept:?}");
    assert_holds(&dir, 2);
    assert_nothing_else(&dir);
}

#[test]
fn generations_differ_even_if_no_host_sees_the_other() {
    let hosts = Hosts::without_locks();
    let generations: Vec<u64> = (0..20)
        .map(|_| {
            let dir = tempfile::tempdir_in(hosts.root.path()).unwrap();
            store().save(&state(1), dir.path()).unwrap().generation
        })
        .collect();
    assert!(generations.iter().all(|generation| (1..=1 << 32).contains(generation)));
    let different: std::collections::HashSet<&u64> = generations.iter().collect();
    assert!(different.len() > 10, "{generations:?}");
}

#[test]
fn save_that_lost_its_lock_after_the_commit_removes_nothing_of_another_host() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    let others = dir.join("rank00000-0.g9000000.safetensors.part");
    let written = others.clone();
    let _loses_lock = on_thread(move |_, call, on| {
        if call == Call::Rename && on.to_str().unwrap().contains("manifest.json.") {
            fs::write(&written, "theirs").unwrap();
        }
        Outcome::Pass
    });
    store().save(&state(1), &dir).unwrap();
    assert_holds(&dir, 1);
    assert_eq!(fs::read(&others).unwrap(), b"theirs");
}

#[test]
fn save_leaves_the_file_that_has_a_name_of_its_own() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    let _makes_it_first = on_thread(move |_, call, on| {
        if call == Call::Create && on.to_str().unwrap().ends_with(".safetensors.part") {
            fs::write(on, "theirs").unwrap();
        }
        Outcome::Pass
    });
    let error = store().save(&state(1), &dir).unwrap_err();
    assert_says(&error, &["rank00000-0.g", "exists"]);
    assert_eq!(parts(&dir).len(), 1, "{:?}", names_in(&dir));
}

#[test]
fn failed_first_save_leaves_no_lock_file() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir().join("deep");
    let fails = |state| store().save_async(state, &dir).unwrap();
    assert!(HeldUp::start(2, true, fails).end().is_err());
    assert_eq!(names_in(hosts.root.path()), Vec::<String>::new());
}

#[test]
fn refused_save_leaves_no_lock_file_in_the_directory_of_another_program() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("model.safetensors"), "theirs").unwrap();
    for refused in [store().save(&state(1), &dir), store().export(&state(1), &dir)] {
        assert_says(&refused.unwrap_err(), &["model.safetensors"]);
        assert_eq!(names_in(&dir), ["model.safetensors"]);
    }
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    store().save(&state(1), &dir).unwrap();
    // It has relied on the file; so may another host by now.
    let fails = |state| store().save_async(state, &dir).unwrap();
    assert!(HeldUp::start(2, true, fails).end().is_err());
    assert!(dir.join(LOCK).exists());
}

#[test]
fn what_may_be_seen_late_is_said_where_other_hosts_save() {
    let errors = |root: &Path| {
        let dir = root.join("step-1");
        let absent = Checkpoint::open(&dir).unwrap_err();
        store().save(&state(1), &dir).unwrap();
        fs::remove_file(dir.join(&shards(&dir)[0])).unwrap();
        let files = Checkpoint::open(&dir).unwrap_err();
        fs::remove_file(dir.join("manifest.json")).unwrap();
        [absent, files, Checkpoint::open(&dir).unwrap_err()]
    };
    let hosts = Hosts::with_locks();
    for error in errors(hosts.root.path()) {
        assert_says(&error, &["on nfs4", "see late", "ringstow.dcp.latest"]);
    }
    for error in errors(scratch().path()) {
        assert!(!error.to_string().contains("see late"), "{error}");
    }
}

#[test]
fn stripes_and_checkpoint_are_on_one_kind_of_file_system() {
    let root = scratch();
    let [disk, run] = ["disk", "run"].map(|name| root.path().join(name));
    for dir in [&disk, &run] {
        fs::create_dir(dir).unwrap();
    }
    let config = Config { files: 2, stripe: vec![disk.clone()], ..small_config() };
    let (runtime, state) = (Runtime::new(config).unwrap(), State::new(1, &[5000, 5000]));
    let network = play(&disk, "nfs4", "");
    let error = state.save(&runtime, &run.join("step-1")).unwrap_err();
    assert_says(&error, &["cannot be striped", "nfs4", "several hosts share"]);
    drop(network);
    state.save(&runtime, &run.join("step-1")).unwrap();
    // Nor is a stripe directory there ever cleared up.
    let _network = play(&disk, "nfs4", "");
    let shard = disk.join("step-1/rank00000-0.g5.safetensors.part");
    fs::write(&shard, "").unwrap();
    ringstow::internals::store::prune(root.path(), runtime.config()).unwrap();
    assert!(shard.exists());
}
