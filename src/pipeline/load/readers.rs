//! The threads that read blocks, check them and deliver them.

use super::arrivals::Ahead;
use super::reads::Reads;
use crate::device::StagedCopy;
use crate::engine::queue::Outcome;
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result, is_bad_medium, tensors_named};
use crate::limits::ALIGN;
use crate::object::{Bucket, is_url, split};
use crate::pipeline::clock::Clocks;
use crate::pipeline::job::Job;
use crate::pipeline::open::by_directory;
use crate::pipeline::report::{Damage, LoadSeconds, Moved};
use crate::pipeline::trace::What;
use crate::pipeline::transfers::OpenFiles;
use crate::plan::load::BlockRead;
use crate::plan::turns::in_turns;
use crate::pool::{Buffer, Pool};
use crate::sys::file;
use crate::sys::page_cache::{self, Held};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The memory that blocks are read into.
#[derive(Clone, Copy)]
pub(super) enum Memory<'a> {
    /// A place of its own for each block.
    Arena(&'a [Mutex<Option<Buffer>>]),
    /// Whatever staging buffer is free. A block that need not be read, and all of which goes to one place, is copied to
    /// that place without one.
    Pool(&'a Pool, Option<&'a InPlace<'a>>),
}

/// Has its second argument fill the one place that a block goes to; false if there is no such place, or if that returns false.
pub(super) type InPlace<'a> = dyn Fn(usize, &mut dyn FnMut(&mut [u8]) -> bool) -> bool + Sync + 'a;

/// What is damaged, while the load goes on.
#[derive(Default)]
pub(super) struct Collected {
    /// Checksum chunks that are not what was written.
    pub damage: Vec<Damage>,
    /// Reads that failed because the medium is damaged, or the file was cut.
    pub unread: Vec<(BlockRead, io::Error)>,
}

/// The threads that read and check the blocks of one load.
pub(super) struct Readers<'a, Deliver> {
    reads: Reads<'a>,
    files: &'a OpenFiles,
    job: &'a Arc<Job>,
    /// The next block to read: its number, or its index in `turns`.
    next: AtomicUsize,
    turns: Option<Vec<usize>>,
    /// Reads that one worker keeps in flight.
    share: usize,
    memory: Memory<'a>,
    deliver: Deliver,
    /// Where to note damage; `None`: the first damaged chunk ends the load.
    damages: Option<&'a Mutex<Collected>>,
    clocks: Clocks,
    /// Bytes that were copied from the page cache.
    cached_bytes: AtomicU64,
    /// Bytes that other processes have read and sent.
    received_bytes: AtomicU64,
}

/// Where a block is before it is read.
enum Found<'a> {
    Arrived(Ahead),
    Cached(&'a File),
}

/// A read that came back: the block's number, and the read's outcome.
type Done = (usize, Outcome);

/// The blocks that one worker works on.
#[derive(Default)]
struct InHand {
    /// The number of a block that no buffer was free for.
    claimed: Option<usize>,
    /// Reads that have not come back.
    in_flight: usize,
    /// Blocks that GPUs are copying from.
    leaving: VecDeque<StagedCopy>,
}

impl InHand {
    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.leaving.is_empty()
    }
}

impl<'a, Deliver: Fn(usize, &mut StagedCopy)> Readers<'a, Deliver> {
    pub fn new(
        reads: Reads<'a>,
        files: &'a OpenFiles,
        job: &'a Arc<Job>,
        share: usize,
        memory: Memory<'a>,
        deliver: Deliver,
        damages: Option<&'a Mutex<Collected>>,
    ) -> Self {
        Self {
            turns: turns(reads),
            reads,
            files,
            job,
            share,
            memory,
            deliver,
            damages,
            next: AtomicUsize::new(0),
            clocks: Clocks::default(),
            cached_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
        }
    }

    /// One worker: keeps its share of reads in flight, and checks what comes back. Returns only when
    /// all of its reads have come back and all copies of GPUs have ended.
    pub fn work(&self) {
        let (send, receive): (Sender<Done>, Receiver<Done>) = unbounded();
        let mut hand = InHand::default();
        loop {
            self.note(self.take_back(&mut hand.leaving, false));
            while hand.in_flight < self.share && self.start_next(&send, &mut hand) {}
            if hand.in_flight > 0 {
                let (number, outcome) = receive.recv().expect("`send` is alive");
                hand.in_flight -= 1;
                self.note(self.finish(number, outcome).map(|staged| hand.leaving.extend(staged)));
            } else if !hand.leaving.is_empty() {
                self.note(self.take_back(&mut hand.leaving, true));
            } else if hand.claimed.is_none() || self.job.stopped() {
                return;
            }
        }
    }

    /// A failure ends the load.
    fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.files.fail(error);
        }
    }

    /// Returns to the pool the buffers that GPUs have copied everything from; with `wait`, waits for the first.
    fn take_back(&self, leaving: &mut VecDeque<StagedCopy>, wait: bool) -> Result<()> {
        let mut wait = wait;
        while let Some(first) = leaving.front_mut()
            && (std::mem::take(&mut wait) || first.has_ended()?)
        {
            let Some(first) = leaving.pop_front() else { break };
            drop(self.clocks.add_finished(first.finish()?));
        }
        Ok(())
    }

    /// Starts one more read, or copies the block from the page cache; false if there is none left, or no memory for it
    /// now. That there will never be memory for it ends the load.
    fn start_next(&self, send: &Sender<Done>, hand: &mut InHand) -> bool {
        if self.job.stopped() {
            return false;
        }
        // The block comes first: a buffer without one would be memory that nobody needs.
        let Some(number) = hand.claimed.take().or_else(|| self.claim()) else { return false };
        let block = &self.reads.blocks[number];
        let mut found = self.found(block);
        match found.as_ref().and_then(|found| self.copy_in_place(number, found)) {
            Some(true) => return true,
            Some(false) => found = None, // not what was written: the medium may have that
            None => {}
        }
        let Some(mut buffer) = self.buffer(number, hand) else { return false };
        if found.is_some_and(|found| self.copy_found(number, &found, &mut buffer[..block.len])) {
            self.note(self.deliver(number, buffer).map(|staged| hand.leaving.extend(staged)));
            return true;
        }
        let len = block.len.next_multiple_of(ALIGN).min(buffer.len());
        let action = Action::Read(Transfer { offset: block.offset, buffer, start: 0, len });
        let send = send.clone();
        self.files.submit(block.file, (number, block.len), action, move |_, outcome| {
            let _ = send.send((number, outcome)); // a worker that panicked receives nothing
        });
        hand.in_flight += 1;
        true
    }

    /// Where all of a block is already: sent by another process, for which this waits, or in the page cache.
    fn found(&self, block: &BlockRead) -> Option<Found<'_>> {
        let range = block.range();
        let arrivals = self.reads.arrivals;
        if let Some(ahead) =
            arrivals.and_then(|all| all.ahead(block.file, &range, || self.job.stopped()))
        {
            return Some(Found::Arrived(ahead));
        }
        let cached = self.files.cached(block.file);
        cached.filter(|file| page_cache::held(file, &range) == Held::All).map(Found::Cached)
    }

    /// The memory to read a block into. `None`: there is none now, and the block stays claimed, or never, which ends the load.
    fn buffer(&self, number: usize, hand: &mut InHand) -> Option<Buffer> {
        match self.memory {
            Memory::Arena(places) => {
                let mut place = places[number].lock().expect("no panic while it is held");
                let mut buffer = place.take().expect("each block is read once");
                // Page faults here, on this thread, instead of inside of the engine's submission.
                buffer.prefault();
                Some(buffer)
            }
            // Only a worker with nothing in flight waits: others have blocks to check, which frees
            // buffers.
            Memory::Pool(pool, _) if hand.is_idle() => match pool.lease() {
                Ok(buffer) => Some(buffer),
                Err(error) => {
                    let path = &self.reads.files[self.reads.blocks[number].file].path;
                    self.files.fail(Error::io("taking staging memory for", path, error));
                    None
                }
            },
            Memory::Pool(pool, _) => match pool.try_lease() {
                Some(buffer) => Some(buffer),
                None => {
                    hand.claimed = Some(number);
                    None
                }
            },
        }
    }

    /// Copies a block that is there already to the one place that it goes to; `None` if it goes to several, or none.
    fn copy_in_place(&self, number: usize, found: &Found) -> Option<bool> {
        let Memory::Pool(_, Some(in_place)) = self.memory else { return None };
        let mut is_copied = None;
        in_place(number, &mut |to| {
            let is_good = self.copy_found(number, found, to);
            if !is_good {
                to.fill(0); // no damaged byte is handed out, with an error neither
            }
            is_copied = Some(is_good);
            is_good
        });
        if is_copied == Some(true) {
            self.job.add_written(self.reads.blocks[number].len as u64);
        }
        is_copied
    }

    /// Copies a block that is there already; false if it is not what was written. It may be intact on the medium.
    fn copy_found(&self, number: usize, found: &Found, to: &mut [u8]) -> bool {
        let block = &self.reads.blocks[number];
        // Chunk by chunk, so that a checksum finds its bytes in the processor's cache.
        let is_good = |chunk: BlockRead| {
            let start = (chunk.offset - block.offset) as usize;
            let (copying, to) = (Instant::now(), &mut to[start..start + chunk.len]);
            let read = match found {
                Found::Cached(file) => page_cache::read(file, to, chunk.offset),
                Found::Arrived(ahead) => {
                    ahead.read(to, chunk.offset);
                    Ok(())
                }
            };
            self.job.note(What::Read, copying, Some(number), chunk.len as u64);
            if let Err(error) = &read {
                let path = self.reads.files[block.file].path.display();
                tracing::debug!(%error, "copying {path} at {} from the page cache", chunk.offset);
            }
            read.is_ok() && (!self.reads.verify || self.damages_in(&chunk, number, to).is_empty())
        };
        if !self.reads.chunks_of(block).all(is_good) {
            return false;
        }
        match found {
            Found::Cached(_) => self.cached_bytes.fetch_add(block.len as u64, Relaxed),
            Found::Arrived(ahead) => self.received_bytes.fetch_add(ahead.others_bytes(), Relaxed),
        };
        true
    }

    /// Adds what the threads measured; returns how many bytes were copied from the page cache, and how many other
    /// processes have sent.
    pub fn report(&self, moved: &mut Moved, seconds: &mut LoadSeconds) -> (u64, u64) {
        seconds.checksum_cpu = self.clocks.checksum.seconds();
        seconds.device_copy = self.clocks.device.seconds();
        moved.device_bytes = self.clocks.device_bytes.load(Relaxed);
        (self.cached_bytes.load(Relaxed), self.received_bytes.load(Relaxed))
    }

    /// The number of the next block in turn.
    fn claim(&self) -> Option<usize> {
        let turn = self.next.fetch_add(1, Relaxed);
        let number = self.turns.as_ref().and_then(|turns| turns.get(turn).copied()).unwrap_or(turn);
        (number < self.reads.blocks.len()).then_some(number)
    }

    /// Checks a block that was read, and delivers it. Returns the buffer if GPUs still copy from it.
    fn finish(&self, number: usize, outcome: Outcome) -> Result<Option<StagedCopy>> {
        let block = &self.reads.blocks[number];
        if self.job.stopped() {
            return Ok(None); // failed elsewhere, or cancelled: deliver nothing more
        }
        let mut buffer = outcome.buffer;
        if let Err(error) = outcome.result {
            // What is in the buffer may be of an earlier read, good as it looks.
            let (chunks, to) = (self.reads.chunks_of(block), buffer.as_mut());
            let is_whole = |to: &mut Buffer| {
                self.read_copy(block, chunks, &error, &mut to[..block.len]).is_empty()
            };
            if !to.is_some_and(is_whole) {
                return self.read_failed(block, error).map(|()| None);
            }
        }
        let mut buffer = buffer.expect("a read that succeeds returns its buffer");
        if self.reads.verify && !self.check(number, &mut buffer[..block.len])? {
            return Ok(None);
        }
        self.deliver(number, buffer)
    }

    /// Delivers a good block. Returns the buffer if GPUs still copy from it.
    fn deliver(&self, number: usize, buffer: Buffer) -> Result<Option<StagedCopy>> {
        let block = &self.reads.blocks[number];
        self.job.add_written(block.len as u64);
        let (mut staged, delivering) = (StagedCopy::new(buffer), Instant::now());
        (self.deliver)(number, &mut staged);
        staged.start()?;
        self.job.note(What::Deliver, delivering, Some(number), block.len as u64);
        Ok(staged.is_gpu_copying().then_some(staged))
    }

    /// Compares every checksum chunk of a read with its checksum; returns whether all are good. Damaged ones are read from
    /// a copy of the file, if it has any.
    fn check(&self, read_number: usize, bytes: &mut [u8]) -> Result<bool> {
        let read = &self.reads.blocks[read_number];
        let damages = self.damages_in(read, read_number, bytes);
        let Some(first) = damages.first() else { return Ok(true) };
        let why = format!(
            "{} at offset {} should be {}, is {}",
            first.what, first.offset, first.expected, first.got
        );
        let is_bad = |chunk: &BlockRead| {
            let start = (chunk.offset - read.offset) as usize;
            !self.reads.is_good(chunk, &bytes[start..start + chunk.len])
        };
        let bad: Vec<BlockRead> = self.reads.chunks_of(read).filter(is_bad).collect();
        let left = self.read_copy(read, bad, &why, bytes);
        // As they were found, not as a copy has them.
        let is_left = |damage: &Damage| left.iter().any(|chunk| chunk.offset == damage.offset);
        damages.into_iter().filter(is_left).try_for_each(|damage| self.damaged(damage))?;
        Ok(left.is_empty())
    }

    /// The checksum chunks of a read, or of some of it, that are not what was written.
    fn damages_in(&self, read: &BlockRead, number: usize, bytes: &[u8]) -> Vec<Damage> {
        let hashing = Instant::now();
        let damages = self.reads.damages(read, bytes).collect();
        self.clocks.checksum.add(hashing);
        self.job.note(What::Checksum, hashing, Some(number), read.len as u64);
        damages
    }

    /// Reads these checksum chunks of a block, each from the first copy of its file that has it whole; returns those that
    /// none has.
    fn read_copy(
        &self,
        block: &BlockRead,
        chunks: impl IntoIterator<Item = BlockRead>,
        why: &dyn Display,
        to: &mut [u8],
    ) -> Vec<BlockRead> {
        let mut is_lost = |chunk: &BlockRead| {
            let start = (chunk.offset - block.offset) as usize;
            let to = &mut to[start..start + chunk.len];
            !self.reads.owner.read_copy(chunk.file, why, &mut |path| {
                let read = read_copy(path, chunk.offset, to);
                if let Err(error) = &read {
                    tracing::debug!(%error, "reading {} at {}", path.display(), chunk.offset);
                }
                read.is_ok() && (!self.reads.verify || self.reads.is_good(chunk, to))
            })
        };
        chunks.into_iter().filter(|chunk| is_lost(chunk)).collect()
    }

    fn damaged(&self, damage: Damage) -> Result<()> {
        let Some(found) = self.damages else { return Err(damage.into()) };
        found.lock().expect("no panic while it is held").damage.push(damage);
        Ok(())
    }

    /// Keeps a read that failed because of damage, if damage is collected.
    ///
    /// # Errors
    /// Otherwise the read's failure.
    fn read_failed(&self, block: &BlockRead, error: io::Error) -> Result<()> {
        let is_cut = error.kind() == io::ErrorKind::UnexpectedEof;
        match self.damages {
            Some(found) if is_cut || is_bad_medium(&error) => {
                let mut found = found.lock().expect("no panic while it is held");
                found.unread.push((block.clone(), error));
                Ok(())
            }
            _ if is_cut => Err(unreadable(self.reads, block, &error).into()),
            _ => {
                let path = &self.reads.files[block.file].path;
                let error = Error::io_at("reading", path, block.offset, error);
                let tensors = self.reads.owner.tensors_in(block.file, &block.range());
                Err(match tensors.is_empty() {
                    true => error,
                    false => error.hinted(format!("it holds {}", tensors_named(&tensors))),
                })
            }
        }
    }
}

/// The damage that a failed read is.
pub(super) fn unreadable(reads: Reads, read: &BlockRead, error: &io::Error) -> Damage {
    let shard = &reads.files[read.file];
    let is_cut = error.kind() == io::ErrorKind::UnexpectedEof;
    let (what, expected, got) = match is_cut {
        true => ("length in bytes", shard.bytes.to_string(), "less: the file was cut".into()),
        false => ("the medium", "readable".into(), error.to_string()),
    };
    Damage {
        file: shard.path.clone(),
        offset: read.offset,
        bytes: read.len as u64,
        what: what.into(),
        expected,
        got,
        tensors: reads.owner.tensors_in(read.file, &read.range()),
        is_refusal: false,
    }
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
    Some(in_turns((0..reads.blocks.len()).collect(), |&number| dir_of[reads.blocks[number].file]))
}

/// Fills `to` with the bytes of a copy of a file, from an offset on: rare, and after a failure, so one block at a time and
/// through the page cache.
///
/// # Errors
/// The system's or the store's.
fn read_copy(path: &Path, offset: u64, to: &mut [u8]) -> io::Result<()> {
    if !is_url(path) {
        return file::open_read(path, false)?.read_exact_at(to, offset);
    }
    let (dir, name) = split(path).map_err(refused)?;
    to.copy_from_slice(&Bucket::at(&dir).map_err(refused)?.read_range(&name, offset, to.len())?);
    Ok(())
}

fn refused(error: Error) -> io::Error {
    io::Error::other(error.to_string())
}
