//! The runs in a directory that is not a run itself.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::object::{Bucket, is_url};
use crate::store::catalog::found::Found;
use crate::store::catalog::list::list;
use crate::sys::dir::{entries, is_dir};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The sub-directories of a directory that hold checkpoints, with these, sorted by path. `found` are the checkpoints of the
/// directory itself, which do not count. Leaves out hidden directories, and what cannot be read.
///
/// # Errors
/// [`Error::Io`] if the directory cannot be listed.
pub fn runs(dir: &Path, found: &[Found], config: &Config) -> Result<Vec<(PathBuf, Vec<Found>)>> {
    let known: HashSet<&Path> = found.iter().map(|found| &*found.path).collect();
    if known.contains(dir) {
        return Ok(Vec::new());
    }
    let mut below = sub_directories(dir)?;
    below.sort();
    let runs = below.into_iter().filter(|path| !known.contains(&**path)).filter_map(|path| {
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
    let is_hidden = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b".");
    let shown = entries(dir)?.into_iter().filter(|entry| !is_hidden(&entry.file_name()));
    Ok(shown.map(|entry| entry.path()).filter(|path| is_dir(path)).collect())
}
