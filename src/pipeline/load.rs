//! Moves blocks of files back into memory, each checked against its checksums before anyone sees it.
//!
//! Worker threads keep a few reads each in flight. The caller decides where a block goes: straight into
//! the memory that the tensors will live in ([`read_arenas`]), through the staging pool into memory
//! that exists already ([`read_into`]), or nowhere ([`check`]).

mod arrivals;
mod files;
mod readers;
mod reads;

pub use arrivals::{Arrivals, Slot};
pub(super) use files::open as open_files;
pub(crate) use files::open_shard;
pub(crate) use reads::{FileOwner, Reads, ShardFile};

use super::job::Job;
use super::open::update;
use super::report::{Damage, LoadSeconds, Moved};
use super::runtime::Runtime;
use super::trace::What;
use super::workers::scoped_workers;
use crate::config::{Config, Switch};
use crate::device::{StagedCopy, Target, pin_for_targets};
use crate::error::{Error, Result};
use crate::limits::ALIGN;
use crate::plan::load::{BlockRead, Scattered};
use crate::plan::slab::Slab;
use crate::pool::{Buffer, CutMapping, Mapping, Pool};
use readers::{Collected, Memory, Readers, unreadable};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// How a read went.
#[derive(Debug)]
pub(crate) struct ReadOutcome {
    pub moved: Moved,
    pub seconds: LoadSeconds,
    /// Bytes that were copied from the page cache.
    pub cached_bytes: u64,
    /// Bytes that other processes have read and sent.
    pub received_bytes: u64,
}

/// Reads blocks straight into fresh memory: one mapping per file, which holds its blocks back to back,
/// each at a multiple of [`ALIGN`]. A file of which nothing is read gets an empty mapping.
///
/// `mapped` gets the address of each mapping before anything is read. Nobody may use the memory until this returns.
///
/// # Errors
/// The first failure or damaged block.
pub(crate) fn read_arenas(
    runtime: &Runtime,
    reads: Reads,
    job: &Arc<Job>,
    mapped: impl FnOnce(Vec<usize>),
) -> Result<(Vec<Mapping>, ReadOutcome)> {
    let no_memory = |e| Error::io("taking memory for", reads.dir, e);
    let mut arenas = Vec::with_capacity(reads.files.len());
    let mut buffers = Vec::with_capacity(reads.blocks.len());
    for blocks in reads.by_file() {
        let lens = || blocks.iter().map(|block| block.len.next_multiple_of(ALIGN));
        let arena = Mapping::new(lens().sum()).map_err(no_memory)?;
        let (whole, places) = Buffer::cut(arena, lens());
        buffers.extend(places.into_iter().map(|place| Mutex::new(Some(place))));
        arenas.push(whole);
    }
    mapped(arenas.iter().map(CutMapping::address).collect());
    let read = match runtime.config().fixed {
        Switch::On => read_through(runtime, reads, &buffers, job)?,
        _ => {
            // Staging is not involved, so neither are fixed buffers.
            let config = Config { fixed: Switch::Off, ..runtime.config().clone() };
            let memory = Memory::Arena(&buffers);
            read_blocks(runtime, &config, reads, job, memory, |_, _| {}, None)?
        }
    };
    drop(buffers);
    Ok((arenas.into_iter().map(CutMapping::rejoin).collect(), read))
}

/// Reads blocks through fixed buffers, which were asked for by name, into places of their own.
fn read_through(
    runtime: &Runtime,
    reads: Reads,
    places: &[Mutex<Option<Buffer>>],
    job: &Arc<Job>,
) -> Result<ReadOutcome> {
    let (pool, config) = staging(runtime, reads)?;
    let deliver = |number: usize, staged: &mut StagedCopy| {
        let mut place = places[number].lock().expect("no panic while it is held");
        if let Some(place) = place.as_mut() {
            place.prefault();
            let len = reads.blocks[number].len;
            place[..len].copy_from_slice(staged.bytes(0..len));
        }
    };
    read_blocks(runtime, &config, reads, job, Memory::Pool(&pool, None), deliver, None)
}

/// Where regions of the files go.
#[derive(Clone, Copy)]
pub(crate) struct Scatter<'a> {
    /// The regions.
    pub slabs: &'a [Slab],
    /// The memory of each, which has room for it and overlaps no other's.
    pub targets: &'a [&'a Target<'a>],
    /// Which regions each of [`Reads::blocks`] has bytes of.
    pub plan: &'a Scattered,
}

/// Reads blocks through the staging pool and copies what is wanted of each to where it goes.
///
/// # Errors
/// The first failure or damaged block; blocks read before it have been copied.
pub(crate) fn read_into(
    runtime: &Runtime,
    reads: Reads,
    to: Scatter,
    job: &Arc<Job>,
) -> Result<ReadOutcome> {
    let started = Instant::now();
    let (pool, config) = staging(runtime, reads)?;
    let staged = started.elapsed().as_secs_f64();
    let pinning = pin_for_targets(&pool, to.targets);
    let deliver = |number: usize, staged: &mut StagedCopy| {
        let block = &reads.blocks[number];
        let span = block.offset..block.offset + block.len as u64;
        for slab in to.plan.slabs_of(number) {
            to.slabs[slab].runs(&span, &mut |runs| {
                staged.deliver(to.targets[slab], block.len, runs);
            });
        }
    };
    let in_place = |number: usize, fill: &mut dyn FnMut(&mut [u8]) -> bool| {
        let block = &reads.blocks[number];
        let mut slabs = to.plan.slabs_of(number);
        let (Some(slab), None) = (slabs.next(), slabs.next()) else { return false };
        let mut whole = None;
        to.slabs[slab].runs(&block.range(), &mut |runs| {
            whole = (runs.len == block.len).then_some(runs);
        });
        whole.is_some_and(|run| to.targets[slab].fill(run, fill))
    };
    let memory = Memory::Pool(&pool, Some(&in_place));
    let mut read = read_blocks(runtime, &config, reads, job, memory, deliver, None)?;
    read.moved.note(reads.dir, pinning);
    read.seconds.prepare += staged;
    read.seconds.total += staged;
    Ok(read)
}

/// Reads blocks through the staging pool, and returns the damaged checksum chunks by file and offset.
///
/// Goes on after damage. A read of several chunks that fails because the medium is damaged is repeated chunk by chunk.
///
/// # Errors
/// The first failure to read that is not damage.
pub(crate) fn check(
    runtime: &Runtime,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(Vec<Damage>, ReadOutcome)> {
    let (pool, config) = staging(runtime, reads)?;
    let pass = |reads: Reads| -> Result<(Collected, ReadOutcome)> {
        let found = Mutex::default();
        let memory = Memory::Pool(&pool, None);
        let read = read_blocks(runtime, &config, reads, job, memory, |_, _| {}, Some(&found))?;
        Ok((found.into_inner().expect("no panic while it was held"), read))
    };
    let (Collected { mut damage, unread }, read) = pass(reads)?;
    if !unread.is_empty() {
        let mut singles: Vec<BlockRead> =
            unread.iter().flat_map(|(read, _)| reads.chunks_of(read)).collect();
        singles.sort_unstable_by_key(|read| (read.file, read.offset));
        let (again, _) = pass(Reads { blocks: &singles, ..reads })?;
        damage.extend(again.damage);
        damage.extend(again.unread.iter().map(|(read, error)| unreadable(reads, read, error)));
    }
    damage.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
    Ok((damage, read))
}

/// The pool to read through, and the configuration to do it with: the runtime's, unless its buffers are
/// smaller than the largest read. Then it is a pool for this load alone, not registered as fixed
/// buffers.
///
/// # Errors
/// [`Error::Invalid`] if fixed buffers were asked for by name and are too small.
fn staging(runtime: &Runtime, reads: Reads) -> Result<(Pool, Config)> {
    let config = runtime.config();
    let largest = reads.blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let no_memory = |e| Error::io("taking staging memory for", reads.dir, e);
    if largest as u64 <= config.block_bytes {
        return Ok((runtime.pool().map_err(no_memory)?, config.clone()));
    }
    let len = largest.next_multiple_of(ALIGN).max(ALIGN);
    if config.fixed == Switch::On {
        return Err(Error::invalid(format!(
            "{} is read in blocks of {len} bytes, and with Config.fixed = on they must fit into a staging \
             buffer: Config.block_bytes = {} is less. Set block_bytes to {len} or more, or fixed to auto",
            reads.dir.display(),
            config.block_bytes
        )));
    }
    let count = reads.blocks.len().min(config.staging_bytes() as usize / len).max(2);
    let pool = Pool::new(count, len).map_err(no_memory)?;
    Ok((pool, Config { fixed: Switch::Off, ..config.clone() }))
}

/// Reads all blocks. `deliver` gets each good block's number with its memory, to copy the bytes from
/// there or to have GPUs do so.
fn read_blocks(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
    memory: Memory,
    deliver: impl Fn(usize, &mut StagedCopy) + Sync,
    damages: Option<&Mutex<Collected>>,
) -> Result<ReadOutcome> {
    let started = Instant::now();
    job.trace_to(config);
    let (files, mut moved) = files::open(runtime, config, reads, job)?;
    let mut seconds =
        LoadSeconds { prepare: started.elapsed().as_secs_f64(), ..Default::default() };
    job.note(What::Prepare, started, None, 0);
    let reading = Instant::now();
    let threads = config.filler_threads().min(reads.blocks.len()).max(1);
    let workers = (threads, config.priority());
    // Twice the queue's depth, so that the queue has the next read at hand while blocks are checked.
    let share = (2 * config.queue_depth as usize).div_ceil(threads).max(2);
    let readers = Readers::new(reads, &files, job, share, memory, deliver, damages);
    job.traced(config, || scoped_workers(workers, || readers.work(), || job.cancel()));
    seconds.read = reading.elapsed().as_secs_f64();
    let (cached_bytes, received_bytes) = readers.report(&mut moved, &mut seconds);
    update(&mut moved, reads.dir, &files.queues());
    seconds.total = started.elapsed().as_secs_f64();
    files.settle(reads.dir)?;
    Ok(ReadOutcome { moved, seconds, cached_bytes, received_bytes })
}
