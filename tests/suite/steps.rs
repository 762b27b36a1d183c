//! Which checkpoints of a directory count as steps, and what that spares: the examples of a stranger's first
//! twenty minutes among them.

mod names;
mod newest;
#[cfg(debug_assertions)] // the seam exists in these builds only
mod refused;
mod retained;

use crate::common::{runtime, scratch, small_config};
use ringstow::internals::store;
use ringstow::{Dtype, RetainOptions, Retained, Runtime, StateDict, Store, Wanted, latest};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves checkpoints of these names in this order.
fn root(names: &[&str]) -> tempfile::TempDir {
    let (root, runtime) = (scratch(), runtime());
    names.iter().for_each(|name| save(&runtime, &root.path().join(name), None));
    root
}

fn save(runtime: &Runtime, path: &Path, step: Option<u64>) {
    let mut state = StateDict::new();
    state.bytes("w", Dtype::U8, &[4], &[7; 4]).unwrap();
    if let Some(step) = step {
        state.step(step);
    }
    store::save(runtime, &state, path, &Arc::default()).unwrap();
    wait_for_the_next_millisecond();
}

/// Commits are dated in milliseconds, and these tests ask which came last.
fn wait_for_the_next_millisecond() {
    let now = || std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let before = now();
    while now() == before {
        std::hint::spin_loop();
    }
}

/// The newest step, if every byte of it is as it was written; else an earlier one.
pub fn latest_verified(root: &Path) -> ringstow::Result<Option<PathBuf>> {
    Store::found()?.latest(root, &Wanted { verify: true, ..Wanted::default() })
}

fn named(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

fn all_named(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| named(path)).collect()
}

fn newest(root: &Path) -> Option<String> {
    latest(root).unwrap().map(|path| named(&path))
}

fn retain_as_planned(root: &Path, retention: &RetainOptions) -> Retained {
    crate::common::retain_as_planned(root, retention, &small_config())
}

fn keep(keep: usize) -> RetainOptions {
    RetainOptions::new(keep)
}

fn with_pattern(keep: usize, pattern: &str) -> RetainOptions {
    RetainOptions { pattern: Some(pattern.parse().unwrap()), ..RetainOptions::new(keep) }
}

/// Why a directory was left alone.
#[track_caller]
fn why_left<'a>(done: &'a Retained, name: &str) -> &'a str {
    &done.left.iter().find(|left| named(&left.path) == name).unwrap().reason
}
