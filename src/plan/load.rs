//! Turns the tensors that are wanted into block reads: sorted, merged, each block once.

use std::ops::Range;

/// Bytes of a file that are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Index in the manifest's files.
    pub file: usize,
    /// Byte offsets in that file.
    pub range: Range<u64>,
}

/// A block to read: the unit of checksums, so that nothing smaller can be checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRead {
    /// Index in the manifest's files.
    pub file: usize,
    /// Number of the block in its file.
    pub block: usize,
    /// Byte offset in the file.
    pub offset: u64,
    /// Bytes; less than the block size only for a file's last block.
    pub len: usize,
}

/// The blocks that hold all that is wanted, by file and rising offset, none twice.
///
/// `file_bytes` gives each file's length. Wants lie within their files; empty ones ask for nothing.
pub fn blocks(wants: &[Want], file_bytes: &[u64], block_bytes: u64) -> Vec<BlockRead> {
    let mut numbers: Vec<(usize, Range<u64>)> = wants
        .iter()
        .filter(|want| !want.range.is_empty())
        .map(|want| {
            let last = want.range.end.div_ceil(block_bytes);
            (want.file, want.range.start / block_bytes..last)
        })
        .collect();
    numbers.sort_unstable_by_key(|(file, range)| (*file, range.start));
    let mut reads = Vec::new();
    let (mut file, mut next) = (usize::MAX, 0);
    for (wanted_file, range) in numbers {
        if wanted_file != file {
            (file, next) = (wanted_file, 0);
        }
        for block in range.start.max(next)..range.end {
            let offset = block * block_bytes;
            let len = (file_bytes[file] - offset).min(block_bytes) as usize;
            reads.push(BlockRead { file, block: block as usize, offset, len });
        }
        next = next.max(range.end);
    }
    reads
}

/// All blocks of all files.
pub fn all_blocks(file_bytes: &[u64], block_bytes: u64) -> Vec<BlockRead> {
    let whole = |(file, &bytes)| Want { file, range: 0..bytes };
    let wants: Vec<Want> = file_bytes.iter().enumerate().map(whole).collect();
    blocks(&wants, file_bytes, block_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reads_are_exactly_the_blocks_that_are_touched(
            wants in prop::collection::vec((0..2usize, 0..50_000u64, 0..30_000u64), 0..20),
        ) {
            let file_bytes = [90_001u64, 4096];
            let wants: Vec<Want> = wants
                .into_iter()
                .map(|(file, start, len)| {
                    let start = start.min(file_bytes[file]);
                    Want { file, range: start..(start + len).min(file_bytes[file]) }
                })
                .collect();
            let reads = blocks(&wants, &file_bytes, 4096);
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
    fn the_last_block_of_a_file_is_short() {
        let reads = all_blocks(&[10_000], 4096);
        assert_eq!(reads.iter().map(|r| r.len).collect::<Vec<_>>(), [4096, 4096, 1808]);
    }
}
