//! Which tensors of a state have the bytes that an earlier checkpoint has of them, by hash.

use crate::device::TensorSource;
use crate::error::Result;
use crate::format::{FileEntry, content_hash};
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::spans::{Span, read_each};
use crate::store::write::base::Earlier;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Whether each item has the bytes of its earlier chunk; false without one. `files` are the earlier checkpoint's.
///
/// # Errors
/// A source's or a GPU's; [`Error::Cancelled`](crate::Error::Cancelled).
pub(in crate::store) fn compare(
    runtime: &Runtime,
    sources: &[TensorSource<'_>],
    earlier: &[Option<Earlier>],
    (files, block_bytes): (&[FileEntry], u64),
    at: (&Path, &Arc<Job>),
) -> Result<Vec<bool>> {
    let changed: Vec<AtomicBool> =
        earlier.iter().map(|chunk| AtomicBool::new(chunk.is_none())).collect();
    let compared =
        || earlier.iter().enumerate().filter_map(|(item, chunk)| Some((item, (*chunk)?)));
    let mut spans: Vec<Span> = Vec::new();
    // The checksum of a span that is a checksum chunk of the earlier file, one for each item that has such a span.
    let mut checksums: HashMap<usize, u32> = HashMap::new();
    for (item, chunk) in compared() {
        let first = spans.len();
        spans.extend(runs((item, chunk), block_bytes));
        let full = spans[first..].iter().position(|span| span.range.len() as u64 == block_bytes);
        if let Some(number) = full.map(|index| first + index) {
            let at = (chunk.begin + spans[number].range.start as u64) / block_bytes;
            checksums.insert(number, files[chunk.file].crc32[at as usize]);
        }
    }
    let hashes: Vec<OnceLock<u128>> = spans.iter().map(|_| OnceLock::new()).collect();
    let is_open = |number: usize| !changed[spans[number].item].load(Relaxed);
    let hash = |number: usize, bytes: &[u8]| {
        let _ = hashes[number].set(content_hash::of_run(bytes)); // each is read once
    };

    // Another checksum proves a change: most changed tensors need no hash.
    let is_probe = |number| checksums.contains_key(&number);
    let probe = |number, bytes: &[u8]| match crc32fast::hash(bytes) == checksums[&number] {
        true => hash(number, bytes),
        false => changed[spans[number].item].store(true, Relaxed),
    };
    read_each(runtime, sources, &spans, at, (is_probe, probe))?;
    let is_left = |number: usize| is_open(number) && hashes[number].get().is_none();
    read_each(runtime, sources, &spans, at, (is_left, hash))?;

    let mut rest = &hashes[..];
    for (item, chunk) in compared() {
        let (own, others) = rest.split_at(runs((item, chunk), block_bytes).count());
        rest = others;
        let own: Option<Vec<u128>> = own.iter().map(|hash| hash.get().copied()).collect();
        let is_same = own.is_some_and(|runs| content_hash::of_runs(&runs) == chunk.hash);
        if chunk.nbytes > 0 && !is_same {
            changed[item].store(true, Relaxed);
        }
    }
    Ok(changed.into_iter().map(|changed| !changed.into_inner()).collect())
}

/// The runs of a chunk, as spans of its item.
fn runs((item, chunk): (usize, Earlier), block_bytes: u64) -> impl Iterator<Item = Span> {
    content_hash::runs(chunk.begin, chunk.nbytes, block_bytes)
        .map(move |run| Span { item, range: run.start as usize..run.end as usize })
}
