//! One block on its way from its tensors into a staging buffer.

use crate::device::{StagedCopy, TensorSource};
use crate::error::{Error, Result, some_of};
use crate::format::{Item, content_hash};
use crate::limits::ALIGN;
use crate::pipeline::clock::Clocks;
use crate::plan::save::{Block, Piece, PieceSource, SavePlan};
use crate::pool::Buffer;
use std::time::Instant;

/// Copied and checksummed in runs of this many bytes, so that the checksum finds them in the L2.
const RUN_BYTES: usize = 256 << 10;

/// Fails if a save must not be committed after all.
pub(crate) type Check<'a> = &'a (dyn Fn() -> Result<()> + Send + Sync + 'a);

/// What the blocks of a save are filled from, and the time that this takes.
pub(super) struct Inputs<'a> {
    pub plan: &'a SavePlan,
    /// The items, and one by one where their bytes come from.
    pub items: &'a [Item],
    pub sources: &'a [TensorSource<'a>],
    /// Called once all bytes have left their tensors.
    pub check: Option<Check<'a>>,
    /// Bytes that one checksum covers.
    pub checksum_bytes: usize,
    pub clocks: Clocks,
}

/// A block, and the buffer that its bytes are copied to.
pub(super) struct Filling<'a> {
    inputs: &'a Inputs<'a>,
    block: &'a Block,
    staged: StagedCopy,
    /// `None` as long as a GPU may be copying.
    checksums: Option<Vec<u32>>,
    pieces: Vec<Piece>,
    /// When the copies were started.
    begun: Instant,
}

/// A buffer with all of a block's bytes, padded.
pub(super) struct Filled {
    pub buffer: Buffer,
    pub sums: Sums,
}

/// What later readers and saves compare a block's bytes with.
#[derive(Default)]
pub(super) struct Sums {
    pub crc32: Vec<u32>,
    /// Hashes of the tensors' runs, if the plan asks for them.
    pub runs: Vec<u128>,
}

impl<'a> Filling<'a> {
    /// Copies the bytes in host memory, and starts the GPUs' copies of the bytes in theirs.
    ///
    /// # Errors
    /// A source's, or a GPU's.
    pub fn begin(inputs: &'a Inputs<'a>, block: &'a Block, buffer: Buffer) -> Result<Self> {
        let begun = Instant::now();
        let gpu = |item: usize| inputs.sources[item].is_on_gpu();
        let (pieces, staged) = (inputs.plan.pieces(block), StagedCopy::new(buffer));
        let mut filling =
            Self { inputs, block, staged, checksums: None, pieces: Vec::new(), begun };
        match pieces.iter().any(|piece| matches!(piece.from, PieceSource::Item(item) if gpu(item)))
        {
            true => filling.order(&pieces).map_err(|error| inputs.naming(error, block))?,
            false => filling.checksums = Some(filling.copy(&pieces)?),
        }
        Ok(Self { pieces, ..filling })
    }

    /// Since when GPUs have been copying; `None` if they copy nothing.
    pub fn copying_since(&self) -> Option<Instant> {
        self.checksums.is_none().then_some(self.begun)
    }

    /// Whether all of its bytes have left their tensors.
    ///
    /// # Errors
    /// A GPU's.
    pub fn has_arrived(&mut self) -> Result<bool> {
        self.staged.has_ended().map_err(|error| self.inputs.naming(error, self.block))
    }

    /// Waits until all of its bytes have left their tensors, calls `staged`, and pads the block.
    ///
    /// # Errors
    /// A GPU's, and that of `staged`.
    pub fn finish(mut self, staged: impl FnOnce(&Block) -> Result<()>) -> Result<Filled> {
        let (block, inputs) = (self.block, self.inputs);
        let checksums = self.checksums.take();
        let landed = self.staged.finish().map_err(|error| inputs.naming(error, block))?;
        staged(block)?;
        let mut buffer = inputs.clocks.add_finished(landed);
        buffer[block.len..block.len.next_multiple_of(ALIGN)].fill(0);
        let crc32 = checksums.unwrap_or_else(|| inputs.checksums(&buffer[..block.len]));
        let runs = match inputs.plan.is_hashed {
            true => inputs.hashes(&self.pieces, &buffer[..block.len]),
            false => Vec::new(),
        };
        Ok(Filled { buffer, sums: Sums { crc32, runs } })
    }

    /// Queues the copies of all pieces, and starts the GPUs'.
    fn order(&mut self, pieces: &[Piece]) -> Result<()> {
        let mut filled = 0;
        for piece in pieces {
            let end = filled + piece.range.len();
            self.gather(piece.from, piece.range.start, filled..end)?;
            filled = end;
        }
        self.staged.start()
    }

    /// Copies all pieces, and returns the checksums of what it copied.
    fn copy(&mut self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let (inputs, block) = (self.inputs, self.block);
        let mut checksums = Vec::with_capacity(block.len.div_ceil(inputs.checksum_bytes));
        let mut hasher = crc32fast::Hasher::new();
        let (mut filled, mut hashed) = (0, 0);
        // The clock is read at the ends of runs: reading it at each of a thousand small pieces would cost
        // more than copying the smallest.
        let mut copying = Instant::now();
        for piece in pieces {
            let mut offset = piece.range.start;
            while offset < piece.range.end {
                let covered = inputs.checksum_bytes - filled % inputs.checksum_bytes;
                let len = (piece.range.end - offset).min(RUN_BYTES).min(covered);
                self.gather(piece.from, offset, filled..filled + len)?;
                (offset, filled) = (offset + len, filled + len);
                let ends = len == covered || filled == block.len;
                if filled - hashed >= RUN_BYTES || ends {
                    let hashing = Instant::now();
                    inputs.clocks.copy.add_span(copying, hashing);
                    hasher.update(self.staged.bytes(hashed..filled));
                    copying = Instant::now();
                    inputs.clocks.checksum.add_span(hashing, copying);
                    hashed = filled;
                }
                if ends {
                    checksums.push(std::mem::take(&mut hasher).finalize());
                }
            }
        }
        debug_assert_eq!(hashed, block.len);
        Ok(checksums)
    }

    fn gather(
        &mut self,
        from: PieceSource,
        offset: usize,
        to: std::ops::Range<usize>,
    ) -> Result<()> {
        match from {
            PieceSource::Header => {
                let shard = &self.inputs.plan.shards[self.block.shard];
                shard.write_header(self.inputs.items, offset as u64, self.staged.bytes(to));
                Ok(())
            }
            PieceSource::Item(item) => self.staged.gather(&self.inputs.sources[item], offset, to),
        }
    }
}

impl<'a> Inputs<'a> {
    pub fn new(
        plan: &'a SavePlan,
        items: &'a [Item],
        sources: &'a [TensorSource<'a>],
        check: Option<Check<'a>>,
        checksum_bytes: usize,
    ) -> Self {
        Self { plan, items, sources, check, checksum_bytes, clocks: Clocks::default() }
    }

    fn checksums(&self, bytes: &[u8]) -> Vec<u32> {
        let hashing = Instant::now();
        let checksums = bytes.chunks(self.checksum_bytes).map(crc32fast::hash).collect();
        self.clocks.checksum.add(hashing);
        checksums
    }

    /// Hashes of the runs into which checksum chunks cut the tensors in a block.
    fn hashes(&self, pieces: &[Piece], bytes: &[u8]) -> Vec<u128> {
        let hashing = Instant::now();
        let (mut hashes, mut rest, mut filled) = (Vec::new(), bytes, 0);
        for Piece { from, range } in pieces {
            let (piece, after) = rest.split_at(range.len());
            if let PieceSource::Item(_) = from {
                let runs =
                    content_hash::runs(filled, piece.len() as u64, self.checksum_bytes as u64);
                hashes.extend(
                    runs.map(|run| {
                        content_hash::of_run(&piece[run.start as usize..run.end as usize])
                    }),
                );
            }
            (rest, filled) = (after, filled + piece.len() as u64);
        }
        self.clocks.checksum.add(hashing);
        hashes
    }

    /// Adds to a GPU's error the names of the tensors that it was to copy for a block.
    fn naming(&self, error: Error, block: &Block) -> Error {
        let Error::Gpu { doing, device, reason, remedy } = error else { return error };
        let name = |piece: &Piece| match piece.from {
            PieceSource::Item(item) if self.sources[item].is_on_gpu() => {
                Some(format!("{:?}", self.items[item].info.name))
            }
            _ => None,
        };
        let names: Vec<String> = self.plan.pieces(block).iter().filter_map(name).collect();
        let reason = format!("{reason}, at a block with {}", some_of(&names));
        Error::Gpu { doing, device, reason, remedy }
    }
}
