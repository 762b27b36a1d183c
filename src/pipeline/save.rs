//! Moves a laid-out state into its files.
//!
//! Filler threads take blocks in order: each leases a buffer, gathers the block's pieces into it,
//! checksums them while they are in the cache, and hands the full buffer to the engine's queue. The
//! buffer comes back to the pool when it is written. That is all the flow control there is: a
//! filler that finds no free buffer waits for the disk.
//!
//! Pieces on a GPU are copied by the GPU. The filler begins further blocks meanwhile, as long as
//! buffers are free, and comes back to each when its copies have ended.

use super::climb::{Failed, climb_each, close, update};
use super::crew::work_together;
use super::fill::{Check, Clocks, Filled, Filling, Origin};
use super::job::Job;
use super::report::{Moved, SaveSeconds};
use super::runtime::Runtime;
use super::trace::What;
use crate::device::{Pinning, Source};
use crate::engine::fallback::Fallback;
use crate::engine::ladder::{self, Rung, Stage};
use crate::engine::queue::{Attached, Outcome, Queue, Reply, Request, Syncing};
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result, Room};
use crate::format::Item;
use crate::limits::ALIGN;
use crate::plan::save::{Block, SavePlan};
use crate::pool::{Buffer, Pool};
use crate::sys::file;
use crate::sys::file::Preallocated;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

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
        let moved = Moved {
            engine: "none".into(),
            direct: false,
            fixed_buffers: 0,
            device_bytes: 0,
            pinned: None,
            fallbacks: Vec::new(),
        };
        Self { crc32: Vec::new(), moved, seconds: SaveSeconds::default() }
    }
}

/// Writes every shard of `plan` to its file, one of `paths` in the same order, and makes the data
/// durable. The files are there and the caller's own: new ones, or old ones that are to be written over. `dir` is
/// the checkpoint's, for messages. Once all bytes have left their tensors,
/// `check` has to pass.
///
/// # Errors
/// The first failure, by file and offset. Files are left for the caller to remove.
pub(crate) fn write(
    runtime: &Runtime,
    plan: &SavePlan,
    (items, sources, check): (&[Item], &[Box<dyn Source + '_>], Option<Check<'_>>),
    (dir, paths): (&Path, &[PathBuf]),
    job: &Arc<Job>,
) -> Result<Written> {
    let started = Instant::now();
    let mut seconds = SaveSeconds::default();
    let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", dir, e))?;
    let (shards, mut moved) = open_shards(runtime, &pool, plan, paths)?;
    moved.note(dir, Pinning::for_sources(&pool, sources));
    seconds.prepare = started.elapsed().as_secs_f64();
    job.note(What::Prepare, started, None, 0);

    let origin = Origin {
        plan,
        items,
        sources,
        check,
        checksum_bytes: runtime.config().checksum_bytes() as usize,
        clocks: Clocks::default(),
        device_bytes: AtomicU64::new(0),
    };
    let stream = Stream::new(&origin, &pool, &shards, runtime.config().filler_threads(), job);
    let filling = Instant::now();
    stream.fill();
    seconds.stage = stream.staged_at.get().map_or(0.0, |at| (*at - filling).as_secs_f64());
    stream.in_flight.settle()?;
    if job.stopped() {
        return Err(Error::Cancelled { path: dir.into() });
    }
    seconds.write = filling.elapsed().as_secs_f64();

    let syncing = Instant::now();
    shards.make_durable(plan)?;
    seconds.sync = syncing.elapsed().as_secs_f64();
    job.note(What::Sync, syncing, None, 0);
    origin.clocks.report(&mut seconds);
    update(&mut moved, dir, shards.files.iter().map(|open| &open.queue));
    moved.device_bytes = origin.device_bytes.load(Relaxed);
    Ok(Written { crc32: stream.checksums(), moved, seconds })
}

/// The open files of a save.
struct Shards {
    files: Vec<OpenShard>,
}

struct OpenShard {
    path: PathBuf,
    file: Arc<File>,
    attached: Attached,
    /// What serves it: directories on unlike file systems may have queues of their own.
    queue: Arc<Queue>,
}

/// Opens and preallocates all files, those of each directory on the first rung of the ladder that
/// passes its trial there.
fn open_shards(
    runtime: &Runtime,
    pool: &Pool,
    plan: &SavePlan,
    paths: &[PathBuf],
) -> Result<(Shards, Moved)> {
    let by_path: Vec<Option<&Path>> = paths.iter().map(|path| Some(path.as_path())).collect();
    let (files, moved) =
        climb_each(runtime, runtime.config(), &by_path, |numbers, queue, rung| {
            let files: Vec<(&PathBuf, u64)> =
                numbers.iter().map(|&n| (&paths[n], plan.shards[n].bytes)).collect();
            open_on(queue, rung, pool, &files)
        })?;
    Ok((Shards { files: files.into_iter().flatten().collect() }, moved))
}

/// Opens files of one directory, each of so many bytes.
fn open_on(
    queue: &Arc<Queue>,
    rung: &Rung,
    pool: &Pool,
    paths: &[(&PathBuf, u64)],
) -> std::result::Result<(Vec<OpenShard>, Vec<Fallback>), Failed> {
    let (mut files, mut notes) = (Vec::with_capacity(paths.len()), Vec::new());
    for &(path, bytes) in paths {
        let failed = |stage, doing| {
            let path = path.clone();
            move |error| Failed { stage, doing, path, error, room: None }
        };
        // Not emptied: an old file is to be written over, every byte of it.
        let file = file::open_write(path, rung.direct).map_err(failed(Stage::Open, "opening"))?;
        let file = Arc::new(file);
        // At once: a child that is forked before would keep it open.
        let attached =
            queue.attach(file.clone()).map_err(failed(Stage::Open, "attaching to the engine"))?;
        let padded = bytes.next_multiple_of(ALIGN as u64);
        let preallocated = file::preallocate(&file, padded).map_err(|error| {
            let room = too_little_room(&error, paths, &files, &file);
            Failed { room, ..failed(Stage::Open, "preallocating")(error) }
        })?;
        if preallocated == Preallocated::SizeOnly && notes.is_empty() {
            notes.push(no_preallocation());
        }
        if files.is_empty() {
            let buffer = pool.lease().map_err(failed(Stage::Open, "taking staging memory for"))?;
            let written = ladder::trial_write(queue, &attached, buffer).0;
            written.map_err(failed(Stage::Trial, "writing"))?;
        }
        let (path, queue) = (path.clone(), queue.clone());
        files.push(OpenShard { path, file, attached, queue });
    }
    Ok((files, notes))
}

/// What a directory's files need and what there is for them, if its file system is full: asked while
/// those that are open hold what they got of it.
fn too_little_room(
    error: &io::Error,
    paths: &[(&PathBuf, u64)],
    open: &[OpenShard],
    last: &File,
) -> Option<Room> {
    if error.kind() != io::ErrorKind::StorageFull {
        return None;
    }
    let needed = paths.iter().map(|(_, bytes)| bytes.next_multiple_of(ALIGN as u64)).sum();
    let files = open.iter().map(|open| &*open.file).chain([last]);
    let held: u64 = files.map(|file| file::allocated(file).unwrap_or_default()).sum();
    let free = file::free(last).ok()?.saturating_add(held);
    // Else there was too little for something besides: the file system's own, or other writers.
    (free < needed).then_some(Room { needed, free })
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

impl Drop for Shards {
    fn drop(&mut self) {
        close(&mut self.files, |open| Some(&open.queue));
    }
}

impl Shards {
    /// Cuts the padding off every file, then syncs them all at once: they may be on several disks.
    fn make_durable(&self, plan: &SavePlan) -> Result<()> {
        for (open, shard) in self.files.iter().zip(&plan.shards) {
            file::finish(&open.file, shard.bytes)
                .map_err(|e| Error::io("cutting to length", &open.path, e))?;
        }
        let begin = |open: &OpenShard| open.queue.start_sync(&open.attached);
        let syncing: Vec<Syncing> = self.files.iter().map(begin).collect();
        // Each is waited for, also after a failure: nothing is under way when the files are closed.
        let mut outcome = Ok(());
        for (open, sync) in self.files.iter().zip(syncing) {
            outcome = outcome.and(sync.wait().map_err(|e| Error::io("syncing", &open.path, e)));
        }
        outcome
    }
}

/// A save in motion.
struct Stream<'a> {
    origin: &'a Origin<'a>,
    pool: &'a Pool,
    shards: &'a Shards,
    job: &'a Arc<Job>,
    fillers: usize,
    /// The next block to fill.
    next: AtomicUsize,
    /// Blocks of which not all bytes have left their tensors.
    unstaged: AtomicUsize,
    staged_at: OnceLock<Instant>,
    /// Checksums of each block of the plan.
    crc32: Vec<Mutex<Vec<u32>>>,
    in_flight: Arc<InFlight>,
}

/// What one filler has in hand.
#[derive(Default)]
struct Hand<'a> {
    /// The number of a block that there was no buffer for.
    claimed: Option<usize>,
    /// Blocks whose bytes are on their way.
    begun: VecDeque<(usize, Filling<'a>)>,
}

impl Hand<'_> {
    fn is_empty(&self) -> bool {
        self.claimed.is_none() && self.begun.is_empty()
    }
}

impl<'a> Stream<'a> {
    fn new(
        origin: &'a Origin<'a>,
        pool: &'a Pool,
        shards: &'a Shards,
        fillers: usize,
        job: &'a Arc<Job>,
    ) -> Self {
        let blocks = &origin.plan.blocks;
        Self {
            origin,
            pool,
            shards,
            job,
            fillers: fillers.min(blocks.len()).max(1),
            next: AtomicUsize::new(0),
            unstaged: AtomicUsize::new(blocks.len()),
            staged_at: OnceLock::new(),
            crc32: blocks.iter().map(|_| Mutex::default()).collect(),
            in_flight: Arc::default(),
        }
    }

    /// Fills all blocks.
    fn fill(&self) {
        work_together(self.fillers, || self.fill_blocks(), || self.job.cancel());
    }

    /// One filler: blocks are begun in order, and finished in the order in which they were begun.
    fn fill_blocks(&self) {
        let mut hand = Hand::default();
        while !self.job.stopped() && (self.has_next() || !hand.is_empty()) {
            if let Err(error) = self.fill_next(&mut hand) {
                self.in_flight.fail(error);
                self.job.cancel();
            }
        }
    }

    /// Finishes the block that was begun first if its bytes are there; else begins one more, if
    /// there is one and a buffer for it; else waits for the first.
    fn fill_next(&self, hand: &mut Hand<'a>) -> Result<()> {
        let is_there = match hand.begun.front_mut() {
            Some((_, first)) => first.has_landed()?,
            None => false,
        };
        // No more than its share of the pool: others take checksums meanwhile.
        let may_begin = !is_there && hand.begun.len() <= self.pool.count() / self.fillers;
        if may_begin && let Some((number, buffer)) = self.lease(hand)? {
            hand.begun.push_back(self.begin(number, buffer)?);
            return Ok(());
        }
        match hand.begun.pop_front() {
            Some((number, first)) => self.finish(number, first),
            None => Ok(()),
        }
    }

    fn begin(&self, number: usize, buffer: Buffer) -> Result<(usize, Filling<'a>)> {
        let (block, beginning) = (&self.origin.plan.blocks[number], Instant::now());
        let filling = Filling::begin(self.origin, block, buffer)?;
        self.job.note(What::Fill, beginning, Some(number), block.len as u64);
        Ok((number, filling))
    }

    fn has_next(&self) -> bool {
        self.next.load(Relaxed) < self.origin.plan.blocks.len()
    }

    /// The next block's number, and a buffer for it. The number comes first: a buffer without a block would be
    /// memory that nobody needs. Only a filler that has begun none waits for a buffer: others have blocks
    /// to finish, which frees some.
    fn lease(&self, hand: &mut Hand) -> Result<Option<(usize, Buffer)>> {
        let next = || {
            let number = self.has_next().then(|| self.next.fetch_add(1, Relaxed))?;
            (number < self.origin.plan.blocks.len()).then_some(number)
        };
        let Some(number) = hand.claimed.take().or_else(next) else { return Ok(None) };
        let buffer = match self.pool.try_lease() {
            None if hand.begun.is_empty() => Some(self.wait_for_buffer(number)?),
            leased => leased,
        };
        if buffer.is_none() {
            hand.claimed = Some(number);
        }
        Ok(buffer.map(|buffer| (number, buffer)))
    }

    fn wait_for_buffer(&self, number: usize) -> Result<Buffer> {
        let waiting = Instant::now();
        let buffer = self.pool.lease().map_err(|error| {
            let shard = self.origin.plan.blocks[number].shard;
            Error::io("taking staging memory for", &self.shards.files[shard].path, error)
        });
        self.origin.clocks.wait.add(waiting);
        self.job.note(What::Wait, waiting, None, 0);
        buffer
    }

    /// Waits for a block's bytes, and hands them on.
    fn finish(&self, number: usize, filling: Filling) -> Result<()> {
        let (block, copying) = (&self.origin.plan.blocks[number], filling.copying_since());
        let mut landed = Instant::now();
        let staged = |block: &Block| {
            landed = Instant::now();
            self.staged(block)
        };
        let Filled { buffer, checksums } = filling.land(staged)?;
        if let Some(began) = copying {
            let bytes = block.len as u64;
            self.job.note_span(What::Device, (began, landed), Some(number), bytes);
            self.job.note(What::Checksum, landed, Some(number), bytes);
        }
        *self.crc32[number].lock().expect("no panic while it is held") = checksums;
        self.write_block(number, block, buffer);
        Ok(())
    }

    /// Notes that all bytes of a block have left their tensors.
    ///
    /// # Errors
    /// Those of the check, which follows the last block: it is not written, so nothing is committed.
    fn staged(&self, block: &Block) -> Result<()> {
        self.job.add_staged(block.len as u64);
        if self.unstaged.fetch_sub(1, AcqRel) == 1 && !self.job.stopped() {
            self.origin.check.map_or(Ok(()), |check| check())?;
            let _ = self.staged_at.set(Instant::now());
            self.job.set_staged();
        }
        Ok(())
    }

    /// Hands a full buffer to the engine.
    fn write_block(&self, number: usize, block: &Block, buffer: Buffer) {
        let shard = &self.shards.files[block.shard];
        let len = block.len.next_multiple_of(ALIGN);
        let (job, in_flight) = (self.job.clone(), self.in_flight.clone());
        let (path, offset, bytes) = (shard.path.clone(), block.offset, block.len as u64);
        in_flight.start();
        let queued = Instant::now();
        let reply = Reply::new(move |outcome: Outcome| {
            job.note_transfer(What::Write, (queued, outcome.started), number, bytes);
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
        shard.queue.submit(Request {
            file: shard.attached.id(),
            action: Action::Write(Transfer { offset: block.offset, buffer, start: 0, len }),
            needed: len,
            abort: Some(self.job.stop_flag()),
            reply,
        });
    }

    /// Checksums by shard.
    fn checksums(&self) -> Vec<Vec<u32>> {
        let plan = self.origin.plan;
        let mut by_shard = vec![Vec::new(); plan.shards.len()];
        for (block, crc32) in plan.blocks.iter().zip(&self.crc32) {
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
