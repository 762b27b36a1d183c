//! Writes a stream to a file that exists: each write copies into a staging buffer, each full buffer goes to the engine.

use super::buffers::Buffers;
use super::{FILE, only, plainly, update};
use crate::engine::io_mode::{self, IoMode, Stage, Trial};
use crate::engine::queue::Queue;
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result, is_full};
use crate::limits::ALIGN;
use crate::pipeline::job::Job;
use crate::pipeline::open::{Attempt, OpenFailure, attach, open_each};
use crate::pipeline::pace::{Pace, wait_until};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{OpenFile, OpenFiles};
use crate::pool::{Buffer, Pool};
use crate::sys::file;
use crate::sys::space::{self, Preallocated};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes that are reserved ahead of what is written. Until then, each reservation doubles the file.
const RESERVED_MAX: u64 = 1 << 30;

/// A stream to one file. Dropping it stops what is in flight.
pub(crate) struct WriteStream {
    path: Arc<Path>,
    job: Arc<Job>,
    files: OpenFiles,
    moved: Moved,
    buffers: Buffers,
    pace: Option<Pace>,
    checksum_bytes: usize,
    /// The buffer that is being filled, and how many of its bytes are.
    current: Option<Buffer>,
    filled: usize,
    /// Where in the file that buffer goes.
    offset: u64,
    /// Bytes that the file has room for; `None` if it grows as it is written.
    reserved: Option<u64>,
    crc32: Vec<u32>,
    waited: Duration,
}

impl WriteStream {
    /// Opens the file at `now` with the first I/O mode that works there. Errors name `path`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unsupported`] if the configuration allows no mode that works.
    pub fn open(runtime: &Runtime, now: &Path, path: &Path, job: Arc<Job>) -> Result<Self> {
        let config = runtime.config();
        let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", path, e))?;
        let open = |_: &[usize], queue: &Arc<Queue>, mode: &IoMode| {
            open_and_try(queue, mode, &pool, (now, path)).map(plainly)
        };
        let (files, moved) = open_each(runtime, config, &[Some(now)], open)?;
        Ok(Self {
            path: path.into(),
            files: OpenFiles::new(only(files, path), &job),
            job,
            moved,
            buffers: Buffers::new(pool),
            pace: Pace::new(config.write_rate),
            checksum_bytes: config.checksum_bytes() as usize,
            current: None,
            filled: 0,
            offset: 0,
            reserved: Some(0),
            crc32: Vec::new(),
            waited: Duration::ZERO,
        })
    }

    /// Copies the bytes, and waits for the disk as long as there is no free buffer.
    ///
    /// # Errors
    /// The first failure of this write or an earlier one. The stream is then of no use.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut buffer = match self.current.take() {
                Some(buffer) => buffer,
                None => self.next_buffer()?,
            };
            // No further than to the end of the checksum chunk, which is then still in the cache.
            let chunk = self.filled / self.checksum_bytes * self.checksum_bytes;
            let end = chunk + self.checksum_bytes;
            let (now, later) = bytes.split_at(bytes.len().min(end - self.filled));
            buffer[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            if self.filled == end {
                self.crc32.push(crc32fast::hash(&buffer[chunk..end]));
            }
            match self.filled == buffer.len() {
                true => self.submit(buffer)?,
                false => self.current = Some(buffer),
            }
            bytes = later;
        }
        Ok(())
    }

    fn next_buffer(&mut self) -> Result<Buffer> {
        let waiting = Instant::now();
        let taken = self.buffers.take();
        self.waited += waiting.elapsed();
        taken.map_err(|e| Error::io("taking staging memory for", &*self.path, e))
    }

    /// Writes a buffer's filled bytes, padded.
    fn submit(&mut self, mut buffer: Buffer) -> Result<()> {
        if self.job.stopped() {
            return self.files.settle(&self.path); // with the failure
        }
        let (offset, bytes) = (self.offset, self.filled);
        let len = bytes.next_multiple_of(ALIGN);
        buffer[bytes..len].fill(0);
        self.reserve(offset + len as u64)
            .map_err(|e| Error::io_at("growing", &*self.path, offset, e))?;
        if let Some(pace) = &self.pace {
            wait_until(pace.due(Instant::now(), bytes), &self.job);
        }
        let (path, give_back) = (self.path.clone(), self.buffers.lend());
        let number = (offset / buffer.len() as u64) as usize;
        let action = Action::Write(Transfer::of(buffer, len, offset));
        self.files.submit(FILE, (number, bytes), action, move |transfers, outcome| {
            match outcome.result {
                Ok(()) => transfers.job().add_written(bytes as u64),
                // After a failure, other transfers are cancelled, which says nothing new.
                Err(_) if transfers.job().stopped() => {}
                Err(error) => transfers.fail(Error::io_at("writing", &*path, offset, error)),
            }
            give_back.give(outcome.buffer);
        });
        self.offset += bytes as u64;
        self.filled = 0;
        Ok(())
    }

    /// Makes room up to `needed`, and ahead of it if the disk is not full.
    fn reserve(&mut self, needed: u64) -> io::Result<()> {
        let Some(reserved) = self.reserved.filter(|reserved| *reserved < needed) else {
            return Ok(());
        };
        let ahead = needed + needed.min(RESERVED_MAX);
        let file = self.file();
        let extended = match space::extend(file, reserved, ahead) {
            Err(error) if is_full(&error) || error.kind() == io::ErrorKind::FileTooLarge => {
                space::extend(file, reserved, needed).map(|done| (done, needed))
            }
            done => done.map(|done| (done, ahead)),
        };
        self.reserved = match extended? {
            (Preallocated::Allocated, end) => Some(end),
            (Preallocated::SizeOnly, _) => None,
        };
        Ok(())
    }

    /// Writes what is left, cuts the file to its length and makes its bytes durable.
    ///
    /// # Errors
    /// The first failure.
    pub fn finish(&mut self) -> Result<()> {
        if let Some(buffer) = self.current.take() {
            let chunk = self.filled / self.checksum_bytes * self.checksum_bytes;
            if self.filled > chunk {
                self.crc32.push(crc32fast::hash(&buffer[chunk..self.filled]));
            }
            self.submit(buffer)?;
        }
        self.files.settle(&self.path)?;
        let open = self.files.file(FILE);
        space::finish(&open.file, self.offset)
            .map_err(|e| Error::io("cutting to length", &*self.path, e))?;
        let synced = open.queue.start_one(&open.attached, Action::Sync, 0).wait().result;
        synced.map_err(|e| Error::io("syncing", &*self.path, e))?;
        update(&mut self.moved, &self.path, &self.files);
        Ok(())
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.files.file(FILE).file
    }

    /// Bytes that were written to the stream.
    pub fn position(&self) -> u64 {
        self.offset + self.filled as u64
    }

    /// The checksums of all chunks, once the stream is [finished](Self::finish).
    pub fn crc32(&self) -> &[u32] {
        &self.crc32
    }

    /// Bytes that one checksum covers.
    pub fn checksum_bytes(&self) -> u64 {
        self.checksum_bytes as u64
    }

    /// How the bytes were moved.
    pub fn moved(&self) -> &Moved {
        &self.moved
    }

    /// How long writes waited for a free buffer.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for WriteStream {
    fn drop(&mut self) {
        self.job.cancel(); // what is in flight would be written for nothing
    }
}

/// Opens a file, and writes a trial block.
fn open_and_try(
    queue: &Arc<Queue>,
    mode: &IoMode,
    pool: &Pool,
    (now, path): (&Path, &Path),
) -> Attempt<OpenFile> {
    let failed = |stage, doing| OpenFailure::of(stage, doing, path);
    let file = file::open_write(now, mode.direct).map_err(failed(Stage::Open, "opening"))?;
    let open = attach(queue, now, file)?;
    let buffer = pool.try_lease_spare().map_or_else(|| Buffer::alone(ALIGN), Ok);
    let buffer = buffer.map_err(failed(Stage::Open, "taking staging memory for"))?;
    let trial = io_mode::trial(queue, &open.attached, Trial::Write(0), buffer);
    trial.result.map_err(failed(Stage::Trial, "writing"))?;
    Ok(open)
}
