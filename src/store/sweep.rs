//! Cleans up after saves that were killed: finishes a commit that had got past its rename, removes
//! what never got there.

use super::lock::DirLock;
use super::open::{Checkpoint, read_manifest};
use crate::error::{Error, Result};
use crate::format::{Manifest, names};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What a clean-up did to a directory.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Swept {
    /// Files that were removed.
    pub removed: Vec<PathBuf>,
    /// Shards of a committed checkpoint that got their final name.
    pub renamed: Vec<PathBuf>,
}

/// Names of the files in a directory; those that are not Unicode are not ours.
pub(super) fn file_names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("listing", dir, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let (Ok(name), false) =
            (entry.file_name().into_string(), entry.file_type().map_err(failed)?.is_dir())
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Brings a directory to what its manifest says: renames committed shards that are still under
/// their uncommitted names, removes ringstow's other files. Files of others stay.
///
/// Without a manifest only uncommitted files go: shards that a manifest once listed may be all that
/// is left of somebody's data.
pub(super) fn sweep(dir: &Path, manifest: Option<&Manifest>) -> Result<Swept> {
    let listed: HashSet<&str> = manifest
        .map_or_else(HashSet::new, |m| m.files.iter().map(|file| file.name.as_str()).collect());
    let mut swept = Swept::default();
    let present = file_names(dir)?;
    for name in &present {
        let path = dir.join(name);
        let committed = name.strip_suffix(names::PART_SUFFIX).filter(|n| listed.contains(n));
        let stale_shard = manifest.is_some() && names::is_shard(name) && !listed.contains(&**name);
        match committed {
            Some(shard) if !present.iter().any(|n| n == shard) => {
                let to = dir.join(shard);
                fs::rename(&path, &to).map_err(|e| Error::io("renaming", &path, e))?;
                swept.renamed.push(to);
            }
            _ if names::is_part(name) || stale_shard => {
                remove(&path)?;
                swept.removed.push(path);
            }
            _ => {}
        }
    }
    if swept != Swept::default() {
        crate::engine::file::sync_dir(dir).map_err(|e| Error::io("syncing", dir, e))?;
    }
    Ok(swept)
}

/// Removes a file; one that is gone already is no failure.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("removing", path, e)),
        _ => Ok(()),
    }
}

/// Removes what killed saves left in `dir` and in the directories directly under it; such a
/// directory that holds nothing else goes too. Directories being saved into are left alone.
///
/// # Errors
/// [`Error::Io`] if `dir` cannot be listed or a file not be removed; what a damaged manifest
/// gives, since then nobody can tell what is stale.
pub fn prune(dir: &Path) -> Result<Swept> {
    let mut all = prune_one(dir)?;
    for entry in fs::read_dir(dir).map_err(|e| Error::io("listing", dir, e))? {
        let entry = entry.map_err(|e| Error::io("listing", dir, e))?;
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            let swept = prune_one(&entry.path())?;
            if !swept.removed.is_empty() {
                // Only an empty directory can be removed so.
                let _ = fs::remove_dir(entry.path());
            }
            all.removed.extend(swept.removed);
            all.renamed.extend(swept.renamed);
        }
    }
    Ok(all)
}

fn prune_one(dir: &Path) -> Result<Swept> {
    if !file_names(dir)?.iter().any(|name| names::is_part(name) || names::is_shard(name)) {
        return Ok(Swept::default());
    }
    let _lock = match DirLock::take(dir) {
        Err(Error::Busy { .. }) => return Ok(Swept::default()),
        lock => lock?,
    };
    match read_manifest(dir) {
        Ok(manifest) => sweep(dir, Some(&manifest)),
        Err(Error::Incomplete { .. }) => sweep(dir, None),
        Err(error) => Err(error),
    }
}

impl Checkpoint {
    /// Removes what a killed save left beside this checkpoint; see [`prune`].
    ///
    /// # Errors
    /// As for [`prune`].
    pub fn prune(&self) -> Result<Swept> {
        prune_one(self.path())
    }
}
