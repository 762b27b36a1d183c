//! The base of a save: an earlier checkpoint, and which of its tensor chunks the new state may still have. Reads no
//! tensor; [`reuse`](crate::store::write::reuse) compares them.

use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::{Error, Result};
use crate::format::part::Part;
use crate::format::{Chunk, FileEntry, Item, TensorEntry, names};
use crate::pipeline::runtime::Runtime;
use crate::state::{Base, Contents};
use crate::store::read::checkpoint::{Checkpoint, OpenOptions};
use crate::sys::dir;
use std::collections::HashMap;
use std::path::Path;

/// A tensor chunk of the base that has the name, dtype, shape and region of an item.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Earlier {
    /// Index in the base's files.
    pub file: usize,
    /// Offset of its first byte there.
    pub begin: u64,
    /// Bytes; 0 for an empty one, which has no hash.
    pub nbytes: u64,
    /// The hash of its bytes, unless it is empty.
    pub hash: u128,
}

/// A file of the base that may be linked.
#[derive(Debug)]
pub(in crate::store) struct Candidate {
    /// Index in the base's files.
    pub file: usize,
    /// Its items.
    pub items: Vec<usize>,
}

/// Opens the base of a save to `path`. `None` without one, with the reason if it cannot be used.
///
/// # Errors
/// Those of [`Checkpoint::open`], unless the base is optional.
pub(in crate::store) fn open(
    runtime: &Runtime,
    base: &Base,
    path: &Path,
) -> Result<(Option<Checkpoint>, Option<Fallback>)> {
    let Some(at) = base.path() else { return Ok((None, None)) };
    // The first save to a path that each save takes as its base.
    if dir::is_same(at, path) && dir::is_gone(&at.join(names::MANIFEST)) {
        return Ok((None, None));
    }
    let opened = match OpenOptions::of(runtime.config()).damaged(true).open(at) {
        Err(error) if base.is_optional() => {
            return Ok((None, Some(unused(at, &error.to_string()))));
        }
        Err(error) => return Err(as_base(error)),
        Ok(opened) => opened,
    };
    let (theirs, ours) = (opened.manifest.block_bytes, runtime.config().checksum_bytes());
    let why = if opened.manifest.files.iter().all(|file| file.hashes.is_empty()) {
        "it has no hashes: it was saved without a base. This save has them".to_owned()
    } else if theirs != ours {
        format!("its checksum chunks have {theirs} bytes, and those of this save {ours}")
    } else {
        return Ok((Some(opened), None));
    };
    Ok((None, Some(unused(at, &why))))
}

/// Says what the checkpoint was opened for.
fn as_base(error: Error) -> Error {
    error.hinted("it is the base of this save: name another one, or save without a base")
}

/// The fallback of a save that links nothing.
pub(in crate::store) fn unused(base: &Path, why: &str) -> Fallback {
    Fallback {
        kind: FallbackKind::Base,
        wanted: "the files of the base".into(),
        got: "new files".into(),
        reason: format!("{} cannot be used: {why}", base.display()),
        remedy: "none needed: the checkpoint is whole, and the next save can take it as its base"
            .into(),
    }
}

/// The chunk of the base that each item may equal.
pub(in crate::store) fn earlier<'a>(
    items: &'a [Item],
    base: &'a Checkpoint,
) -> Vec<Option<Earlier>> {
    /// Name of the tensor, and offsets of a region.
    type Key<'a> = (&'a str, Option<&'a [u64]>);
    let mut known: HashMap<Key<'a>, (&TensorEntry, &Chunk)> =
        HashMap::with_capacity(base.tensors().len());
    for tensor in base.tensors() {
        let chunks = tensor.chunks.iter();
        known.extend(chunks.map(|chunk| ((&*tensor.name, chunk.offsets()), (tensor, chunk))));
    }
    let mut earlier = Vec::with_capacity(items.len());
    for item in items {
        let offsets = item.region.as_ref().map(|region| &*region.offsets);
        // Each chunk is one item's.
        let found = known.remove(&(&*item.info.name, offsets));
        earlier.push(found.and_then(|found| alike(item, found, &base.manifest.files)));
    }
    earlier
}

/// The chunk, if it is what the item would be, and has a hash.
fn alike(
    item: &Item,
    (tensor, chunk): (&TensorEntry, &Chunk),
    files: &[FileEntry],
) -> Option<Earlier> {
    let sizes = item.region.as_ref().map(|_| &*item.info.shape);
    let is_alike = (tensor.dtype, &*tensor.shape, tensor.object, chunk.sizes())
        == (item.info.dtype, item.tensor_shape(), item.object, sizes);
    let nbytes = item.info.nbytes().ok().filter(|_| is_alike)?;
    let (file, begin) = (chunk.file as usize, chunk.begin);
    let hashes = &files[file].hashes;
    let hash = match hashes.binary_search_by_key(&begin, |hash| hash.begin) {
        _ if nbytes == 0 => 0,
        Ok(found) => hashes[found].hash,
        Err(_) => return None,
    };
    Some(Earlier { file, begin, nbytes, hash })
}

/// The files of the base that can be linked if their tensors have not changed: every tensor in them is an item, in the
/// same part of the state.
///
/// # Errors
/// As for [`Contents::parts`].
pub(in crate::store) fn candidates(
    contents: &Contents<'_>,
    earlier: &[Option<Earlier>],
    base: &Checkpoint,
    shard_bytes: u64,
) -> Result<Vec<Candidate>> {
    let parts = contents.parts()?;
    let files = &base.manifest.files;
    let mut items: Vec<Vec<usize>> = vec![Vec::new(); files.len()];
    for (item, earlier) in earlier.iter().enumerate() {
        earlier.iter().for_each(|chunk| items[chunk.file].push(item));
    }
    let mut chunks = vec![0; files.len()];
    for chunk in base.tensors().iter().flat_map(|tensor| &tensor.chunks) {
        chunks[chunk.file as usize] += 1;
    }
    let fits = |Candidate { file, items }: &Candidate| {
        let entry = &files[*file];
        let full = items.iter().filter(|item| earlier[**item].is_some_and(|e| e.nbytes > 0));
        // A file may have more tensors than the manifest lists: replicas, and what was dropped.
        let is_all = items.len() == chunks[*file] && full.count() == entry.hashes.len();
        let is_small = shard_bytes == 0 || entry.bytes <= shard_bytes || items.len() == 1;
        is_all && is_small && !items.is_empty() && is_in_one_part(contents.items, items, &parts)
    };
    let candidate = |(file, items)| Candidate { file, items };
    Ok(items.into_iter().enumerate().map(candidate).filter(fits).collect())
}

/// Whether the items go with the same parts of the state: otherwise the file could not be dropped with one of them.
fn is_in_one_part(all: &[Item], items: &[usize], parts: &[Part]) -> bool {
    parts.iter().all(|part| {
        let mut has = items.iter().map(|&item| part.has(&all[item].info.name));
        let first = has.next();
        has.all(|next| Some(next) == first)
    })
}
