//! Reads a file as a stream: reads ahead, several blocks at once, and checks each before any of its bytes are handed out.

use super::{FILE, only, plainly, update};
use crate::engine::io_mode::{IoMode, Stage};
use crate::engine::queue::Queue;
use crate::engine::{Action, Transfer};
use crate::error::{Advice, Error, Result};
use crate::limits::ALIGN;
use crate::pipeline::chunks::differing;
use crate::pipeline::job::Job;
use crate::pipeline::open::{Attempt, OpenFailure, attach, open_each, try_read};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{OpenFile, OpenFiles};
use crate::pool::{Buffer, Pool};
use crate::sys::file;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Blocks in flight or read ahead at most. More make no disk faster, and would keep buffers from saves.
const AHEAD_MAX: usize = 8;

/// A stream from one file.
pub(crate) struct ReadStream {
    path: Arc<Path>,
    files: OpenFiles,
    moved: Moved,
    pool: Pool,
    bytes: u64,
    /// What each block must be, if that is known.
    checksums: Option<Checksums>,
    /// Consecutive blocks that were read or are being read, in order.
    window: VecDeque<Block>,
    /// How many blocks to have in the window: more, the longer the reader reads in order.
    ahead: usize,
    /// Unlike for each read: an answer to one of an earlier window is thrown away.
    next_ticket: u64,
    arrived: Receiver<Arrival>,
    arrive: Sender<Arrival>,
}

/// Checksums of a file.
pub(crate) struct Checksums {
    /// Bytes that one covers.
    pub chunk_bytes: usize,
    pub crc32: Vec<u32>,
}

struct Block {
    number: u64,
    ticket: u64,
    /// `None` while it is being read.
    read: Option<io::Result<Buffer>>,
    is_checked: bool,
}

/// The answer to the read of this ticket.
type Arrival = (u64, io::Result<Buffer>);

impl ReadStream {
    /// Opens a file with the first I/O mode that works there.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unsupported`] if the configuration allows no mode that works.
    pub fn open(runtime: &Runtime, path: &Path, job: &Arc<Job>) -> Result<Self> {
        let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", path, e))?;
        let open = |_: &[usize], queue: &Arc<Queue>, mode: &IoMode| {
            open_and_try(queue, mode, path).map(plainly)
        };
        let (files, moved) = open_each(runtime, runtime.config(), &[Some(path)], open)?;
        let files = OpenFiles::new(only(files, path), job);
        let found = file::look(&files.file(FILE).file);
        let bytes = found.map_err(|e| Error::io("opening", path, e))?.len();
        let (arrive, arrived) = unbounded();
        Ok(Self {
            path: path.into(),
            files,
            moved,
            pool,
            bytes,
            checksums: None,
            window: VecDeque::new(),
            ahead: 1,
            next_ticket: 0,
            arrived,
            arrive,
        })
    }

    /// Sets what the file's chunks must be. A block must be a whole number of chunks; says whether it is.
    pub fn check_by(&mut self, checksums: Checksums) -> bool {
        let fits = self.pool.block_bytes().is_multiple_of(checksums.chunk_bytes);
        self.checksums = fits.then_some(checksums);
        fits
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.files.file(FILE).file
    }

    /// The file's length when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How the bytes are moved.
    pub fn moved(&mut self) -> &Moved {
        update(&mut self.moved, &self.path, &self.files);
        &self.moved
    }

    /// The bytes from `position` to the end of its block; none at the end of the file.
    ///
    /// # Errors
    /// [`Error::Io`] with the offset of the block; [`Error::Corrupt`].
    pub fn bytes_at(&mut self, position: u64) -> Result<&[u8]> {
        if position >= self.bytes {
            return Ok(&[]);
        }
        let block_bytes = self.pool.block_bytes() as u64;
        let number = position / block_bytes;
        self.fill_window(number)?;
        self.wait()?;
        let len = self.len_of(number);
        let begin = (position - number * block_bytes) as usize;
        match &self.window[0].read {
            Some(Ok(buffer)) => Ok(&buffer[begin..len]),
            _ => unreachable!("`wait` has waited for it, and returned its failure"),
        }
    }

    fn len_of(&self, number: u64) -> usize {
        let block_bytes = self.pool.block_bytes() as u64;
        (self.bytes - number * block_bytes).min(block_bytes) as usize
    }

    /// Makes `number` the first block of the window, and starts the reads of those that follow.
    fn fill_window(&mut self, number: u64) -> Result<()> {
        let is_first = self.window.front().is_some_and(|block| block.number == number);
        if !is_first {
            while let Ok(arrival) = self.arrived.try_recv() {
                self.take_in(arrival); // of blocks that nobody waits for any more, too: the pool gets their buffers
            }
            let follows = self.window.front().is_some_and(|block| block.number + 1 == number);
            self.ahead = if follows { (self.ahead * 2).min(AHEAD_MAX) } else { 1 };
            while self.window.front().is_some_and(|block| block.number != number) {
                self.window.pop_front();
            }
        }
        let blocks = self.bytes.div_ceil(self.pool.block_bytes() as u64);
        for next in number + self.window.len() as u64..blocks {
            if self.window.len() >= self.ahead {
                break;
            }
            let buffer = match self.pool.try_lease_spare() {
                None if self.window.is_empty() => Buffer::alone(self.pool.block_bytes())
                    .map_err(|e| Error::io("taking staging memory for", &*self.path, e))?,
                None => break,
                Some(buffer) => buffer,
            };
            self.start(next, buffer);
        }
        Ok(())
    }

    fn start(&mut self, number: u64, buffer: Buffer) {
        let (needed, offset) = (self.len_of(number), number * buffer.len() as u64);
        let (ticket, arrive) = (self.next_ticket, self.arrive.clone());
        self.next_ticket += 1;
        let action = Action::Read(Transfer::of(buffer, needed.next_multiple_of(ALIGN), offset));
        self.files.submit(FILE, (number as usize, needed), action, move |_, outcome| {
            let gone = || io::Error::other("the I/O engine broke; open the file again");
            let read = outcome.result.and_then(|()| outcome.buffer.ok_or_else(gone));
            let _ = arrive.send((ticket, read)); // the stream may be gone
        });
        self.window.push_back(Block { number, ticket, read: None, is_checked: false });
    }

    /// Waits for the first block of the window, and checks it.
    fn wait(&mut self) -> Result<()> {
        while self.window[0].read.is_none() {
            let arrival = self.arrived.recv().expect("this holds a sender");
            self.take_in(arrival);
        }
        let checked = self.check();
        if checked.is_err() {
            self.window.clear(); // the next attempt reads it again
        }
        checked
    }

    fn take_in(&mut self, (ticket, read): Arrival) {
        if let Some(block) = self.window.iter_mut().find(|block| block.ticket == ticket) {
            block.read = Some(read);
        }
    }

    fn check(&mut self) -> Result<()> {
        let (block_bytes, len) = (self.pool.block_bytes(), self.len_of(self.window[0].number));
        let block = &mut self.window[0];
        let offset = block.number * block_bytes as u64;
        let buffer = match block.read.take_if(|read| read.is_err()) {
            Some(Err(error)) => return Err(Error::io_at("reading", &*self.path, offset, error)),
            _ => block.read.as_ref().and_then(|read| read.as_ref().ok()).expect("it has arrived"),
        };
        let Some(sums) = self.checksums.as_ref().filter(|_| !block.is_checked) else {
            return Ok(());
        };
        let chunks = (sums.chunk_bytes, sums.crc32.as_slice());
        let first = offset as usize / sums.chunk_bytes;
        if let Some(chunk) = differing(&buffer[..len], chunks, first).next() {
            let [expected, got] = [chunk.expected, chunk.got].map(|crc32| format!("{crc32:08x}"));
            let damaged = Error::corrupt(&self.path, chunk.offset, &chunk.what(), expected, got);
            return Err(damaged.advising(Advice::WriteAgain));
        }
        block.is_checked = true;
        Ok(())
    }
}

/// Opens a file, and reads a trial block.
fn open_and_try(queue: &Arc<Queue>, mode: &IoMode, path: &Path) -> Attempt<OpenFile> {
    let failed = |stage, doing| OpenFailure::of(stage, doing, path);
    let file = file::open_read(path, mode.direct).map_err(failed(Stage::Open, "opening"))?;
    let open = attach(queue, path, file)?;
    try_read(&open).map_err(failed(Stage::Trial, "reading"))?;
    Ok(open)
}
