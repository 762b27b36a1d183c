//! Removal of a checkpoint from an object store: the manifest first, so that nobody loads what is half gone.
//!
//! A store has no locks, and another host may commit there meanwhile. So the manifest is removed only if it is the one that
//! was read, as far as the store can compare it; and of the files only those go that this manifest lists.

use crate::error::{Error, Result};
use crate::format::{Manifest, names};
use crate::object::{Bucket, Version};
use crate::store::read::object::read_manifest_version;
use crate::store::write::swept::{Left, Swept};
use std::collections::HashSet;
use std::io;
use std::path::Path;

/// Removes the checkpoint of a URL. Objects that are not ringstow's stay, and so do shards that its manifest does not list.
/// Without a manifest, all shards go.
///
/// # Errors
/// [`Error::NoCheckpoint`] if there is nothing of one; [`Error::Busy`] if another checkpoint was committed there meanwhile:
/// that one stays; [`Error::Io`].
pub(super) fn remove_object(url: &Path) -> Result<Swept> {
    let bucket = Bucket::at(url)?;
    let listed = bucket.list().map_err(|error| Error::io("listing", url, error))?;
    let (shards, mut others): (Vec<String>, Vec<_>) = listed
        .objects
        .into_keys()
        .filter(|name| name != names::MANIFEST)
        .partition(|name| names::is_shard(name));
    let seen = read_manifest_version(&bucket)?;
    if seen.is_none() && shards.is_empty() {
        let reason = "it has neither a manifest nor shards".into();
        return Err(Error::NoCheckpoint { path: url.into(), reason });
    }
    let mut swept = Swept::default();
    // Which shards are its own; `None` if nothing says so.
    let mut own = None;
    if let Some((manifest, version)) = seen {
        let path = url.join(names::MANIFEST);
        own = Manifest::decode_files(manifest, &path).ok().map(|manifest| {
            manifest.files.into_iter().map(|file| file.name).collect::<HashSet<String>>()
        });
        remove_manifest(&bucket, &version)?;
        swept.removed.push(path);
    }
    let is_own = |name: &String| own.as_ref().is_none_or(|own| own.contains(name));
    let (shards, foreign): (Vec<String>, Vec<String>) = shards.into_iter().partition(is_own);
    // A promotion may have committed since: then they may be its files.
    refuse_manifest(&bucket)?;
    for name in shards {
        remove(&bucket, &name, &mut swept)?;
    }
    let foreign = foreign.into_iter().map(|name| (name, OF_ANOTHER));
    others.sort();
    let others = others.into_iter().map(|name| (name, "it is not ringstow's"));
    let left = others.chain(foreign);
    swept.left = left.map(|(name, why)| Left::alone(url.join(name), why)).collect();
    Ok(swept)
}

const OF_ANOTHER: &str = "the manifest that was removed did not list it: perhaps another copy is being sent; if not, \
                          remove the URL again";

/// Removes the manifest that was seen.
fn remove_manifest(bucket: &Bucket, seen: &Version) -> Result<()> {
    match bucket.remove_version(names::MANIFEST, seen) {
        // An attempt whose answer was lost may have removed it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => refuse_manifest(bucket),
        removed => removed
            .map_err(|error| Error::io("removing", bucket.url().join(names::MANIFEST), error)),
    }
}

/// Refuses a place that has a manifest again: what was committed there stays.
fn refuse_manifest(bucket: &Bucket) -> Result<()> {
    match read_manifest_version(bucket)? {
        Some(_) => Err(Error::Busy { path: bucket.url().into() }),
        None => Ok(()),
    }
}

fn remove(bucket: &Bucket, name: &str, swept: &mut Swept) -> Result<()> {
    let path = bucket.url().join(name);
    bucket.remove(name).map_err(|error| Error::io("removing", &path, error))?;
    swept.removed.push(path);
    Ok(())
}
