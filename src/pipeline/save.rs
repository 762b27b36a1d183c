//! Moves a laid-out state into its files.
//!
//! Filler threads take blocks in order: each leases a buffer, gathers the block's pieces into it,
//! checksums them while they are in the cache, and submits the full buffer to the engine's queue. The
//! buffer returns to the pool when it is written. That is all the flow control there is: a filler that
//! finds no free buffer waits for the disk. In the background it first takes more memory, so that training
//! waits for the copies alone.
//!
//! The GPU copies the pieces that are in its memory. The filler begins further blocks meanwhile, as
//! long as buffers are free, and returns to each when its copies have ended.

mod block;
mod files;
mod fillers;

pub(crate) use block::Check;

use super::job::Job;
use super::open::update;
use super::report::{Moved, SaveSeconds};
use super::runtime::Runtime;
use super::trace::What;
use super::transfers::OpenFiles;
use crate::device::{TensorSource, pin_for_sources};
use crate::error::{Error, Result};
use crate::format::{ChunkHash, Item};
use crate::plan::save::SavePlan;
use block::Inputs;
use fillers::Fillers;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// The outcome of [`write()`]: files that are durable under their uncommitted names.
#[derive(Debug)]
pub(crate) struct Written {
    /// Checksums of each shard, one every [`Config::checksum_bytes`](crate::Config::checksum_bytes).
    pub crc32: Vec<Vec<u32>>,
    /// Hashes of each shard's tensor chunks; empty if the plan does not ask for them.
    pub hashes: Vec<Vec<ChunkHash>>,
    /// Bytes of staging memory that there were for it.
    pub pool_bytes: u64,
    pub moved: Moved,
    pub seconds: SaveSeconds,
}

impl Written {
    /// The outcome for a rank that has nothing to write: no engine was needed.
    pub fn nothing() -> Self {
        let moved = Moved { engine: "none".into(), ..Moved::default() };
        let (crc32, hashes) = (Vec::new(), Vec::new());
        Self { crc32, hashes, pool_bytes: 0, moved, seconds: SaveSeconds::default() }
    }
}

/// Writes every shard of `plan` to its file, one of `paths` in the same order, and makes the data
/// durable. The files exist and are the caller's own: new ones, or recycled ones to be written over.
/// `dir` is the checkpoint's, for messages. Once all bytes have left their tensors, `check` must pass.
///
/// # Errors
/// The first failure, by file and offset. Files are left for the caller to remove.
pub(crate) fn write(
    runtime: &Runtime,
    plan: &SavePlan,
    (items, sources, check): (&[Item], &[TensorSource<'_>], Option<Check<'_>>),
    (dir, paths): (&Path, &[PathBuf]),
    job: &Arc<Job>,
) -> Result<Written> {
    debug_assert_eq!(paths.len(), plan.shards.len());
    let started = Instant::now();
    let mut seconds = SaveSeconds::default();
    let pool = runtime.pool().map_err(|e| Error::io("taking staging memory for", dir, e))?;
    let (files, mut moved) = files::open(runtime, &pool, plan, paths)?;
    let files = OpenFiles::new(files, job);
    moved.note(dir, pin_for_sources(&pool, sources));
    seconds.prepare = started.elapsed().as_secs_f64();
    job.note(What::Prepare, started, None, 0);

    let checksum_bytes = runtime.config().checksum_bytes() as usize;
    let inputs = Inputs::new(plan, items, sources, check, checksum_bytes);
    let fillers = Fillers::new(&inputs, &pool, &files, runtime.config(), job);
    let filling = Instant::now();
    fillers.fill();
    let pool_bytes = fillers.memory_bytes() as u64;
    Runtime::watch_memory();
    moved.note_streamed(dir, plan.file_bytes(), pool_bytes, fillers.no_more());
    seconds.stage = fillers.staged_at().map_or(0.0, |at| (at - filling).as_secs_f64());
    files.settle(dir)?;
    seconds.write = filling.elapsed().as_secs_f64();

    let syncing = Instant::now();
    files::make_durable(&files, plan)?;
    seconds.sync = syncing.elapsed().as_secs_f64();
    job.note(What::Sync, syncing, None, 0);
    let clocks = &inputs.clocks;
    seconds.copy_cpu = clocks.copy.seconds();
    seconds.checksum_cpu = clocks.checksum.seconds();
    seconds.wait = clocks.wait.seconds();
    seconds.device_copy = clocks.device.seconds();
    moved.device_bytes = clocks.device_bytes.load(Relaxed);
    update(&mut moved, dir, &files.queues());
    let (crc32, hashes) = (fillers.checksums(), fillers.hashes());
    Ok(Written { crc32, hashes, pool_bytes, moved, seconds })
}
