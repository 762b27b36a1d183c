//! A directory that is swapped for a link while a clean-up works in it leads the clean-up nowhere: what the link leads to
//! stays as it is, at whichever call the swap happens.
#![cfg(debug_assertions)] // the seam exists in these builds only

use crate::common::{EXTRA, SIZES, State, below, copy_dir, runtime, scratch, small_config};
use ringstow::internals::store;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, on_thread};
use ringstow::{Config, Disposal, Result, RetainOptions, Runtime};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// All that is below a directory, with the content of files.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let content =
        |path: &PathBuf| if path.is_file() { fs::read(path).unwrap() } else { Vec::new() };
    below(dir).into_iter().map(|path| (path.clone(), content(&path))).collect()
}

/// Puts what ringstow would remove elsewhere into a directory, and beside it.
fn bait(dir: &Path) {
    for rank_dir in [dir.to_path_buf(), dir.join("rank00000"), dir.join("rank00001")] {
        for name in ["rank00000-0.g9.safetensors.part", "manifest.json.part"] {
            if rank_dir.is_dir() {
                fs::write(rank_dir.join(name), "precious").unwrap();
            }
        }
    }
    fs::create_dir(dir.join("rank00007")).unwrap();
    for spares in [dir, dir.parent().unwrap()].map(|dir| dir.join(".ringstow-spares")) {
        fs::create_dir(&spares).unwrap();
        fs::write(spares.join("rank00003-3"), "precious").unwrap();
    }
}

/// Swaps a directory for a link right before the `n`th call.
fn swap_at(n: u64, dir: PathBuf, away: PathBuf, to: PathBuf) -> Watch {
    on_thread(move |number, _, _| {
        if number == n {
            // It may be gone by now.
            let _ = fs::rename(&dir, &away);
            symlink(&to, &dir).unwrap();
        }
        Outcome::Pass
    })
}

/// Acts in a copy of `run` for each of its calls, right before which `step` is swapped for a link to a copy of it. What was
/// done is in `act`'s text, if it failed.
fn at_each_call(run: &Path, step: &str, act: impl Fn(&Path) -> std::result::Result<(), String>) {
    for n in 1.. {
        let root = scratch();
        let [here, elsewhere] = ["run", "elsewhere/run"].map(|name| root.path().join(name));
        copy_dir(run, &here);
        let (dir, precious) = (here.join(step), elsewhere.join(step));
        copy_dir(&dir, &precious);
        bait(&precious);
        let before = tree(&elsewhere);
        let moved = root.path().join("moved");
        let watch = swap_at(n, dir.clone(), moved, precious);
        let done = act(&here);
        let calls = watch.take();
        drop(watch);
        let at = calls.get(n as usize - 1);
        assert!(tree(&elsewhere) == before, "swapped at call {n}, {at:?}: {done:?}");
        if let Err(error) = done {
            assert!(error.contains(step), "swapped at call {n}, {at:?}: {error}");
        }
        if (calls.len() as u64) < n {
            assert!(n > 10, "something was done");
            break;
        }
    }
}

fn text<T>(result: Result<T>) -> std::result::Result<(), String> {
    result.map(drop).map_err(|error| error.to_string())
}

/// A run of two steps, of which the first is as a killed save left it.
fn run(runtime: &Runtime) -> tempfile::TempDir {
    let root = scratch();
    for step in 1..3 {
        let dir = root.path().join(format!("step-{step}"));
        State::new(step, &SIZES).save_with_extra(runtime, &dir).unwrap();
    }
    fs::write(root.path().join("step-1/rank00000-0.g9.safetensors.part"), "left").unwrap();
    root
}

/// A run of two steps that two ranks saved each by itself.
fn run_of_ranks(runtime: &Runtime) -> tempfile::TempDir {
    let root = scratch();
    for (step, rank) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
        let whole = root.path().join(format!("step-{step}"));
        State::new(step, &SIZES).save_alone((rank, 2), "a", runtime, &whole);
    }
    root
}

#[test]
fn removal_and_retention_leave_it() {
    let runtime = runtime();
    for run in [run(&runtime), run_of_ranks(&runtime)] {
        for disposal in [Disposal::Remove, Disposal::Recycle] {
            at_each_call(run.path(), "step-1", |here| {
                text(store::remove_checkpoint(&here.join("step-1"), disposal, &small_config()))
            });
            at_each_call(run.path(), "step-1", |here| {
                let retention = RetainOptions { disposal, ..RetainOptions::new(1) };
                text(store::retain(here, &retention, &small_config()))
            });
        }
    }
}

#[test]
fn prune_of_what_killed_saves_and_removals_left_leaves_it() {
    let runtime = runtime();
    let (whole, half, ranks, half_ranks) =
        (run(&runtime), run(&runtime), run_of_ranks(&runtime), run_of_ranks(&runtime));
    let [stream, part] =
        ["model.pt.0123456789abcdef.stream-part", "rank00000-0.g9.safetensors.part"];
    fs::write(whole.path().join("step-1").join(stream), "left").unwrap();
    let ranks_dir = ranks.path().join("step-1/rank00001");
    fs::write(ranks_dir.join(part), "left").unwrap();
    let half_dirs =
        ["rank00000", "rank00001"].map(|dir| half_ranks.path().join("step-1").join(dir));
    for dir in half_dirs.iter().chain([&half.path().join("step-1")]) {
        let mark = "manifest.json.retired";
        fs::rename(dir.join("manifest.json"), dir.join(mark)).unwrap();
    }
    for run in [whole, half, ranks, half_ranks] {
        at_each_call(run.path(), "step-1", |here| text(store::prune(here, &small_config())));
    }
}

#[test]
fn slim_leaves_it() {
    let run = run(&runtime());
    at_each_call(run.path(), "step-1", |here| {
        text(store::slim(&here.join("step-1"), &[EXTRA.to_owned()], &small_config()))
    });
}

/// Shards are written by their paths. What a link to somebody's checkpoint leads to may get some, and keeps all that it has.
#[test]
fn save_neither_commits_there_nor_removes_anything() {
    let runtime = runtime();
    for n in 1.. {
        let root = scratch();
        let [dir, precious, moved] =
            ["step", "precious", "moved"].map(|name| root.path().join(name));
        State::new(1, &SIZES).save(&runtime, &dir).unwrap();
        copy_dir(&dir, &precious);
        bait(&precious);
        let before = tree(&precious);
        let (mut since, from, to) = (0, dir.clone(), precious.clone());
        let watch = on_thread(move |_, call, _| {
            // Until the lock is taken, with four calls, the link is one that the caller named.
            since += u64::from(since > 0 || call == Call::Lock);
            if since == n + 4 {
                fs::rename(&from, &moved).unwrap();
                symlink(&to, &from).unwrap();
            }
            Outcome::Pass
        });
        let saved = State::new(2, &SIZES).save(&runtime, &dir);
        drop(watch);
        let after = tree(&precious);
        let lost = before.iter().find(|(path, content)| after.get(*path) != Some(content));
        assert!(lost.is_none(), "swapped {n} calls after the lock: {lost:?}, {:?}", saved.err());
        if !dir.is_symlink() {
            assert!(n > 10, "something was done");
            break;
        }
    }
}

#[test]
fn stripe_directory_that_is_swapped_is_left() {
    let (root, disk, precious) = (scratch(), scratch(), scratch());
    let config = Config { stripe: vec![disk.path().into()], files: 2, ..small_config() };
    let runtime = Runtime::new(config.clone()).unwrap();
    let dir = root.path().join("step-1");
    let stripe = disk.path().join("step-1");
    for n in 1.. {
        let to = precious.path().join(format!("{n}/step-1"));
        State::new(1, &SIZES).save(&runtime, &dir).unwrap();
        copy_dir(&stripe, &to);
        bait(&to);
        let before = tree(precious.path());
        let moved = precious.path().with_extension(n.to_string());
        let watch = swap_at(n, stripe.clone(), moved.clone(), to);
        let done = store::remove_checkpoint(&dir, Disposal::Remove, &config);
        let calls = watch.take();
        drop(watch);
        let at = calls.get(n as usize - 1);
        assert!(tree(precious.path()) == before, "swapped at call {n}, {at:?}: {done:?}");
        let _ = (fs::remove_file(&stripe), fs::remove_dir_all(&moved), fs::remove_dir_all(&dir));
        if (calls.len() as u64) < n {
            break;
        }
    }
}
