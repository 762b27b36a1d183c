//! `prune` goes on where the system fails, and reports what it has removed.
#![cfg(debug_assertions)] // the seam exists in these builds only

use super::*;
use crate::common::{below, copy_dir, shards_in};
use nix::libc::EIO;
use ringstow::internals::{
    store::prune_with,
    sys::seam::{Outcome, nth, on_thread},
};
use ringstow::{Pruning, Swept};
use std::collections::BTreeSet;

/// A checkpoint, and all that killed saves and removals can leave beside it.
fn run() -> (Disks, PathBuf) {
    let disks = Disks::new(1);
    let (run, runtime) = (disks.run(), disks.runtime());
    for step in ["step-1", "step-2", "step-3", "step-4/rank00000"] {
        State::new(1, &SIZES).save(&runtime, &run.join(step)).unwrap();
    }
    let run = run.canonicalize().unwrap();
    // A killed save.
    for dir in [run.join("step-2"), disks.stripe(0).join("step-2")] {
        for shard in shards_in(&dir) {
            fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
        }
    }
    fs::remove_file(run.join("step-2/manifest.json")).unwrap();
    // Killed removals, one of a step of rank checkpoints.
    for dir in ["step-3", "step-4/rank00000"].map(|dir| run.join(dir)) {
        fs::rename(dir.join(names::MANIFEST), dir.join(names::REMOVAL_MARK)).unwrap();
    }
    // A stripe directory without its checkpoint, with two markers.
    let stripe_dir = disks.stripe(0).join("gone");
    fs::create_dir(&stripe_dir).unwrap();
    let marker = format!("{{\"checkpoint\":\"{}\"}}", run.join("gone").display());
    fs::write(stripe_dir.join(names::STRIPE_MARKER), marker).unwrap();
    fs::write(stripe_dir.join(names::UNCOMMITTED_STRIPE_MARKER), "").unwrap();
    // Recycled files.
    for dir in [run.clone(), disks.stripe(0)].map(|dir| dir.join(names::RECYCLED_DIR)) {
        fs::create_dir(&dir).unwrap();
        for name in ["rank00000-0.spare", "rank00000-1.spare"] {
            fs::write(dir.join(name), "").unwrap();
        }
    }
    (disks, run)
}

fn prune(disks: &Disks, run: &Path) -> ringstow::Result<Swept> {
    let all = Pruning { recycled: true, ..Pruning::default() };
    prune_with(run, all, &disks.config())
}

#[track_caller]
fn assert_first_alone(disks: &Disks, run: &Path, what: &str) {
    for dir in [run, &disks.stripe(0)] {
        // Nobody can tell an empty directory from a user's, so a later call leaves it.
        for path in below(dir).iter().rev() {
            let _not_empty = fs::remove_dir(path);
        }
        assert_eq!(names_in(dir), ["step-1"], "{what}");
    }
}

#[test]
fn prune_reports_all_that_it_removed_whichever_call_fails() {
    let (disks, run) = run();
    let dirs = [run.clone(), disks.stripe(0).canonicalize().unwrap()];
    let kept = dirs.each_ref().map(|dir| dir.with_extension("kept"));
    dirs.iter().zip(&kept).for_each(|(dir, kept)| copy_dir(dir, kept));
    let paths = || BTreeSet::from_iter(dirs.iter().flat_map(|dir| below(dir)));
    let before = paths();
    for n in 1.. {
        for (dir, kept) in dirs.iter().zip(&kept) {
            fs::remove_dir_all(dir).unwrap();
            copy_dir(kept, dir);
        }
        let watch = on_thread(nth(n, Outcome::Fail(EIO)));
        let done = prune(&disks, &run);
        let calls = watch.take();
        drop(watch);
        let Some(failed) = calls.get(n as usize - 1) else {
            assert!(done.unwrap().left.is_empty());
            assert_first_alone(&disks, &run, "no call fails");
            return disks.assert_holds(1);
        };
        let what = format!("call {n}, {failed:?}: {done:#?}");
        let gone: BTreeSet<PathBuf> = before.difference(&paths()).cloned().collect();
        match &done {
            Err(_) => assert!(gone.is_empty(), "{what}"),
            Ok(Swept { removed, .. }) => {
                // The report names a step of rank checkpoints as a whole.
                let is_whole = removed.contains(&run.join("step-4"));
                let ranks = is_whole.then(|| disks.stripe(0).join("step-4.rank00000"));
                for path in &gone {
                    let mut reported = removed.iter().chain(&ranks);
                    assert!(reported.any(|dir| path.starts_with(dir)), "{path:?}, {what}");
                }
                assert!(removed.iter().all(|path| gone.contains(path)), "{gone:?}, {what}");
            }
        }
        prune(&disks, &run).unwrap();
        assert_first_alone(&disks, &run, &what);
    }
}
