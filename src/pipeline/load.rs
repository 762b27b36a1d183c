//! Moves blocks of files back into memory, each checked against its checksum before anyone sees it.
//!
//! Worker threads keep a few reads each in flight. Where a block goes is the caller's: straight into
//! the memory that the tensors will live in ([`read_arenas`]), or through the staging pool into
//! memory that is there already ([`read_into`]), or nowhere ([`check`]).

use super::climb::{Failed, by_directory, climb_each, close, update};
use super::crew::work_together;
use super::fill::Clock;
use super::job::Job;
use super::report::{Damage, LoadSeconds, Moved};
use super::runtime::Runtime;
use super::trace::What;
use crate::config::{Config, Switch};
use crate::device::{Landed, Pinning, Runs, Target, Transit};
use crate::engine::ladder::{self, Rung, Stage};
use crate::engine::queue::{Attached, Outcome, Queue, Reply, Request};
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result};
use crate::limits::ALIGN;
use crate::plan::load::{BlockRead, Scattered};
use crate::plan::slab::{Rows, Slab};
use crate::pool::{Buffer, Mapping, Pool, Whole};
use crate::sys::file;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A shard to read from.
#[derive(Debug, Clone)]
pub(crate) struct ShardFile {
    /// Where it was found.
    pub path: PathBuf,
    /// Its other name: a save that commits gives shards their final ones after the commit.
    pub other_path: PathBuf,
    /// Its length, which the file on disk has.
    pub bytes: u64,
    /// Checksum of each block; none at all in files that are not ringstow's.
    pub crc32: Vec<u32>,
}

/// Whose files are read: who knows whether they still are.
pub(crate) trait Origin: Sync + std::fmt::Debug {
    /// Called when all files that are read have been opened (`true`), or one could not be: checks that they
    /// are the ones that the blocks were planned for. What this fails with, the load does.
    fn check_same(&self, all_open: bool) -> Result<()>;
}

/// What to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reads<'a> {
    /// The checkpoint's directory, for messages.
    pub dir: &'a Path,
    /// The shards.
    pub files: &'a [ShardFile],
    /// The blocks, sorted.
    pub blocks: &'a [BlockRead],
    /// Bytes of a checksummed block, of which a read may hold several.
    pub block_bytes: u64,
    /// Whether to check each against its checksum.
    pub verify: bool,
    /// Whose files these are.
    pub origin: &'a dyn Origin,
}

impl<'a> Reads<'a> {
    /// The blocks of each file, in order; none for files of which nothing is read.
    fn by_file(self) -> impl Iterator<Item = &'a [BlockRead]> {
        let mut rest = self.blocks;
        (0..self.files.len()).map(move |file| {
            let (blocks, others) = rest.split_at(rest.partition_point(|b| b.file <= file));
            rest = others;
            blocks
        })
    }
}

/// What reading took.
#[derive(Debug)]
pub(crate) struct Read {
    pub moved: Moved,
    pub seconds: LoadSeconds,
}

/// Reads blocks straight into fresh memory: one mapping a file, in which its blocks lie back to
/// back, each at a multiple of 4096. Files of which nothing is read get an empty one.
///
/// # Errors
/// The first failure or damaged block.
pub(crate) fn read_arenas(
    runtime: &Runtime,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(Vec<Mapping>, Read)> {
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
    let read = match runtime.config().fixed {
        Switch::On => read_through(runtime, reads, &buffers, job)?,
        _ => {
            // Staging is not involved, so neither are fixed buffers.
            let config = Config { fixed: Switch::Off, ..runtime.config().clone() };
            let memory = Memory::Arena(&buffers);
            read_blocks(runtime, &config, reads, job, memory, |_, _| {}, Damages::Stop)?
        }
    };
    drop(buffers);
    Ok((arenas.into_iter().map(Whole::rejoin).collect(), read))
}

/// Reads blocks through fixed buffers, which were asked for by name, into places of their own.
fn read_through(
    runtime: &Runtime,
    reads: Reads,
    places: &[Mutex<Option<Buffer>>],
    job: &Arc<Job>,
) -> Result<Read> {
    let (pool, config) = staging(runtime, reads)?;
    let deliver = |number: usize, transit: &mut Transit| {
        let mut place = places[number].lock().expect("no panic while it is held");
        if let Some(place) = place.as_mut() {
            place.prefault();
            let len = reads.blocks[number].len;
            place[..len].copy_from_slice(transit.bytes(0..len));
        }
    };
    read_blocks(runtime, &config, reads, job, Memory::Pool(&pool), deliver, Damages::Stop)
}

/// Where boxes of the files go.
#[derive(Clone, Copy)]
pub(crate) struct Scatter<'a> {
    /// The boxes.
    pub slabs: &'a [Slab],
    /// The memory of each, which has room for it and shares no byte with another's.
    pub targets: &'a [&'a Target<'a>],
    /// Which of them each of [`Reads::blocks`] has something for.
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
) -> Result<Read> {
    let started = Instant::now();
    let (pool, config) = staging(runtime, reads)?;
    let staged = started.elapsed().as_secs_f64();
    let pinning = Pinning::for_targets(&pool, to.targets);
    let deliver =
        |number: usize, transit: &mut Transit| {
            let block = &reads.blocks[number];
            let span = block.offset..block.offset + block.len as u64;
            for slab in to.plan.slabs_of(number) {
                to.slabs[slab].rows(
                    &span,
                    &mut |Rows { from, from_step, to: at, to_step, len, count }| {
                        let runs = Runs { from, from_step, to: at, to_step, len, count };
                        transit.deliver(to.targets[slab], block.len, runs);
                    },
                );
            }
        };
    let memory = Memory::Pool(&pool);
    let mut read = read_blocks(runtime, &config, reads, job, memory, deliver, Damages::Stop)?;
    read.moved.note(reads.dir, pinning);
    read.seconds.prepare += staged;
    read.seconds.total += staged;
    Ok(read)
}

/// Reads blocks through the staging pool, and returns those that are damaged.
///
/// # Errors
/// The first failure to read; damage is no failure here.
pub(crate) fn check(
    runtime: &Runtime,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(Vec<Damage>, Read)> {
    let (pool, config) = staging(runtime, reads)?;
    let found = Mutex::new(Vec::new());
    let (memory, damages) = (Memory::Pool(&pool), Damages::Collect(&found));
    let read = read_blocks(runtime, &config, reads, job, memory, |_, _| {}, damages)?;
    let mut damage = found.into_inner().expect("no panic while it was held");
    damage.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
    Ok((damage, read))
}

/// The pool to read through, and the configuration to do it with: the runtime's, unless the
/// checkpoint was written in larger blocks than its buffers. Then a pool for the time of this load,
/// not registered as fixed buffers.
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
    let count = reads.blocks.len().min(config.pool_bytes as usize / len).max(2);
    let pool = Pool::new(count, len).map_err(no_memory)?;
    Ok((pool, Config { fixed: Switch::Off, ..config.clone() }))
}

/// The memory that blocks are read into.
#[derive(Clone, Copy)]
enum Memory<'a> {
    /// A place of its own for each block.
    Arena(&'a [Mutex<Option<Buffer>>]),
    /// Whatever staging buffer is free.
    Pool(&'a Pool),
}

/// What to do about a block that is not what was written.
#[derive(Clone, Copy)]
enum Damages<'a> {
    Stop,
    Collect(&'a Mutex<Vec<Damage>>),
}

/// The common loop; `deliver` gets each good block's number with its memory, to copy it from there
/// or to have GPUs do so.
fn read_blocks(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
    memory: Memory,
    deliver: impl Fn(usize, &mut Transit) + Sync,
    damages: Damages,
) -> Result<Read> {
    let started = Instant::now();
    job.trace_to(config);
    let (opened, mut moved) = open_files(runtime, config, reads)?;
    let mut seconds =
        LoadSeconds { prepare: started.elapsed().as_secs_f64(), ..Default::default() };
    job.note(What::Prepare, started, None, 0);
    let reading = Instant::now();
    let threads = config.filler_threads().min(reads.blocks.len()).max(1);
    let stream = Stream {
        reads,
        opened: &opened,
        job,
        next: AtomicUsize::new(0),
        turns: turns(reads),
        // Twice the queue's depth, so that it has the next read at hand while blocks are checked.
        share: (2 * config.queue_depth as usize).div_ceil(threads).max(2),
        memory,
        deliver,
        damages,
        failure: Mutex::new(None),
        checksum: Clock::default(),
        device: Clock::default(),
        device_bytes: AtomicU64::new(0),
    };
    job.traced(|| work_together(threads, || stream.work(), || job.cancel()));
    seconds.read = reading.elapsed().as_secs_f64();
    seconds.checksum_cpu = stream.checksum.seconds();
    seconds.device_copy = stream.device.seconds();
    moved.device_bytes = stream.device_bytes.load(Relaxed);
    update(&mut moved, reads.dir, opened.files.iter().flatten().map(|(_, queue)| queue));
    seconds.total = started.elapsed().as_secs_f64();
    match stream.failure.into_inner().expect("no panic while it was held") {
        Some(error) => Err(error),
        None if job.stopped() => Err(Error::Cancelled { path: reads.dir.into() }),
        None => Ok(Read { moved, seconds }),
    }
}

/// The open files of a load.
struct Opened {
    /// One a file, with the queue that serves it; `None` for those of which nothing is read.
    files: Vec<Option<(Attached, Arc<Queue>)>>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        close(&mut self.files, |open| open.as_ref().map(|(_, queue)| queue));
    }
}

/// Opens all files that are read, those of each directory on the first rung of the ladder that passes
/// its trial there. From then on nobody takes them away.
fn open_files(runtime: &Runtime, config: &Config, reads: Reads) -> Result<(Opened, Moved)> {
    let paths: Vec<Option<&Path>> = reads
        .files
        .iter()
        .zip(reads.by_file())
        .map(|(shard, blocks)| (!blocks.is_empty()).then_some(shard.path.as_path()))
        .collect();
    file::make_room_for(paths.iter().flatten().count());
    let opened = climb_each(runtime, config, &paths, |numbers, queue, rung| {
        let shards = numbers.iter().map(|&number| &reads.files[number]);
        Ok((open_on(queue, rung, shards)?, Vec::new()))
    })
    .map(|(files, moved)| (Opened { files }, moved));
    if !reads.blocks.is_empty() {
        reads.origin.check_same(opened.is_ok())?;
    }
    opened
}

/// The blocks' numbers such that the directories they lie in take turns: these may be disks, each of
/// which is to be busy from beginning to end. `None` if there is one directory.
fn turns(reads: Reads) -> Option<Vec<usize>> {
    let paths: Vec<Option<&Path>> = reads.files.iter().map(|f| Some(f.path.as_path())).collect();
    let dirs = by_directory(&paths);
    if dirs.len() < 2 {
        return None;
    }
    let mut dir_of = vec![0; paths.len()];
    for (dir, (_, files)) in dirs.iter().enumerate() {
        files.iter().for_each(|&file| dir_of[file] = dir);
    }
    let mut taken = vec![0; dirs.len()];
    let turn = |(number, block): (usize, &BlockRead)| {
        let dir = dir_of[block.file];
        taken[dir] += 1;
        (taken[dir], number)
    };
    let mut turns: Vec<(usize, usize)> = reads.blocks.iter().enumerate().map(turn).collect();
    turns.sort_unstable();
    Some(turns.into_iter().map(|(_, number)| number).collect())
}

/// Opens files of one directory.
fn open_on<'a>(
    queue: &Arc<Queue>,
    rung: &Rung,
    shards: impl Iterator<Item = &'a ShardFile>,
) -> std::result::Result<Vec<(Attached, Arc<Queue>)>, Failed> {
    let mut files = Vec::new();
    for shard in shards {
        let failed = |stage, doing| {
            move |error| Failed { stage, doing, path: shard.path.clone(), error, room: None }
        };
        let file = open_shard(shard, rung.direct).map_err(failed(Stage::Open, "opening"))?;
        let attached =
            queue.attach(Arc::new(file)).map_err(failed(Stage::Open, "attaching to the engine"))?;
        if files.is_empty() {
            trial(queue, &attached).map_err(failed(Stage::Trial, "reading"))?;
        }
        files.push((attached, queue.clone()));
    }
    Ok(files)
}

/// Opens a shard under the name that it has now.
fn open_shard(shard: &ShardFile, direct: bool) -> io::Result<File> {
    // Thrice, since it may be renamed between two looks; it is renamed once.
    let mut opened = file::open_read(&shard.path, direct);
    for path in [&shard.other_path, &shard.path] {
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                opened = file::open_read(path, direct);
            }
            _ => break,
        }
    }
    opened
}

/// A trial read needs no more memory than a page: the pool may never be wanted.
fn trial(queue: &Queue, file: &Attached) -> io::Result<()> {
    ladder::trial_read(queue, file, Buffer::alone(ALIGN)?).0
}

/// A load in motion.
struct Stream<'a, Deliver> {
    reads: Reads<'a>,
    opened: &'a Opened,
    job: &'a Arc<Job>,
    /// The next block to read, or the turn that it has.
    next: AtomicUsize,
    turns: Option<Vec<usize>>,
    /// Reads that one worker keeps in flight.
    share: usize,
    memory: Memory<'a>,
    deliver: Deliver,
    damages: Damages<'a>,
    failure: Mutex<Option<Error>>,
    checksum: Clock,
    /// Of GPUs.
    device: Clock,
    /// Bytes that GPUs copied.
    device_bytes: AtomicU64,
}

type Done = (usize, Outcome);

/// What one worker has in hand.
#[derive(Default)]
struct Hand {
    /// The number of a block that there was no buffer for.
    claimed: Option<usize>,
    /// Reads that have not come back.
    in_flight: usize,
    /// Blocks that GPUs are copying from.
    leaving: VecDeque<Transit>,
}

impl Hand {
    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.leaving.is_empty()
    }
}

impl<Deliver: Fn(usize, &mut Transit)> Stream<'_, Deliver> {
    /// One worker: keeps its share of reads in flight, and checks what comes back. Leaves only when
    /// all of its reads have come back, so that no file is closed under one, and all copies of GPUs
    /// have ended.
    fn work(&self) {
        let (send, receive): (Sender<Done>, Receiver<Done>) = unbounded();
        let mut hand = Hand::default();
        loop {
            self.note(self.land(&mut hand.leaving, false));
            while hand.in_flight < self.share && self.started_next(&send, &mut hand) {
                hand.in_flight += 1;
            }
            if hand.in_flight > 0 {
                let (number, outcome) = receive.recv().expect("`send` is alive");
                hand.in_flight -= 1;
                self.note(self.finish(number, outcome).map(|transit| hand.leaving.extend(transit)));
            } else if !hand.leaving.is_empty() {
                self.note(self.land(&mut hand.leaving, true));
            } else if hand.claimed.is_none() || self.job.stopped() {
                return;
            }
        }
    }

    fn started_next(&self, send: &Sender<Done>, hand: &mut Hand) -> bool {
        let started = self.start_next(send, hand);
        let is_started = matches!(started, Ok(true));
        self.note(started.map(drop));
        is_started
    }

    /// Keeps the first failure, which ends the load.
    fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failure.lock().expect("no panic while it is held").get_or_insert(error);
            self.job.cancel();
        }
    }

    /// Takes back the buffers that GPUs have copied everything from; waits for the first, if asked to.
    fn land(&self, leaving: &mut VecDeque<Transit>, wait: bool) -> Result<()> {
        let mut wait = wait;
        while let Some(first) = leaving.front_mut()
            && (std::mem::take(&mut wait) || first.has_landed()?)
        {
            let Some(first) = leaving.pop_front() else { break };
            let Landed { device_bytes, device_seconds, .. } = first.land()?;
            self.device.add_seconds(device_seconds);
            self.device_bytes.fetch_add(device_bytes, Relaxed);
        }
        Ok(())
    }

    /// Starts one more read; false if there is none left, or no memory for it now.
    ///
    /// # Errors
    /// When there will never be memory for it.
    fn start_next(&self, send: &Sender<Done>, hand: &mut Hand) -> Result<bool> {
        if self.job.stopped() {
            return Ok(false);
        }
        // The block comes first: a buffer without one would be memory that nobody needs.
        let Some(number) = hand.claimed.take().or_else(|| self.claim()) else { return Ok(false) };
        let block = &self.reads.blocks[number];
        let leased = match self.memory {
            Memory::Arena(_) => match self.arena_buffer(number) {
                None => return Ok(false),
                place => place,
            },
            // Only a worker with nothing in flight waits: others have blocks to check, which frees
            // buffers.
            Memory::Pool(pool) if hand.is_idle() => Some(pool.lease().map_err(|error| {
                Error::io("taking staging memory for", &self.reads.files[block.file].path, error)
            })?),
            Memory::Pool(pool) => pool.try_lease(),
        };
        let Some(buffer) = leased else {
            hand.claimed = Some(number);
            return Ok(false);
        };
        let Some((file, queue)) = &self.opened.files[block.file] else { return Ok(false) };
        let len = block.len.next_multiple_of(ALIGN).min(buffer.len());
        let (send, job, bytes) = (send.clone(), self.job.clone(), block.len as u64);
        let queued = Instant::now();
        queue.submit(Request {
            file: file.id(),
            action: Action::Read(Transfer { offset: block.offset, buffer, start: 0, len }),
            needed: block.len,
            abort: Some(self.job.stop_flag()),
            reply: Reply::new(move |outcome: Outcome| {
                job.note_transfer(What::Read, (queued, outcome.started), number, bytes);
                let _ = send.send((number, outcome));
            }),
        });
        Ok(true)
    }

    /// The number of the next block in turn.
    fn claim(&self) -> Option<usize> {
        let turn = self.next.fetch_add(1, Relaxed);
        let number = self.turns.as_ref().and_then(|turns| turns.get(turn).copied()).unwrap_or(turn);
        (number < self.reads.blocks.len()).then_some(number)
    }

    /// The place of a block in its arena.
    fn arena_buffer(&self, number: usize) -> Option<Buffer> {
        let Memory::Arena(places) = self.memory else { return None };
        let mut buffer = places[number].lock().expect("no panic while it is held").take()?;
        // Page faults here, on this thread, instead of inside of the engine's submission.
        buffer.prefault();
        Some(buffer)
    }

    /// Checks a block that was read, and hands it out; what GPUs copy of it is still on its way.
    fn finish(&self, number: usize, outcome: Outcome) -> Result<Option<Transit>> {
        let block = &self.reads.blocks[number];
        if self.job.stopped() {
            return Ok(None); // failed elsewhere, or cancelled: nothing is handed out any more
        }
        outcome.result.map_err(|error| self.read_failed(block, error))?;
        let buffer = outcome.buffer.expect("a read gives its buffer back");
        if self.reads.verify && !self.check(number, &buffer[..block.len])? {
            return Ok(None);
        }
        self.job.add_written(block.len as u64);
        let (mut transit, delivering) = (Transit::new(buffer), Instant::now());
        (self.deliver)(number, &mut transit);
        transit.start()?;
        self.job.note(What::Deliver, delivering, Some(number), block.len as u64);
        Ok(transit.is_airborne().then_some(transit))
    }

    /// Compares every block of a read with its checksum; tells whether all are good.
    fn check(&self, read_number: usize, bytes: &[u8]) -> Result<bool> {
        let (read, hashing) = (&self.reads.blocks[read_number], Instant::now());
        let shard = &self.reads.files[read.file];
        let block_bytes = self.reads.block_bytes as usize;
        let mut good = true;
        for (bytes, number) in bytes.chunks(block_bytes).zip(read.block..) {
            let crc32 = crc32fast::hash(bytes);
            if crc32 != shard.crc32[number] {
                good = false;
                let offset = (number * block_bytes) as u64;
                self.damaged(Damage {
                    file: shard.path.clone(),
                    offset,
                    what: format!("crc32 of block {number} ({} bytes)", bytes.len()),
                    expected: format!("{:08x}", shard.crc32[number]),
                    got: format!("{crc32:08x}"),
                })?;
            }
        }
        self.checksum.add(hashing);
        self.job.note(What::Checksum, hashing, Some(read_number), read.len as u64);
        Ok(good)
    }

    fn damaged(&self, damage: Damage) -> Result<()> {
        match self.damages {
            Damages::Stop => Err(damage.into()),
            Damages::Collect(found) => {
                found.lock().expect("no panic while it is held").push(damage);
                Ok(())
            }
        }
    }

    fn read_failed(&self, block: &BlockRead, error: io::Error) -> Error {
        let shard = &self.reads.files[block.file];
        if error.kind() != io::ErrorKind::UnexpectedEof {
            return Error::io_at("reading", &shard.path, block.offset, error);
        }
        Error::Corrupt {
            path: shard.path.clone(),
            offset: block.offset,
            what: "length in bytes".into(),
            expected: shard.bytes.to_string(),
            got: "less: the file was cut while it was read".into(),
        }
    }
}
