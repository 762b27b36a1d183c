//! The threads that fill blocks from tensors and submit them.

use super::block::{Filled, Filling, Inputs, Sums};
use crate::config::{Config, Priority};
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result};
use crate::format::{ChunkHash, content_hash};
use crate::limits::ALIGN;
use crate::pipeline::job::Job;
use crate::pipeline::pace::{Pace, wait_until};
use crate::pipeline::trace::What;
use crate::pipeline::transfers::OpenFiles;
use crate::pipeline::workers::scoped_workers;
use crate::plan::save::{Block, ItemRange, Shard};
use crate::pool::{Buffer, NoMore, Pool};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// The threads that fill the blocks of one save.
pub(super) struct Fillers<'a> {
    inputs: &'a Inputs<'a>,
    pool: &'a Pool,
    /// Whether more memory than the pool's own buffers may be taken.
    may_grow: bool,
    /// Why a block had to wait for a buffer, the first time that there was no more memory.
    no_more: OnceLock<NoMore>,
    files: &'a OpenFiles,
    job: &'a Arc<Job>,
    workers: (usize, Priority),
    pace: Option<Pace>,
    /// The next block to fill.
    next: AtomicUsize,
    /// Blocks of which not all bytes have left their tensors.
    unstaged: AtomicUsize,
    staged_at: OnceLock<Instant>,
    /// Checksums and hashes of each block of the plan.
    sums: Vec<Mutex<Sums>>,
}

/// The blocks that one filler works on.
#[derive(Default)]
struct InHand<'a> {
    /// The number of a block that no buffer was free for.
    claimed: Option<usize>,
    /// Blocks whose bytes are on their way.
    begun: VecDeque<(usize, Filling<'a>)>,
    /// When the first of them were seen to have left their tensors.
    arrived: VecDeque<Instant>,
    /// Full blocks, and when each may be written.
    held: VecDeque<(Instant, usize, Buffer)>,
}

impl InHand<'_> {
    fn is_empty(&self) -> bool {
        self.claimed.is_none() && self.blocks() == 0
    }

    /// Blocks that have a buffer.
    fn blocks(&self) -> usize {
        self.begun.len() + self.held.len()
    }
}

impl<'a> Fillers<'a> {
    pub fn new(
        inputs: &'a Inputs<'a>,
        pool: &'a Pool,
        files: &'a OpenFiles,
        config: &Config,
        job: &'a Arc<Job>,
    ) -> Self {
        let blocks = &inputs.plan.blocks;
        let threads = config.filler_threads().min(blocks.len()).max(1);
        Self {
            inputs,
            pool,
            may_grow: config.is_pool_automatic() && job.is_background(),
            no_more: OnceLock::new(),
            files,
            job,
            workers: (threads, config.priority()),
            pace: Pace::new(config.write_rate),
            next: AtomicUsize::new(0),
            unstaged: AtomicUsize::new(blocks.len()),
            staged_at: OnceLock::new(),
            sums: blocks.iter().map(|_| Mutex::default()).collect(),
        }
    }

    /// Fills and submits all blocks; when it returns, transfers may still be in flight.
    pub fn fill(&self) {
        scoped_workers(self.workers, || self.fill_blocks(), || self.job.cancel());
    }

    /// One filler: blocks are begun in order, and finished in the order in which they were begun.
    fn fill_blocks(&self) {
        let mut hand = InHand::default();
        while !self.job.stopped() && (self.has_next() || !hand.is_empty()) {
            if let Err(error) = self.fill_next(&mut hand) {
                self.files.fail(error);
            }
        }
    }

    /// Writes the block that was held first if it is due; otherwise finishes the block that was begun first if
    /// its bytes have arrived; otherwise begins one more, if there is one and a buffer for it; otherwise waits
    /// for the first. If there may be memory for the whole save, a GPU's copies are begun first: training waits for them,
    /// and not for checksums.
    fn fill_next(&self, hand: &mut InHand<'a>) -> Result<()> {
        let is_due = hand.held.front().is_some_and(|(due, ..)| *due <= Instant::now());
        if is_due && let Some((_, number, buffer)) = hand.held.pop_front() {
            self.write_block(number, buffer);
            return Ok(());
        }
        self.note_arrivals(hand)?;
        let is_on_gpu =
            hand.begun.front().is_some_and(|(_, first)| first.copying_since().is_some());
        let begins_first =
            hand.arrived.is_empty() || (is_on_gpu && (self.may_grow || self.fits_pool()));
        // No more than its share of the pool: other fillers take checksums meanwhile.
        let share = if self.may_grow { usize::MAX } else { self.pool.count() / self.workers.0 };
        let may_begin = begins_first && hand.blocks() <= share;
        if may_begin && let Some((number, buffer)) = self.lease(hand)? {
            hand.begun.push_back(self.begin(number, buffer)?);
            return Ok(());
        }
        match hand.begun.pop_front() {
            Some((number, first)) => self.finish(number, first, hand),
            None => {
                let waiting = Instant::now();
                hand.held.front().inspect(|(due, ..)| wait_until(*due, self.job));
                if hand.claimed.is_some() || self.has_next() {
                    self.inputs.clocks.wait.add(waiting); // only a written block makes room for the next
                }
                Ok(())
            }
        }
    }

    /// Notes which blocks have left their tensors; a GPU may copy many while a filler takes one checksum.
    fn note_arrivals(&self, hand: &mut InHand) -> Result<()> {
        for (number, filling) in hand.begun.iter_mut().skip(hand.arrived.len()) {
            if !filling.has_arrived()? {
                break;
            }
            hand.arrived.push_back(Instant::now());
            self.staged(&self.inputs.plan.blocks[*number])?;
        }
        Ok(())
    }

    fn begin(&self, number: usize, buffer: Buffer) -> Result<(usize, Filling<'a>)> {
        let (block, beginning) = (&self.inputs.plan.blocks[number], Instant::now());
        let filling = Filling::begin(self.inputs, block, buffer)?;
        self.job.note(What::Fill, beginning, Some(number), block.len as u64);
        Ok((number, filling))
    }

    fn fits_pool(&self) -> bool {
        self.sums.len() <= self.pool.count()
    }

    fn has_next(&self) -> bool {
        self.next.load(Relaxed) < self.inputs.plan.blocks.len()
    }

    /// Takes the next block's number, and a buffer for it. The number comes first: a buffer without a block
    /// would be memory that nobody needs. A filler waits for a buffer only if it has no block to finish:
    /// finishing one frees a buffer.
    fn lease(&self, hand: &mut InHand) -> Result<Option<(usize, Buffer)>> {
        let next = || {
            let number = self.has_next().then(|| self.next.fetch_add(1, Relaxed))?;
            (number < self.inputs.plan.blocks.len()).then_some(number)
        };
        let Some(number) = hand.claimed.take().or_else(next) else { return Ok(None) };
        let buffer = match self.free_buffer() {
            None if hand.blocks() == 0 => Some(self.wait_for_buffer(number)?),
            leased => leased,
        };
        if buffer.is_none() {
            hand.claimed = Some(number);
        }
        Ok(buffer.map(|buffer| (number, buffer)))
    }

    /// A buffer that need not be waited for.
    fn free_buffer(&self) -> Option<Buffer> {
        if !self.may_grow {
            return self.pool.try_lease();
        }
        loop {
            let buffer = self.pool.try_lease_any();
            if buffer.is_some() || self.no_more.get().is_some() {
                return buffer;
            }
            if let Err(why) = self.pool.grow() {
                let _ = self.no_more.set(why); // the first one's
            }
        }
    }

    fn wait_for_buffer(&self, number: usize) -> Result<Buffer> {
        let waiting = Instant::now();
        let leased = if self.may_grow { self.pool.lease_any() } else { self.pool.lease() };
        let buffer = leased.map_err(|error| {
            let shard = self.inputs.plan.blocks[number].shard;
            Error::io("taking staging memory for", &**self.files.path(shard), error)
        });
        self.inputs.clocks.wait.add(waiting);
        self.job.note(What::Wait, waiting, None, 0);
        buffer
    }

    /// Waits for a block's bytes, and submits them, or keeps them until they are due.
    fn finish(&self, number: usize, filling: Filling, hand: &mut InHand<'a>) -> Result<()> {
        let (block, copying) = (&self.inputs.plan.blocks[number], filling.copying_since());
        let (noted, mut landed) = (hand.arrived.pop_front(), Instant::now());
        let staged = |block: &Block| {
            landed = Instant::now();
            if noted.is_some() { Ok(()) } else { self.staged(block) }
        };
        let Filled { buffer, sums } = filling.finish(staged)?;
        if let Some(began) = copying {
            let bytes = block.len as u64;
            self.job.note_span(What::Device, (began, noted.unwrap_or(landed)), Some(number), bytes);
            self.job.note(What::Checksum, landed, Some(number), bytes);
        }
        *self.sums[number].lock().expect("no panic while it is held") = sums;
        match &self.pace {
            None => self.write_block(number, buffer),
            Some(pace) => {
                hand.held.push_back((pace.due(Instant::now(), block.len), number, buffer));
            }
        }
        Ok(())
    }

    /// Notes that all bytes of a block have left their tensors, and calls the check after the last one.
    ///
    /// # Errors
    /// The check's. The last block is then not written, so nothing is committed.
    fn staged(&self, block: &Block) -> Result<()> {
        self.job.add_staged(block.len as u64);
        if self.unstaged.fetch_sub(1, AcqRel) == 1 && !self.job.stopped() {
            self.inputs.check.map_or(Ok(()), |check| check())?;
            let _ = self.staged_at.set(Instant::now()); // set once: only one block is the last
            self.job.set_staged();
        }
        Ok(())
    }

    /// Submits a full buffer, which returns to the pool when it is written.
    fn write_block(&self, number: usize, buffer: Buffer) {
        let block = &self.inputs.plan.blocks[number];
        let (offset, bytes) = (block.offset, block.len as u64);
        let len = block.len.next_multiple_of(ALIGN);
        let action = Action::Write(Transfer { offset, buffer, start: 0, len });
        let path = self.files.path(block.shard).clone();
        self.files.submit(block.shard, (number, block.len), action, move |transfers, outcome| {
            match outcome.result {
                Ok(()) => transfers.job().add_written(bytes),
                // After a failure, other transfers are cancelled, which says nothing new.
                Err(_) if transfers.job().stopped() => {}
                Err(error) => transfers.fail(Error::io_at("writing", &*path, offset, error)),
            }
        });
    }

    /// Bytes of staging memory that there are for the save.
    pub fn memory_bytes(&self) -> usize {
        if self.may_grow { self.pool.granted_bytes() } else { self.pool.bytes() }
    }

    /// Why the save got less memory than its state has, if it did.
    pub fn no_more(&self) -> Option<&NoMore> {
        self.no_more.get()
    }

    /// When all bytes had left their tensors, if they have.
    pub fn staged_at(&self) -> Option<Instant> {
        self.staged_at.get().copied()
    }

    /// Checksums by shard.
    pub fn checksums(&self) -> Vec<Vec<u32>> {
        let plan = self.inputs.plan;
        let mut by_shard = vec![Vec::new(); plan.shards.len()];
        for (block, sums) in plan.blocks.iter().zip(&self.sums) {
            let sums = sums.lock().expect("no panic while it is held");
            by_shard[block.shard].extend_from_slice(&sums.crc32);
        }
        by_shard
    }

    /// Hashes of the tensor chunks by shard; none if the plan does not ask for them.
    pub fn hashes(&self) -> Vec<Vec<ChunkHash>> {
        let plan = self.inputs.plan;
        let mut runs = vec![Vec::new(); plan.shards.len()];
        for (block, sums) in plan.blocks.iter().zip(&self.sums) {
            let sums = sums.lock().expect("no panic while it is held");
            runs[block.shard].extend_from_slice(&sums.runs);
        }
        let hashed = plan.shards.iter().zip(&runs).filter(|_| plan.is_hashed);
        hashed.map(|(shard, runs)| hashes_of(shard, runs, self.inputs.checksum_bytes)).collect()
    }
}

/// The hash of each item of a shard that has bytes, of the hashes of all runs in the shard.
fn hashes_of(shard: &Shard, mut runs: &[u128], checksum_bytes: usize) -> Vec<ChunkHash> {
    let items = shard.items.iter().filter(|item| !item.range.is_empty());
    let hash = |item: &ItemRange| {
        let (begin, len) = (item.range.start, item.range.end - item.range.start);
        let (own, rest) =
            runs.split_at(content_hash::runs(begin, len, checksum_bytes as u64).count());
        runs = rest;
        ChunkHash { begin, hash: content_hash::of_runs(own) }
    };
    items.map(hash).collect()
}
