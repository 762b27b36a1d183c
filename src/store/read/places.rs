//! Where whole tensors lie: in the files, in the memory that files are read to, in memory of their own. Pure.

use crate::format::{Chunk, TensorEntry};
use crate::limits::ALIGN;
use crate::plan::load::{BlockRead, Want};
use crate::plan::slab::{Dense, Place, Slab, dense_strides};
use std::ops::Range;

/// Bytes of reads together.
pub(in crate::store) fn bytes_of(reads: &[BlockRead]) -> u64 {
    reads.iter().map(|read| read.len as u64).sum()
}

/// Whether a tensor can be used where it was read to: it has one chunk, aligned to its type. Other writers may not
/// align chunks.
pub(in crate::store) fn lies_straight(entry: &TensorEntry) -> bool {
    let item = entry.dtype.bits().div_ceil(8).next_power_of_two();
    matches!(entry.chunks.as_slice(), [chunk] if chunk.begin.is_multiple_of(item))
}

/// The bytes of a tensor that [`lies_straight`] and is complete.
pub(super) fn place(entry: &TensorEntry) -> Want {
    let chunk = &entry.chunks[0];
    Want { file: chunk.file as usize, range: chunk.begin..chunk.begin + entry.nbytes() }
}

/// A chunk as a slab of its tensor's dense memory; none if it is empty.
///
/// # Errors
/// Why the chunk can't be a part of the tensor.
pub(super) fn chunk_slab(
    entry: &TensorEntry,
    chunk: &Chunk,
) -> std::result::Result<Option<Slab>, String> {
    let Some((offsets, sizes)) = chunk.extent() else {
        let range = chunk.begin..chunk.begin + entry.nbytes();
        return Ok(Slab::run(chunk.file as usize, &range));
    };
    let strides = dense_strides(entry.dtype, &entry.shape);
    let at = offsets.iter().zip(&strides).map(|(&o, &s)| i128::from(o).saturating_mul(s)).sum();
    let array = Dense { file: chunk.file as usize, begin: chunk.begin, dtype: entry.dtype, sizes };
    Slab::new(array, &vec![0; sizes.len()], sizes, Place { at, strides: &strides })
}

/// The range of each place in its file's arena, given the blocks that the arenas hold.
pub(super) fn arena_ranges(places: &[Want], reads: &[BlockRead]) -> Vec<Range<usize>> {
    // (file, block's offset in the file, block's offset in the arena)
    let mut starts: Vec<(usize, u64, usize)> = Vec::with_capacity(reads.len());
    let mut at = 0;
    for read in reads {
        if starts.last().is_none_or(|&(file, ..)| file != read.file) {
            at = 0;
        }
        starts.push((read.file, read.offset, at));
        at += read.len.next_multiple_of(ALIGN);
    }
    let range = |place: &Want| {
        let len = (place.range.end - place.range.start) as usize;
        if len == 0 {
            return 0..0;
        }
        let after = starts.partition_point(|&(file, offset, _)| {
            (file, offset) <= (place.file, place.range.start)
        });
        let (_, offset, at) = starts[after - 1];
        let start = at + (place.range.start - offset) as usize;
        start..start + len
    };
    places.iter().map(range).collect()
}
