//! Reads parts of files and checks them. A promotion then sends them on.

use super::job::Job;
use super::load::{Reads, open_files};
use super::report::Moved;
use super::runtime::Runtime;
use super::transfers::OpenFiles;
use crate::config::{Config, Switch};
use crate::engine::{Action, Transfer};
use crate::error::{Error, Result};
use crate::limits::ALIGN;
use crate::plan::load::BlockRead;
use crate::pool::{Buffer, Pool};
use crossbeam_channel::unbounded;
use std::ops::Range;
use std::sync::Arc;

/// A block that was read and found to be what was written.
pub(crate) struct Checked {
    buffer: Buffer,
    len: usize,
}

impl AsRef<[u8]> for Checked {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

/// Open files, and a pool of their own: a save must not wait for memory that a slow store holds.
pub(crate) struct Blocks<'a> {
    reads: Reads<'a>,
    files: OpenFiles,
    pool: Pool,
    block_bytes: u64,
    /// How the files are read.
    pub moved: Moved,
}

impl<'a> Blocks<'a> {
    /// Opens the files of `reads`, whose blocks only say which those are. Blocks are of whole checksum chunks, `block_bytes`
    /// or a little less; `buffers` of them are in memory at once.
    ///
    /// # Errors
    /// As for a load.
    pub fn open(
        runtime: &Runtime,
        reads: Reads<'a>,
        (buffers, block_bytes): (usize, u64),
        job: &Arc<Job>,
    ) -> Result<Self> {
        let config = Config { fixed: Switch::Off, ..runtime.config().clone() };
        let (files, moved) = open_files(runtime, &config, reads, job)?;
        let no_memory = |error| Error::io("taking staging memory for", reads.dir, error);
        let len = (block_bytes as usize).next_multiple_of(ALIGN);
        let pool = Pool::new(buffers, len).map_err(no_memory)?;
        Ok(Self { reads, files, pool, block_bytes, moved })
    }

    /// Reads a range that begins with a block, all of its blocks at once.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a checksum that differs; [`Error::Io`].
    pub fn read(&self, file: usize, range: Range<u64>) -> Result<Vec<Checked>> {
        let starts = range.clone().step_by(self.block_bytes as usize);
        let blocks: Vec<BlockRead> = starts
            .map(|offset| BlockRead {
                file,
                block: (offset / self.reads.checksum_bytes) as usize,
                offset,
                len: (range.end - offset).min(self.block_bytes) as usize,
            })
            .collect();
        let (send, receive) = unbounded();
        for (number, block) in blocks.iter().enumerate() {
            let buffer = self.pool.lease().map_err(|error| {
                Error::io("taking staging memory for", &self.reads.files[file].path, error)
            })?;
            let len = block.len.next_multiple_of(ALIGN).min(buffer.len());
            let action = Action::Read(Transfer { offset: block.offset, buffer, start: 0, len });
            let send = send.clone();
            self.files.submit(file, (number, block.len), action, move |_, outcome| {
                let _ = send.send((number, outcome)); // a thread that panicked receives nothing
            });
        }
        drop(send);
        let mut read: Vec<Option<Checked>> = blocks.iter().map(|_| None).collect();
        for (number, outcome) in receive {
            let block = &blocks[number];
            outcome.result.map_err(|error| {
                Error::io_at("reading", &self.reads.files[file].path, block.offset, error)
            })?;
            let buffer = outcome.buffer.expect("a read that succeeds returns its buffer");
            if let Some(damage) = self.reads.damages(block, &buffer[..block.len]).next() {
                return Err(damage.into());
            }
            read[number] = Some(Checked { buffer, len: block.len });
        }
        Ok(read.into_iter().flatten().collect())
    }
}
