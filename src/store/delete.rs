//! Removing a checkpoint from every directory that it lies in.

use super::lock::DirLock;
use super::places::Places;
use super::sweep::{file_names, remove};
use crate::config::Config;
use crate::engine::file::sync_dir;
use crate::error::{Error, Result};
use crate::format::names;
use std::fs;
use std::path::Path;

/// Removes the checkpoint at `dir`: its manifest first, so that a kill in between leaves no half of
/// one, then its shards, also those in the companions that the configuration's `stripe` leads to. A
/// directory goes too unless something else is in it.
///
/// # Errors
/// [`Error::Busy`] if it is being saved into; [`Error::Io`].
pub fn delete(dir: &Path, config: &Config) -> Result<()> {
    let _lock = DirLock::take(dir)?;
    let places = Places::to_sweep(dir, &config.stripe);
    remove(&dir.join(names::MANIFEST))?;
    sync_dir(dir).map_err(|e| Error::io("syncing", dir, e))?;
    for place in places.companions().chain([dir]) {
        let ours = |name: &String| names::is_shard(name) || names::is_part(name);
        let present = file_names(place)?;
        present.iter().filter(|n| ours(n)).try_for_each(|name| remove(&place.join(name)))?;
        if place != dir {
            remove(&place.join(names::COMPANION))?;
        }
        let _ = fs::remove_dir(place); // only an empty one goes
    }
    Ok(())
}
