//! Which bytes of which files a load needs, for those that are first fetched from elsewhere.

use crate::error::{Error, Result};
use crate::format::{Chunk, TensorEntry};
use crate::limits::ALIGN;
use crate::pipeline::chunks::differing;
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use std::ops::Range;

/// A box of a tensor: its name, and offsets and sizes in elements per dimension.
pub type NamedBox<'a> = (&'a str, &'a [u64], &'a [u64]);

impl Checkpoint {
    /// The ranges of the files, by number and offset, in which these tensors and boxes are. Each begins and ends with a
    /// checksum chunk, or a page where there are none, so that a load of exactly these finds all that it reads. What is not in the checkpoint is passed
    /// over.
    pub fn needed<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        boxes: impl IntoIterator<Item = NamedBox<'a>>,
    ) -> Vec<(usize, Range<u64>)> {
        let whole = names.into_iter().filter_map(|name| self.tensor(name)).flat_map(|entry| {
            let all = |chunk| Some((chunk, 0..entry.chunk_bytes(chunk)?));
            entry.chunks.iter().filter_map(all)
        });
        let parts = boxes.into_iter().flat_map(|(name, offsets, sizes)| {
            let entry = self.tensor(name);
            entry.into_iter().flat_map(move |entry| {
                let part = move |chunk| Some((chunk, rows_of(entry, chunk, (offsets, sizes))?));
                entry.chunks.iter().filter_map(part)
            })
        });
        let mut ranges: Vec<(usize, Range<u64>)> = whole
            .chain(parts)
            .filter(|(_, range)| !range.is_empty())
            .map(|(chunk, range)| {
                let file = chunk.file as usize;
                (
                    file,
                    self.in_checksum_chunks(
                        file,
                        chunk.begin + range.start..chunk.begin + range.end,
                    ),
                )
            })
            .collect();
        ranges.sort_unstable_by_key(|(file, range)| (*file, range.start));
        ranges.dedup_by(|next, last| {
            let joins = next.0 == last.0 && next.1.start <= last.1.end;
            if joins {
                last.1.end = last.1.end.max(next.1.end);
            }
            joins
        });
        ranges
    }

    /// Compares bytes of a file, which begin with a checksum chunk, with their checksums. Says what differs first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bytes that are not whole checksum chunks of the file.
    pub fn check_bytes(&self, file: usize, offset: u64, bytes: &[u8]) -> Result<Option<String>> {
        let (unit, entry) = (self.manifest().block_bytes, &self.manifest().files[file]);
        let end = offset + bytes.len() as u64;
        if !offset.is_multiple_of(unit)
            || end > entry.bytes
            || (!end.is_multiple_of(unit) && end != entry.bytes)
        {
            return Err(Error::invalid(format!(
                "bytes {offset} to {end} of {} are not whole checksum chunks",
                entry.name
            )));
        }
        let first = (offset / unit) as usize;
        let mut chunks = differing(bytes, (unit as usize, &entry.crc32), first);
        Ok(chunks.next().map(|chunk| {
            format!(
                "{} at offset {} is {:08x}, not {:08x}",
                chunk.what(),
                chunk.offset,
                chunk.got,
                chunk.expected
            )
        }))
    }

    fn in_checksum_chunks(&self, file: usize, range: Range<u64>) -> Range<u64> {
        // Without checksums pages are read.
        let unit = match self.kind() {
            CheckpointKind::Ringstow => self.manifest().block_bytes,
            CheckpointKind::Safetensors => ALIGN as u64,
        };
        let end = range.end.next_multiple_of(unit).min(self.manifest().files[file].bytes);
        range.start / unit * unit..end
    }
}

/// The bytes of a tensor chunk, counted from its first, that hold the rows in which a box meets it; `None` if it does not.
fn rows_of(
    entry: &TensorEntry,
    chunk: &Chunk,
    (offsets, sizes): (&[u64], &[u64]),
) -> Option<Range<u64>> {
    let all = entry.chunk_bytes(chunk)?;
    let lengths = chunk.sizes().unwrap_or(&entry.shape);
    let mut rows = None;
    for (dim, &length) in lengths.iter().enumerate() {
        let begin = chunk.offsets().map_or(0, |offsets| offsets[dim]);
        let (from, len) = (*offsets.get(dim)?, *sizes.get(dim)?);
        let meets = begin.max(from)..(begin + length).min(from.saturating_add(len));
        if meets.is_empty() {
            return None;
        }
        rows.get_or_insert(meets.start - begin..meets.end - begin);
    }
    let bytes = |rows: u64| {
        let lengths: Vec<u64> =
            std::iter::once(rows).chain(lengths.iter().skip(1).copied()).collect();
        entry.dtype.nbytes(&lengths)
    };
    let ends = rows.and_then(|rows| Some(bytes(rows.start)?..bytes(rows.end)?));
    Some(ends.unwrap_or(0..all)) // rows of a few bits each
}
