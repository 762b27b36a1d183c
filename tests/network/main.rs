//! File systems that several hosts share: nothing of another host is removed, and no two saves have a name in common.
//! A seam plays the file systems, and refuses the locks that other hosts do not see.
#![cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only

#[path = "../common/mod.rs"]
mod common;
mod exports;
mod kills;
mod ranks;
mod removal;
mod saves;

use common::held::{self, Filled, HeldUp};
use common::{State, assert_undamaged, names_in, runtime, scratch, step_at, store};
use ringstow::internals::sys::file_system::{Played, play};
use ringstow::internals::sys::seam::{Call, Watch, fail_if, in_process};
use ringstow::{Checkpoint, Pruning, StateDict, Value};
use serde_json::value::RawValue;
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
        ringstow::internals::sys::late::look_at_once();
        let root = scratch();
        let played = play(root.path(), name, options);
        let shared = root.path().canonicalize().unwrap();
        // Each save and clean-up is another host's: it sees no lock that is not passed on.
        let no_flock = in_process(fail_if(ENOLCK, move |call, on| {
            let passed = passes_locks && on.ends_with(LOCK);
            call == Call::Lock && on.starts_with(&shared) && !passed
        }));
        Self { root, _played: played, _no_flock: no_flock }
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("step-1")
    }
}

fn state(seed: u8) -> StateDict<'static> {
    let mut state = held::only(Filled { byte: seed, bytes: BYTES });
    state.value("step", i64::from(seed));
    state
}

#[track_caller]
fn assert_holds(dir: &Path, seed: u8) {
    assert_eq!(step_at(dir), i64::from(seed));
    assert_undamaged(&runtime(), dir);
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

const ALONE: Pruning = Pruning { no_other_writers: true, dry_run: false, recycled: false };

fn tree() -> Box<RawValue> {
    Value::Dict(vec![(Value::from("step"), Value::Int(7))]).to_json().unwrap()
}

/// Saves a checkpoint of two ranks that each save by themselves.
fn save_each_rank(dir: &Path) {
    let state = State::new(1, &[BYTES]);
    (0..2).for_each(|rank| state.save_alone((rank, 2), "a", &runtime(), dir));
}
