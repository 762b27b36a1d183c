//! The runs in a directory that is not a run itself.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::{Bucket, is_url};
use crate::store::catalog::found::Found;
use crate::store::catalog::list::list;
use crate::sys::dir::{entries, is_dir, is_file};
use std::collections::HashSet;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

/// The sub-directories of a directory that hold checkpoints, with these, sorted by path. `found` are the checkpoints of the
/// directory itself, which do not count. Leaves out hidden directories, and what cannot be read.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be listed.
pub fn runs(dir: &Path, found: &[Found], config: &Config) -> Result<Vec<(PathBuf, Vec<Found>)>> {
    let known: HashSet<&Path> = found.iter().map(|found| &*found.path).collect();
    // Each look into a store is a request: only where there is nothing else to show.
    if known.contains(dir) || (is_url(dir) && !found.is_empty()) {
        return Ok(Vec::new());
    }
    let below = sub_directories(dir)?.into_iter().filter(|path| !known.contains(&**path));
    let mut below: Vec<PathBuf> = below.filter(|path| is_url(path) || may_be_run(path)).collect();
    below.sort();
    let runs = below.into_iter().filter_map(|path| {
        let found = list(&path, config).ok()?;
        found.iter().any(|one| one.path != path).then_some((path, found))
    });
    Ok(runs.collect())
}

fn sub_directories(dir: &Path) -> Result<Vec<PathBuf>> {
    if is_url(dir) {
        let found = Bucket::at(dir)?.list().map_err(|error| Error::io("listing", dir, error))?;
        return Ok(found.dirs.into_iter().map(|name| dir.join(name)).collect());
    }
    let is_hidden = |entry: &DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let shown = entries(dir)?.into_iter().filter(|entry| !is_hidden(entry));
    Ok(shown.map(|entry| entry.path()).filter(|path| is_dir(path)).collect())
}

/// Whether a directory in this one may be a checkpoint. Lists none of them: they may hold a data set's files.
fn may_be_run(dir: &Path) -> bool {
    let has_trace = |path: &Path| {
        is_file(&path.join(names::MANIFEST)) || is_dir(&path.join(names::rank_dir(0)))
    };
    entries(dir).is_ok_and(|all| all.iter().any(|entry| has_trace(&entry.path())))
}
