//! Turns the tensors and regions that a load wants into reads: sorted, merged, each byte once.

use super::slab::Slab;
use crate::limits::ALIGN;
use std::ops::Range;

/// Bytes of a file that are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Index in the manifest's files.
    pub file: usize,
    /// Byte offsets in that file.
    pub range: Range<u64>,
}

/// One transfer: a run of checksum chunks, or of pages that no checksum covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRead {
    /// Index in the manifest's files.
    pub file: usize,
    /// Number of the first checksum chunk in its file, or of the read in which the pages begin.
    pub block: usize,
    /// Byte offset in the file.
    pub offset: u64,
    /// Bytes; a multiple of 4096 except at a file's end.
    pub len: usize,
}

impl BlockRead {
    /// Its bytes in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len as u64
    }
}

/// The unit of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Whole checksum chunks, as nothing smaller can be checked.
    Blocks {
        /// Bytes of a checksum chunk.
        bytes: u64,
        /// Bytes of a read at most, but at least one chunk.
        most: u64,
    },
    /// The needed pages, in reads of at most this many bytes (a multiple of 4096).
    Pages(u64),
}

/// Two wanted ranges that are less than this many bytes apart are read as one: a disk needs about as long for another
/// transfer as for these bytes.
const PAGES_GAP: u64 = 32 << 10;

const PAGE: u64 = ALIGN as u64;

impl Unit {
    /// Ranges closer than this are read as one.
    fn gap(self) -> u64 {
        match self {
            Self::Blocks { bytes, .. } => bytes,
            Self::Pages(_) => PAGES_GAP,
        }
    }

    /// The reads that cover all wanted bytes, by file and rising offset, no byte twice.
    ///
    /// `file_bytes` has each file's length. Wants lie within their files and may be empty.
    pub fn reads(self, wants: &[Want], file_bytes: &[u64]) -> Vec<BlockRead> {
        // Whole grains are read, and ranges fewer than `apart` grains apart are merged.
        let (grain, apart, most, numbered_by) = match self {
            Self::Blocks { bytes, most } => (bytes, 1, most, bytes),
            Self::Pages(most) => (PAGE, PAGES_GAP / PAGE, most, most),
        };
        let wanted = wants.iter().filter(|want| !want.range.is_empty());
        let grains = |range: &Range<u64>| range.start / grain..range.end.div_ceil(grain);
        let mut ranges: Vec<(usize, Range<u64>)> =
            wanted.map(|want| (want.file, grains(&want.range))).collect();
        ranges.sort_unstable_by_key(|(file, range)| (*file, range.start));
        ranges.dedup_by(|(file, range), (before, merged)| {
            let joins = file == before && range.start < merged.end + apart;
            if joins {
                merged.end = merged.end.max(range.end);
            }
            joins
        });
        let together = (most / grain).max(1);
        let cut = |(file, range): (usize, Range<u64>)| {
            let end = (range.end * grain).min(file_bytes[file]);
            range.step_by(together as usize).map(move |number| {
                let offset = number * grain;
                let len = (end - offset).min(together * grain) as usize;
                BlockRead { file, block: (offset / numbered_by) as usize, offset, len }
            })
        };
        ranges.into_iter().flat_map(cut).collect()
    }
}

/// The reads of several slabs, and the slabs that each read has bytes of.
#[derive(Debug)]
pub struct Scattered {
    /// The reads.
    pub reads: Vec<BlockRead>,
    /// For each read, the index of its first slab in `slabs`; one more entry at the end.
    starts: Vec<usize>,
    /// Numbers of slabs.
    slabs: Vec<u32>,
}

impl Scattered {
    /// Plans the reads of `slabs`, which lie in their files. Each byte is read once, also if several
    /// slabs want it.
    pub fn plan(slabs: &[Slab], file_bytes: &[u64], unit: Unit) -> Self {
        let mut wants = Vec::with_capacity(slabs.len());
        for slab in slabs {
            slab.spans(unit.gap(), &mut |range| wants.push(Want { file: slab.file, range }));
        }
        let reads = unit.reads(&wants, file_bytes);
        drop(wants);
        let pairs = pairs(slabs, &reads, unit.gap());
        // A counting sort, linear in the number of pairs.
        let mut starts = vec![0; reads.len() + 1];
        for &(read, _) in &pairs {
            starts[read + 1] += 1;
        }
        for i in 0..reads.len() {
            starts[i + 1] += starts[i];
        }
        let (mut next, mut sorted) = (starts.clone(), vec![0; pairs.len()]);
        for (read, slab) in pairs {
            sorted[next[read]] = slab;
            next[read] += 1;
        }
        Self { reads, starts, slabs: sorted }
    }

    /// Numbers of the slabs that have bytes in a read.
    pub fn slabs_of(&self, read: usize) -> impl Iterator<Item = usize> {
        self.slabs[self.starts[read]..self.starts[read + 1]].iter().map(|&slab| slab as usize)
    }
}

/// All pairs (read, slab) that have bytes in common, each once.
fn pairs(slabs: &[Slab], reads: &[BlockRead], gap: u64) -> Vec<(usize, u32)> {
    let mut pairs = Vec::with_capacity(slabs.len());
    for (number, slab) in slabs.iter().enumerate() {
        let mut next = 0;
        slab.spans(gap, &mut |span| {
            let before =
                |r: &BlockRead| (r.file, r.offset + r.len as u64) <= (slab.file, span.start);
            let first = next + reads[next..].partition_point(before);
            let within = |r: &&BlockRead| r.file == slab.file && r.offset < span.end;
            let end = first + reads[first..].iter().take_while(within).count();
            pairs.extend((first..end).map(|read| (read, number as u32)));
            next = end;
        });
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reads_are_exactly_the_touched_chunks(
            wants in prop::collection::vec((0..2usize, 0..50_000u64, 0..30_000u64), 0..20),
            most in prop::sample::select(vec![4096u64, 10_000, 16_384]),
        ) {
            let file_bytes = [90_001u64, 4096];
            let wants: Vec<Want> = wants
                .into_iter()
                .map(|(file, start, len)| {
                    let start = start.min(file_bytes[file]);
                    Want { file, range: start..(start + len).min(file_bytes[file]) }
                })
                .collect();
            let reads = Unit::Blocks { bytes: 4096, most }.reads(&wants, &file_bytes);
            let touched = |read: &BlockRead| wants.iter().any(|w| {
                w.file == read.file && !w.range.is_empty()
                    && w.range.start < read.offset + read.len as u64 && read.offset < w.range.end
            });
            prop_assert!(reads.iter().all(touched));
            prop_assert!(reads.windows(2).all(|w| (w[0].file, w[0].offset) < (w[1].file, w[1].offset)));
            for want in wants.iter().filter(|w| !w.range.is_empty()) {
                let covered: u64 = reads.iter().filter(|r| r.file == want.file).map(|r| {
                    let end = (r.offset + r.len as u64).min(want.range.end);
                    end.saturating_sub(r.offset.max(want.range.start))
                }).sum();
                prop_assert_eq!(covered, want.range.end - want.range.start);
            }
        }
    }

    #[test]
    fn last_read_of_a_file_is_short() {
        let whole = [Want { file: 0, range: 0..10_000 }];
        let reads = |most| Unit::Blocks { bytes: 4096, most }.reads(&whole, &[10_000]);
        let lens = |most| reads(most).iter().map(|r| r.len).collect::<Vec<_>>();
        assert_eq!(lens(4096), [4096, 4096, 1808]);
        assert_eq!(lens(8192), [8192, 1808]);
        assert_eq!(reads(8192)[1].block, 2);
        assert_eq!(lens(1 << 20), [10_000]);
    }
}
