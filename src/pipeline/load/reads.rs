//! What a load reads: which blocks of which files, and how they are checked.

use super::arrivals::Arrivals;
use crate::error::Result;
use crate::pipeline::chunks::differing;
use crate::pipeline::report::Damage;
use crate::plan::load::BlockRead;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A shard to read from.
#[derive(Debug, Clone)]
pub(crate) struct ShardFile {
    /// Where it was found.
    pub path: PathBuf,
    /// Its other name: a save that commits gives shards their final ones after the commit.
    pub other_path: PathBuf,
    /// Its length, which the file on disk has.
    pub bytes: u64,
    /// Checksum of each chunk; none at all in files that are not ringstow's.
    pub crc32: Vec<u32>,
}

/// The owner of the files that a load reads. A trait here, which the store's checkpoint implements,
/// because only the checkpoint can tell whether a save has replaced it, and the pipeline must not import
/// the store.
pub(crate) trait FileOwner: Sync {
    /// Checks that the open files are the ones that the blocks were planned for. Called once all of them
    /// are open (`true`), or one could not be (`false`).
    ///
    /// # Errors
    /// What the load then fails with.
    fn check_same(&self, all_open: bool) -> Result<()>;

    /// Checks that open files, by number, that are of copies are still those of the same save.
    ///
    /// # Errors
    /// What the load then fails with.
    fn check_copies(&self, files: &[Option<&Path>]) -> Result<()>;

    /// Has `read` read from each copy of a file in turn, until it succeeds; returns whether it did. `why` says why the file
    /// itself is not read.
    fn read_copy(
        &self,
        file: usize,
        why: &dyn Display,
        read: &mut dyn FnMut(&Path) -> bool,
    ) -> bool;

    /// Names of the tensors with bytes in a range of a file, for messages.
    fn tensors_in(&self, file: usize, range: &Range<u64>) -> Vec<String>;
}

/// What to read.
#[derive(Clone, Copy)]
pub(crate) struct Reads<'a> {
    /// The checkpoint's directory, for messages.
    pub dir: &'a Path,
    /// The shards.
    pub files: &'a [ShardFile],
    /// The blocks, sorted.
    pub blocks: &'a [BlockRead],
    /// Bytes of a checksum chunk, of which a read may hold several.
    pub checksum_bytes: u64,
    /// Whether to check each against its checksum.
    pub verify: bool,
    /// Whether what the page cache holds is read from there. Not by what looks for damage: that reads the medium.
    pub page_cache: bool,
    /// What other processes read and send.
    pub arrivals: Option<&'a Arrivals>,
    /// The owner of the files.
    pub owner: &'a dyn FileOwner,
}

impl<'a> Reads<'a> {
    /// A read's checksum chunks, each as a read of its own.
    pub(super) fn chunks_of(self, read: &BlockRead) -> impl Iterator<Item = BlockRead> + use<> {
        let BlockRead { file, block, offset, len } = *read;
        let chunk = (self.checksum_bytes as usize).clamp(1, len.max(1));
        let starts = (0..len).step_by(chunk).enumerate();
        starts.map(move |(number, start)| BlockRead {
            file,
            block: block + number,
            offset: offset + start as u64,
            len: chunk.min(len - start),
        })
    }

    /// The checksum chunks of a read that are not what was written.
    pub(in crate::pipeline) fn damages<'b>(
        self,
        read: &'b BlockRead,
        bytes: &'b [u8],
    ) -> impl Iterator<Item = Damage> + use<'a, 'b> {
        let shard = &self.files[read.file];
        let chunks = (self.checksum_bytes as usize, shard.crc32.as_slice());
        differing(bytes, chunks, read.block).map(move |chunk| {
            let range = chunk.offset..chunk.offset + chunk.bytes as u64;
            Damage {
                file: shard.path.clone(),
                offset: chunk.offset,
                bytes: chunk.bytes as u64,
                what: chunk.what(),
                expected: format!("{:08x}", chunk.expected),
                got: format!("{:08x}", chunk.got),
                tensors: self.owner.tensors_in(read.file, &range),
                is_refusal: false,
            }
        })
    }

    /// Whether a checksum chunk is what was written.
    pub(super) fn is_good(self, chunk: &BlockRead, bytes: &[u8]) -> bool {
        self.damages(chunk, bytes).next().is_none()
    }

    /// The blocks of each file, in order; empty for files of which nothing is read.
    pub(super) fn by_file(self) -> impl Iterator<Item = &'a [BlockRead]> {
        let mut rest = self.blocks;
        (0..self.files.len()).map(move |file| {
            let (blocks, others) = rest.split_at(rest.partition_point(|b| b.file <= file));
            rest = others;
            blocks
        })
    }
}
