//! A checkpoint in an object store: the same manifest and shards, under names below a URL.

use crate::error::{Error, Result};
use crate::format::{Manifest, TRAILER_LEN, names};
use crate::object::{Bucket, Version};
use crate::pipeline::load::ShardFile;
use crate::store::read::fault::Fault;
use crate::store::read::shards::Shards;
use std::collections::HashMap;
use std::io;
use std::path::Path;

/// Longer manifests are not read, like those in directories.
const MANIFEST_MAX: u64 = 4 << 30;

/// The manifest's bytes; `None` if there is no manifest.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn read_manifest(bucket: &Bucket) -> Result<Option<Vec<u8>>> {
    Ok(read_manifest_version(bucket)?.map(|(bytes, _)| bytes))
}

/// The manifest's bytes and their version; `None` if there is no manifest.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn read_manifest_version(
    bucket: &Bucket,
) -> Result<Option<(Vec<u8>, Version)>> {
    match bucket.read_version(names::MANIFEST, MANIFEST_MAX) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("reading", bucket.url().join(names::MANIFEST), error)),
    }
}

/// The length and the end of the object of a URL; `None` if there is no such object.
///
/// # Errors
/// The store's.
pub(super) fn read_end(url: &Path) -> Result<Option<(u64, [u8; TRAILER_LEN])>> {
    let (dir, name) = crate::object::split(url)?;
    match Bucket::at(&dir)?.read_end(&name) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("reading", url, error)),
    }
}

/// The shards of a manifest as the store lists them, what is wrong with them, and which are missing, with what to do.
pub(super) fn find_shards(url: &Path, there: &HashMap<String, u64>, manifest: &Manifest) -> Shards {
    let (mut faults, mut missing) = (Vec::new(), Vec::new());
    let mut files = Vec::with_capacity(manifest.files.len());
    for (number, file) in manifest.files.iter().enumerate() {
        faults.extend(match there.get(&file.name) {
            Some(&bytes) => Fault::of_length(number, file, bytes),
            None => {
                missing.push(file.name.as_str());
                Some(Fault::of_missing(number, file.bytes))
            }
        });
        let path = url.join(&file.name);
        let (other_path, crc32) = (path.clone(), file.crc32.clone());
        files.push(ShardFile { path, other_path, bytes: file.bytes, crc32 });
    }
    let problem = (!missing.is_empty()).then(|| {
        format!(
            "{} of {} files that its manifest lists are missing: {}; promote it again from where it is whole, or resume from \
             an earlier checkpoint",
            missing.len(),
            manifest.files.len(),
            missing[..missing.len().min(20)].join(", ")
        )
    });
    Shards { files, faults, problem }
}

/// The error for a URL without a manifest.
pub(super) fn no_manifest(bucket: &Bucket) -> Error {
    let path = bucket.url().to_path_buf();
    let listed = match bucket.list() {
        Ok(listed) => listed,
        Err(error) => return Error::io("listing", path, error),
    };
    if listed.objects.keys().any(|name| names::is_shard(name)) {
        let reason = format!(
            "it has shards and no {}: a promotion is in progress, or was ended before its commit. Promote again, or remove \
             it (ringstow.remove); earlier steps are not touched",
            names::MANIFEST
        );
        return Error::NotCommitted { path, reason };
    }
    let reason = match listed.dirs.first() {
        Some(first) => format!("it has no {}; below it is {first}, for example", names::MANIFEST),
        None => format!("there is no {} below this URL", names::MANIFEST),
    };
    Error::NoCheckpoint { path, reason }
}
