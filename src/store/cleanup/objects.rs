//! Removal of a checkpoint from an object store: the manifest first, so that nobody loads what is half gone.

use crate::error::{Error, Result};
use crate::format::names;
use crate::object::Bucket;
use crate::store::write::swept::{Left, Swept};
use std::path::Path;

/// Removes the checkpoint of a URL. Objects that are not ringstow's stay.
///
/// # Errors
/// [`Error::NoCheckpoint`] if there is nothing of one; [`Error::Io`].
pub(super) fn remove_object(url: &Path) -> Result<Swept> {
    let bucket = Bucket::at(url)?;
    let listed = bucket.list().map_err(|error| Error::io("listing", url, error))?;
    let is_manifest = |name: &str| name == names::MANIFEST;
    let is_ours = |name: &&String| is_manifest(name) || names::is_shard(name);
    let (mut ours, others): (Vec<&String>, Vec<_>) = listed.objects.keys().partition(is_ours);
    if ours.is_empty() {
        let reason = "it has neither a manifest nor shards".into();
        return Err(Error::NoCheckpoint { path: url.into(), reason });
    }
    ours.sort_by_key(|name| !is_manifest(name));
    let mut swept = Swept::default();
    for name in ours {
        let path = url.join(name);
        bucket.remove(name).map_err(|error| Error::io("removing", &path, error))?;
        swept.removed.push(path);
    }
    swept.left = others
        .into_iter()
        .map(|name| Left::alone(url.join(name), "it is not ringstow's"))
        .collect();
    Ok(swept)
}
