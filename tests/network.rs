//! File systems that several hosts share: nothing of another host is removed, and no two saves have a name in common.
//! A seam plays the file systems, and refuses the locks that other hosts do not see.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

mod common;

use common::held::{Filled, HeldUp};
use common::place::{self, Place, WAYS, Way};
use common::{State, assert_says, names_in, scratch, small_config, step_at, step_with};
use ringstow::internals::format::names;
use ringstow::internals::sys::file_system::{Played, play};
use ringstow::internals::sys::seam::{Call, Outcome, Watch, in_process, on_thread};
use ringstow::{
    Checkpoint, Config, Disposal, Error, Pruning, RankShare, Retention, Runtime, Session,
    StateDict, Store, Value,
};
use serde_json::value::RawValue;
use std::fs;
use std::path::{Path, PathBuf};

const LOCK: &str = ".ringstow-lock";
const BYTES: usize = <HeldUp>::BYTES;

/// Several hosts that save into one directory.
struct Hosts {
    root: tempfile::TempDir,
    // Dropped before the directory is.
    _played: Played,
    _no_flock: Watch,
}

impl Hosts {
    /// A mount whose locks stay on each host.
    fn without_locks() -> Self {
        Self::on("nfs4", "rw,nolock", false)
    }

    /// A mount that passes locks on files on to the other hosts.
    fn with_locks() -> Self {
        Self::on("nfs4", "rw,local_lock=none", true)
    }

    fn on(name: &str, options: &str, passes_locks: bool) -> Self {
        const ENOLCK: i32 = 37;
        let root = scratch();
        let played = play(root.path(), name, options);
        let shared = root.path().canonicalize().unwrap();
        // Each save and clean-up is another host's: it sees no lock that is not passed on.
        let no_flock = in_process(move |_, call, on| {
            let passed = passes_locks && on.ends_with(LOCK);
            match call == Call::Lock && on.starts_with(&shared) && !passed {
                true => Outcome::Fail(ENOLCK),
                false => Outcome::Pass,
            }
        });
        Self { root, _played: played, _no_flock: no_flock }
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("step-1")
    }
}

fn store() -> Store {
    Store::new(small_config()).unwrap()
}

fn state(seed: u8) -> StateDict<'static> {
    let mut state = StateDict::new();
    state.value("step", i64::from(seed));
    Filled { byte: seed, bytes: BYTES }.add_to(&mut state, "t");
    state
}

#[track_caller]
fn assert_holds(dir: &Path, seed: u8) {
    assert_eq!(step_at(dir), i64::from(seed));
    let report = ringstow::verify(dir).unwrap();
    assert!(report.damage.is_empty(), "{:?}", report.damage);
    assert_eq!(ringstow::load(dir).unwrap().tensor("t").unwrap().data(), [seed; BYTES]);
}

/// The manifest and the shards that it lists, and the lock file if there is one.
#[track_caller]
fn assert_nothing_else(dir: &Path) {
    let mut listed: Vec<String> = shards(dir);
    listed.push("manifest.json".into());
    listed.sort();
    let mut present = names_in(dir);
    present.retain(|name| name != LOCK);
    assert_eq!(present, listed);
}

fn shards(dir: &Path) -> Vec<String> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.manifest().files.iter().map(|file| file.name.clone()).collect()
}

fn parts(dir: &Path) -> Vec<String> {
    names_in(dir).into_iter().filter(|name| name.ends_with(".part")).collect()
}

const ALONE: Pruning = Pruning { no_other_writers: true, dry_run: false };

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
fn clean_up_leaves_what_another_host_may_be_writing() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let saving = HeldUp::save(1, &dir);
    store().save(&state(2), hosts.root.path().join("step-2")).unwrap();
    let before = names_in(&dir);
    let swept = store().prune(hosts.root.path()).unwrap();
    let retained = store().retain(hosts.root.path(), &Retention::new(1)).unwrap();
    for (removed, left) in [(swept.removed, swept.left), (retained.cleared, retained.left)] {
        assert!(removed.is_empty() && left.len() == 1, "{removed:?} {left:?}");
        assert_eq!(left[0].path, dir);
        for words in ["`nolock`", "--no-other-writers"] {
            assert!(left[0].reason.contains(words), "{}", left[0].reason);
        }
    }
    assert_eq!(names_in(&dir), before);
    saving.end().unwrap();
    assert_holds(&dir, 1);
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
fn removal_removes_listed_files_alone() {
    let hosts = Hosts::without_locks();
    let root = hosts.root.path();
    for step in 1..=3 {
        store().save(&state(step), root.join(format!("step-{step}"))).unwrap();
    }
    // What another host is writing into the oldest.
    let others = "rank00000-0.g6.safetensors.part";
    fs::write(root.join("step-1").join(others), "theirs").unwrap();
    let retained = store().retain(root, &Retention::new(1)).unwrap();
    assert_eq!((retained.removed.len(), retained.left.len()), (2, 0), "{retained:?}");
    assert_eq!(names_in(root), ["step-1", "step-3"]);
    assert_eq!(names_in(&root.join("step-1")), [others]);
    store().remove(root.join("step-3"), Disposal::Remove).unwrap();
    assert_eq!(names_in(root), ["step-1"]);
}

#[test]
fn killed_removal_is_finished_on_request() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    fs::rename(dir.join("manifest.json"), dir.join("manifest.json.retired")).unwrap();
    let swept = store().prune(hosts.root.path()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    store().remove(&dir, Disposal::Remove).unwrap();
    assert!(!dir.exists());
}

#[test]
fn removal_that_does_not_know_its_files_says_so_unless_a_lock_keeps_out_other_hosts() {
    const EIO: i32 = 5;
    let unread = || {
        on_thread(|_, call, on| match call == Call::Read && on.ends_with("manifest.json.retired") {
            true => Outcome::Fail(EIO),
            false => Outcome::Pass,
        })
    };
    let hosts = Hosts::without_locks();
    store().save(&state(1), hosts.dir()).unwrap();
    let before = names_in(&hosts.dir());
    let unreadable = unread();
    let removed = store().remove(hosts.dir(), Disposal::Remove).unwrap();
    drop(unreadable);
    assert_eq!((removed.removed.len(), removed.left.len()), (0, 1), "{removed:?}");
    assert!(removed.left[0].reason.contains("--no-other-writers"), "{removed:?}");
    assert_eq!(names_in(&hosts.dir()).len(), before.len());
    // Once it can be read, they are known.
    store().remove(hosts.dir(), Disposal::Remove).unwrap();
    assert!(!hosts.dir().exists());
    drop(hosts);
    let hosts = Hosts::with_locks();
    store().save(&state(1), hosts.dir()).unwrap();
    let _unreadable = unread();
    store().remove(hosts.dir(), Disposal::Remove).unwrap();
    assert!(!hosts.dir().exists());
}

fn tree() -> Box<RawValue> {
    Value::Dict(vec![(Value::from("step"), Value::Int(7))]).to_json().unwrap()
}

#[test]
fn sessions_of_two_hosts_never_mix() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let begin = || Session::begin_with(&dir, 1, &small_config()).unwrap();
    let write = |seed| store().write_rank(&state(seed), 0, &dir).unwrap().0;
    let first = begin();
    let receipt = write(1);
    let second = begin();
    // The first host's rank has its mark still, and its coordinator commits.
    first.commit(vec![receipt], tree()).unwrap();
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [1; BYTES]);
    let receipt = write(2);
    let third = begin();
    // Ranks find the newest session.
    let other = write(3);
    let error = second.commit(vec![receipt], tree()).unwrap_err();
    assert_says(&error, &["rank 0", "not from its last write"]);
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [1; BYTES]);
    third.commit(vec![other], tree()).unwrap();
    assert_eq!(ringstow::load(&dir).unwrap().tensor("t").unwrap().data(), [3; BYTES]);
    assert_nothing_else(&dir);
}

#[test]
fn failed_session_removes_its_own_files_alone() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let begin = || Session::begin_with(&dir, 1, &small_config()).unwrap();
    let write = |seed| store().write_rank(&state(seed), 0, &dir).unwrap().0;
    let first = begin();
    let receipt = write(1);
    let before = names_in(&dir);
    let second = begin();
    drop(second);
    let mut now = names_in(&dir);
    now.push("manifest.json.part".into()); // the note was the second's in the end
    now.sort();
    assert_eq!(now, before);
    first.commit(vec![receipt], tree()).unwrap();
    assert_nothing_else(&dir);
    let third = begin();
    write(3);
    drop(third);
    assert_nothing_else(&dir);
}

#[test]
fn lock_file_keeps_out_other_hosts_and_lets_the_next_save_clear_up() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    let saving = HeldUp::save(1, &dir);
    let busy = store().save(&state(2), &dir).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    let swept = store().prune(hosts.root.path()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    saving.end().unwrap();
    assert_holds(&dir, 1);
    fs::write(dir.join("rank00000-0.g6.safetensors.part"), "killed").unwrap();
    store().save(&state(2), &dir).unwrap();
    assert_holds(&dir, 2);
    assert_nothing_else(&dir);
    assert!(dir.join(LOCK).exists());
    store().remove(&dir, Disposal::Remove).unwrap();
    assert!(!dir.exists());
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
fn removal_that_lost_its_lock_removes_nothing_of_another_host() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    store().save(&state(1), &dir).unwrap();
    // Of saves that were killed before; and what another host writes once this one has lost its lock.
    for name in ["rank00000-0.g6.safetensors.part", "manifest.json.00ff00ff00ff00ff.part"] {
        fs::write(dir.join(name), "killed").unwrap();
    }
    let others = ["manifest.json.part", "rank00000-0.g9000000.safetensors.part"];
    let written = others.map(|name| dir.join(name));
    let _loses_lock = on_thread(move |_, call, on| {
        if call == Call::Rename && on.ends_with("manifest.json") {
            written.iter().for_each(|path| fs::write(path, "theirs").unwrap());
        }
        Outcome::Pass
    });
    let removed = store().remove(&dir, Disposal::Remove).unwrap();
    assert_eq!(names_in(&dir), [LOCK, others[0], others[1]], "{removed:?}");
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
fn refused_removal_leaves_no_lock_file_in_a_directory_that_is_no_checkpoint() {
    let hosts = Hosts::with_locks();
    let theirs = hosts.root.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("notes.txt"), "theirs").unwrap();
    store().save(&state(1), hosts.dir()).unwrap();
    for dir in [&theirs, hosts.root.path()] {
        let before = names_in(dir);
        let error = store().remove(dir, Disposal::Remove).unwrap_err();
        assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
        assert_eq!(names_in(dir), before);
    }
    // A save has relied on this one.
    fs::remove_file(hosts.dir().join("manifest.json")).unwrap();
    store().remove(hosts.dir(), Disposal::Remove).unwrap_err();
    assert!(hosts.dir().join(LOCK).exists());
}

#[test]
fn export_never_clears_what_another_host_may_be_writing() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let several = Store::new(Config { shard_bytes: 8192, ..small_config() }).unwrap();
    let first = HeldUp::start(1, false, |state| store().export_async(state, &dir).unwrap());
    let before = names_in(&dir);
    for other in [store(), several] {
        let mut model = state(2);
        Filled { byte: 2, bytes: BYTES }.add_to(&mut model, "u");
        let error = other.export(&model, &dir).unwrap_err();
        assert_says(&error, &["model.safetensors.part", "remove"]);
        assert_eq!(names_in(&dir), before);
    }
    first.end().unwrap();
    assert_eq!(names_in(&dir), [names::MODEL_CLAIM, "model.safetensors"]);
    let loaded = ringstow::Checkpoint::open_foreign(&dir).unwrap();
    assert_eq!(loaded.tensors().len(), 1);
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
fn export_leaves_no_lock_file_beside_the_model() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("config.json"), "{}").unwrap();
    let fails = |state| store().export_async(state, &dir).unwrap();
    assert!(HeldUp::start(2, true, fails).end().is_err());
    assert_eq!(names_in(&dir), ["config.json"]);
    // Of an export that was killed.
    fs::write(dir.join(LOCK), "").unwrap();
    store().export(&state(1), &dir).unwrap();
    assert_eq!(names_in(&dir), [names::MODEL_CLAIM, "config.json", "model.safetensors"]);
}

/// Saves a checkpoint of two ranks that each save by themselves.
fn save_each_rank(dir: &Path) {
    for rank in 0..2 {
        let part_of = RankShare { rank, ranks: 2, save: "a".into() };
        let part = dir.join(format!("rank0000{rank}"));
        let session = Session::begin_with(&part, 1, &small_config()).unwrap().rank_share(part_of);
        let receipt = store().write_rank(&state(1), 0, &part).unwrap().0;
        session.commit(vec![receipt], tree()).unwrap();
    }
}

/// All paths in a directory.
fn all_in(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for name in names_in(dir) {
        let path = dir.join(name);
        if path.is_dir() {
            all.extend(all_in(&path));
        }
        all.push(path);
    }
    all
}

#[test]
fn dry_runs_create_nothing() {
    let hosts = Hosts::with_locks();
    let root = hosts.root.path();
    store().save(&state(1), root.join("step-1")).unwrap();
    save_each_rank(&root.join("step-2"));
    save_each_rank(&root.join("step-3"));
    store().save(&state(4), root.join("step-4")).unwrap();
    // The removal of step 3 was killed.
    let manifest = root.join("step-3/rank00000/manifest.json");
    fs::rename(&manifest, manifest.with_extension("json.retired")).unwrap();
    // A host on whose own disk they are has saved them.
    all_in(root)
        .iter()
        .filter(|path| path.ends_with(LOCK))
        .for_each(|path| fs::remove_file(path).unwrap());
    let before = all_in(root);
    let plan = store().retain_plan(root, &Retention::new(1)).unwrap();
    assert_eq!((plan.removed.len(), plan.left.len()), (3, 0), "{plan:?}");
    assert_eq!(all_in(root), before);
    let plan = store().prune_plan(root).unwrap();
    assert_eq!(plan.removed, [root.join("step-3")]);
    assert_eq!(all_in(root), before);
}

#[test]
fn prune_alone_finishes_the_removal_of_rank_checkpoints_in_one_run() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    save_each_rank(&dir);
    let part = dir.join("rank00000");
    fs::rename(part.join("manifest.json"), part.join("manifest.json.retired")).unwrap();
    fs::write(part.join("rank00000-0.g6.safetensors.part"), "killed").unwrap();
    let swept = store().prune_with(hosts.root.path(), ALONE).unwrap();
    assert_eq!((&swept.removed, swept.left.len()), (&vec![dir.clone()], 0), "{swept:?}");
    assert!(!dir.exists(), "{:?}", all_in(&dir));
}

#[test]
fn removal_of_rank_checkpoints_reports_a_directory_that_stays() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    save_each_rank(&dir);
    let part = dir.join("rank00001");
    fs::rename(part.join("manifest.json"), part.join("manifest.json.retired")).unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    let swept = store().prune(hosts.root.path()).unwrap();
    assert!(!swept.removed.contains(&dir) && !swept.removed.is_empty(), "{swept:?}");
    assert_eq!(names_in(&dir), ["notes.txt"]);
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

#[test]
fn child_that_saves_once() {
    place::save_as_child();
}

/// Kills a save at each of its calls: the checkpoint loads, the next save works, and nothing else is left once somebody
/// promises that nobody else writes.
fn kill_at_each_call(way: Way, options: &str) {
    let mut committed = 0;
    for n in 1.. {
        let root = scratch();
        let _played = play(root.path(), "nfs4", options);
        let place = Place::with_step_1(way, root.path());
        let (kill, dir) = (format!("kill:{n}"), root.path().to_str().unwrap());
        let played = format!("nfs4:{options}:{dir}");
        let ended = place.save_in_child(&[
            ("RINGSTOW_TEST_SEAM", &kill),
            ("RINGSTOW_TEST_FILE_SYSTEM", &played),
        ]);
        let found = step_with(place.config(), &place.dir());
        assert!(found == 2 || (found == 1 && !ended), "{way:?}, call {n}: step {found}");
        committed += u64::from(found == 2 && !ended);
        place.save(3).unwrap();
        State::new(3, &place::SIZES).assert_at(&place.runtime, &place.dir());
        let prune = ringstow::internals::store::prune_with;
        prune(place.dir().parent().unwrap(), ALONE, place.config()).unwrap();
        State::new(3, &place::SIZES).assert_at(&place.runtime, &place.dir());
        let left = names_in(&place.dir());
        assert!(!left.iter().any(|name| name.ends_with(".part")), "{way:?}, call {n}: {left:?}");
        if ended {
            assert!(n > 20 && committed > 0, "{way:?}: {n} calls, {committed} committed");
            break;
        }
    }
}

#[test]
fn save_killed_at_any_call_without_locks_leaves_old_or_new() {
    let _alone = in_process(|_, _, _| Outcome::Pass);
    for way in WAYS {
        kill_at_each_call(way, "nolock");
    }
}

#[test]
fn save_killed_at_any_call_with_locks_leaves_old_or_new() {
    let _alone = in_process(|_, _, _| Outcome::Pass);
    kill_at_each_call(Way::ByRanks, "");
}
