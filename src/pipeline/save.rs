//! Moves a laid-out state into its files.
//!
//! Filler threads take blocks in order: each leases a buffer, gathers the block's pieces into it,
//! checksums them while they are in the cache, and hands the full buffer to the engine's queue. The
//! buffer comes back to the pool when it is written. That is all the flow control there is: a
//! filler that finds no free buffer waits for the disk.

use super::climb::{Failed, climb};
use super::job::Job;
use super::report::{Moved, SaveSeconds};
use super::runtime::Runtime;
use crate::config::ALIGN;
use crate::device::Source;
use crate::engine::file::{self, Preallocated};
use crate::engine::ladder::{self, Fallback, Rung, Stage};
use crate::engine::queue::{Attached, Outcome, Queue, Reply, Request};
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result};
use crate::format::names;
use crate::plan::save::{Block, From, SavePlan};
use crate::pool::{Buffer, Pool};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Copied and checksummed in runs of this many bytes, so that the checksum finds them in the L2.
const RUN_BYTES: usize = 256 << 10;

/// The outcome of [`write()`]: files that are durable under their uncommitted names.
#[derive(Debug)]
pub(crate) struct Written {
    /// Checksums of each shard, one every [`Config::checksum_bytes`](crate::Config::checksum_bytes).
    pub crc32: Vec<Vec<u32>>,
    pub moved: Moved,
    pub seconds: SaveSeconds,
}

impl Written {
    /// The outcome for a rank that has nothing to write: no engine was needed.
    pub fn nothing() -> Self {
        let moved =
            Moved { engine: "none".into(), direct: false, fixed_buffers: 0, fallbacks: Vec::new() };
        Self { crc32: Vec::new(), moved, seconds: SaveSeconds::default() }
    }
}

/// Writes every shard of `plan` into `dir`, under uncommitted names, and makes the data durable.
///
/// # Errors
/// The first failure, by file and offset. Files are left for the caller to remove.
pub(crate) fn write(
    runtime: &Runtime,
    plan: &SavePlan,
    sources: &[Box<dyn Source + '_>],
    dir: &Path,
    job: &Arc<Job>,
) -> Result<Written> {
    let started = Instant::now();
    let mut seconds = SaveSeconds::default();
    let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", dir, e))?;
    let (shards, moved) = open_shards(runtime, &pool, plan, dir)?;
    seconds.prepare = started.elapsed().as_secs_f64();

    let checksum_bytes = runtime.config().checksum_bytes();
    let stream = Stream::new(plan, sources, &pool, &shards, checksum_bytes, job);
    let filling = Instant::now();
    stream.fill(runtime.config().filler_threads());
    seconds.stage = filling.elapsed().as_secs_f64();
    if !job.stopped() {
        job.set_staged();
    }
    stream.in_flight.settle()?;
    if job.stopped() {
        return Err(Error::Cancelled { path: dir.into() });
    }
    seconds.write = filling.elapsed().as_secs_f64();

    let syncing = Instant::now();
    shards.make_durable(plan)?;
    seconds.sync = syncing.elapsed().as_secs_f64();
    stream.clocks.report(&mut seconds);
    Ok(Written { crc32: stream.checksums(), moved, seconds })
}

/// The open files of a save and the queue that serves them.
struct Shards {
    queue: Arc<Queue>,
    files: Vec<OpenShard>,
}

struct OpenShard {
    path: PathBuf,
    file: Arc<File>,
    attached: Attached,
}

/// Opens and preallocates all files on the first rung of the ladder that passes its trial.
fn open_shards(
    runtime: &Runtime,
    pool: &Pool,
    plan: &SavePlan,
    dir: &Path,
) -> Result<(Shards, Moved)> {
    let (files, queue, moved) =
        climb(runtime, runtime.config(), |queue, rung| open_on(queue, rung, pool, plan, dir))?;
    Ok((Shards { queue, files }, moved))
}

fn open_on(
    queue: &Queue,
    rung: &Rung,
    pool: &Pool,
    plan: &SavePlan,
    dir: &Path,
) -> std::result::Result<(Vec<OpenShard>, Vec<Fallback>), Failed> {
    let (mut files, mut notes) = (Vec::with_capacity(plan.shards.len()), Vec::new());
    for shard in &plan.shards {
        let path = dir.join(names::part(&shard.name));
        let failed = |stage, doing| {
            let path = path.clone();
            move |error| Failed { stage, doing, path, error }
        };
        let file = file::create(&path, rung.direct).map_err(failed(Stage::Open, "creating"))?;
        let padded = shard.bytes.next_multiple_of(ALIGN as u64);
        let preallocated =
            file::preallocate(&file, padded).map_err(failed(Stage::Open, "preallocating"))?;
        if preallocated == Preallocated::SizeOnly && notes.is_empty() {
            notes.push(no_preallocation());
        }
        let file = Arc::new(file);
        let attached =
            queue.attach(file.clone()).map_err(failed(Stage::Open, "attaching to the engine"))?;
        if files.is_empty() {
            ladder::trial_write(queue, &attached, pool.lease())
                .0
                .map_err(failed(Stage::Trial, "writing"))?;
        }
        files.push(OpenShard { path, file, attached });
    }
    Ok((files, notes))
}

fn no_preallocation() -> Fallback {
    Fallback {
        wanted: "preallocated files".into(),
        got: "files that grow as they are written".into(),
        reason: "the file system has no fallocate".into(),
        remedy: "none needed; a disk that fills up is noticed later than it would be on ext4, XFS or btrfs"
            .into(),
    }
}

impl Shards {
    /// Cuts the padding off and syncs every file.
    fn make_durable(&self, plan: &SavePlan) -> Result<()> {
        for (open, shard) in self.files.iter().zip(&plan.shards) {
            file::finish(&open.file, shard.bytes)
                .map_err(|e| Error::io("cutting to length", &open.path, e))?;
            self.queue.sync(&open.attached).map_err(|e| Error::io("syncing", &open.path, e))?;
        }
        Ok(())
    }
}

/// A save in motion.
struct Stream<'a> {
    plan: &'a SavePlan,
    sources: &'a [Box<dyn Source + 'a>],
    pool: &'a Pool,
    shards: &'a Shards,
    job: &'a Arc<Job>,
    /// The next block to fill.
    next: AtomicUsize,
    /// Bytes that one checksum covers.
    checksum_bytes: usize,
    /// Checksums of each block of the plan.
    crc32: Vec<Mutex<Vec<u32>>>,
    in_flight: Arc<InFlight>,
    clocks: Clocks,
}

impl<'a> Stream<'a> {
    fn new(
        plan: &'a SavePlan,
        sources: &'a [Box<dyn Source + 'a>],
        pool: &'a Pool,
        shards: &'a Shards,
        checksum_bytes: u64,
        job: &'a Arc<Job>,
    ) -> Self {
        let checksum_bytes = checksum_bytes as usize;
        Self {
            plan,
            sources,
            pool,
            shards,
            job,
            next: AtomicUsize::new(0),
            checksum_bytes,
            crc32: plan.blocks.iter().map(|_| Mutex::default()).collect(),
            in_flight: Arc::default(),
            clocks: Clocks::default(),
        }
    }

    /// Fills all blocks, on `threads` threads.
    fn fill(&self, threads: usize) {
        std::thread::scope(|scope| {
            for _ in 1..threads.min(self.plan.blocks.len()) {
                scope.spawn(|| self.fill_blocks());
            }
            self.fill_blocks();
        });
    }

    fn fill_blocks(&self) {
        while !self.job.stopped() {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(block) = self.plan.blocks.get(number) else { break };
            let waiting = Instant::now();
            let mut buffer = self.pool.lease();
            self.clocks.wait.add(waiting);
            match self.fill_block(block, &mut buffer) {
                Ok(crc32) => {
                    *self.crc32[number].lock().expect("no panic while it is held") = crc32;
                }
                Err(error) => {
                    self.in_flight.fail(error);
                    return self.job.cancel();
                }
            }
            self.job.add_staged(block.len as u64);
            self.write_block(block, buffer);
        }
    }

    /// Gathers a block's pieces into `buffer`, pads it, and returns its checksums.
    fn fill_block(&self, block: &Block, buffer: &mut Buffer) -> Result<Vec<u32>> {
        let mut checksums = Vec::with_capacity(block.len.div_ceil(self.checksum_bytes));
        let mut hasher = crc32fast::Hasher::new();
        let (mut filled, mut hashed) = (0, 0);
        for piece in self.plan.pieces(block) {
            let mut offset = piece.range.start;
            while offset < piece.range.end {
                let covered = self.checksum_bytes - filled % self.checksum_bytes;
                let len = (piece.range.end - offset).min(RUN_BYTES).min(covered);
                let copying = Instant::now();
                self.copy(block, piece.from, offset, &mut buffer[filled..filled + len])?;
                self.clocks.copy.add(copying);
                (offset, filled) = (offset + len, filled + len);
                let ends = len == covered || filled == block.len;
                if filled - hashed >= RUN_BYTES || ends {
                    let hashing = Instant::now();
                    hasher.update(&buffer[hashed..filled]);
                    self.clocks.checksum.add(hashing);
                    hashed = filled;
                }
                if ends {
                    checksums.push(std::mem::take(&mut hasher).finalize());
                }
            }
        }
        debug_assert_eq!(hashed, block.len);
        buffer[filled..filled.next_multiple_of(ALIGN)].fill(0);
        Ok(checksums)
    }

    fn copy(&self, block: &Block, from: From, offset: usize, to: &mut [u8]) -> Result<()> {
        match from {
            From::Header => {
                let header = &self.plan.shards[block.shard].header;
                to.copy_from_slice(&header[offset..offset + to.len()]);
                Ok(())
            }
            From::Item(index) => self.sources[index].try_read(offset, to),
        }
    }

    /// Hands a full buffer to the engine.
    fn write_block(&self, block: &Block, buffer: Buffer) {
        let shard = &self.shards.files[block.shard];
        let len = block.len.next_multiple_of(ALIGN);
        let (job, in_flight) = (self.job.clone(), self.in_flight.clone());
        let (path, offset, bytes) = (shard.path.clone(), block.offset, block.len as u64);
        in_flight.start();
        let reply = Reply::new(move |outcome: Outcome| {
            match outcome.result {
                Ok(()) => job.add_written(bytes),
                Err(error) => {
                    // Cancelled transfers of a job that has failed say nothing new.
                    if !job.stopped() {
                        in_flight.fail(Error::io_at("writing", path, offset, error));
                        job.cancel();
                    }
                }
            }
            drop(outcome.buffer);
            in_flight.finish();
        });
        self.shards.queue.submit(Request {
            file: shard.attached.id(),
            action: Action::Write(Transfer { offset: block.offset, buffer, start: 0, len }),
            needed: len,
            abort: Some(self.job.stop_flag()),
            reply,
        });
    }

    /// Checksums by shard.
    fn checksums(&self) -> Vec<Vec<u32>> {
        let mut by_shard = vec![Vec::new(); self.plan.shards.len()];
        for (block, crc32) in self.plan.blocks.iter().zip(&self.crc32) {
            let crc32 = crc32.lock().expect("no panic while it is held");
            by_shard[block.shard].extend_from_slice(&crc32);
        }
        by_shard
    }
}

impl Drop for Stream<'_> {
    /// Files are detached after this, also when a source panicked: nothing may be in flight then.
    fn drop(&mut self) {
        let _ = self.in_flight.settle();
    }
}

/// Writes that have not ended, and the first failure among them.
#[derive(Debug, Default)]
struct InFlight {
    state: Mutex<(usize, Option<Error>)>,
    changed: Condvar,
}

impl InFlight {
    fn start(&self) {
        self.state.lock().expect("no panic while it is held").0 += 1;
    }

    fn fail(&self, error: Error) {
        self.state.lock().expect("no panic while it is held").1.get_or_insert(error);
    }

    fn finish(&self) {
        let mut state = self.state.lock().expect("no panic while it is held");
        state.0 -= 1;
        if state.0 == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits for all, and returns the first failure.
    fn settle(&self) -> Result<()> {
        let state = self.state.lock().expect("no panic while it is held");
        let mut state =
            self.changed.wait_while(state, |s| s.0 > 0).expect("no panic while it is held");
        state.1.take().map_or(Ok(()), Err)
    }
}

/// Time spent, added up over the threads.
#[derive(Debug, Default)]
struct Clocks {
    copy: Clock,
    checksum: Clock,
    wait: Clock,
}

impl Clocks {
    fn report(&self, seconds: &mut SaveSeconds) {
        seconds.copy_cpu = self.copy.seconds();
        seconds.checksum_cpu = self.checksum.seconds();
        seconds.wait = self.wait.seconds();
    }
}

/// Nanoseconds that several threads spent on one thing.
#[derive(Debug, Default)]
pub(super) struct Clock(AtomicU64);

impl Clock {
    pub(super) fn add(&self, since: Instant) {
        self.0.fetch_add(since.elapsed().as_nanos() as u64, Relaxed);
    }

    pub(super) fn seconds(&self) -> f64 {
        self.0.load(Relaxed) as f64 / 1e9
    }
}
