//! The files of a save: opened and preallocated before its first block, durable after its last.

use crate::engine::Action;
use crate::engine::fallback::{Fallback, FallbackKind};
use crate::engine::io_mode::{self, IoMode, Stage, Trial};
use crate::engine::queue::{Answer, Queue};
use crate::error::{Error, Result};
use crate::limits::ALIGN;
use crate::pipeline::open::{Attempt, OpenFailure, Opened, attach, open_each};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{OpenFile, OpenFiles};
use crate::plan::save::SavePlan;
use crate::pool::Pool;
use crate::sys::space::{self, Preallocated};
use crate::sys::{file, rlimit};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens and preallocates all files, those of each directory with the first I/O mode that passes its
/// trial there.
pub(super) fn open(
    runtime: &Runtime,
    pool: &Pool,
    plan: &SavePlan,
    paths: &[PathBuf],
) -> Result<(Vec<Option<OpenFile>>, Moved)> {
    rlimit::make_room_for(paths.len());
    let by_path: Vec<Option<&Path>> = paths.iter().map(|path| Some(path.as_path())).collect();
    open_each(runtime, runtime.config(), &by_path, |numbers, queue, mode| {
        let padded = |n: usize| plan.shards[n].bytes.next_multiple_of(ALIGN as u64);
        let files: Vec<(&Path, u64)> =
            numbers.iter().map(|&n| (paths[n].as_path(), padded(n))).collect();
        match plan.is_share {
            true => open_shared(queue, mode, pool, (&files, first_offset(plan, numbers[0]))),
            false => open_in_directory(queue, mode, pool, &files),
        }
    })
}

/// Opens files of one directory, each of so many bytes, padded.
fn open_in_directory(
    queue: &Arc<Queue>,
    mode: &IoMode,
    pool: &Pool,
    paths: &[(&Path, u64)],
) -> Attempt<Opened> {
    let (mut files, mut notes) = (Vec::with_capacity(paths.len()), Vec::new());
    for &(path, bytes) in paths {
        let failed = |stage, doing| OpenFailure::of(stage, doing, path);
        // Not truncated: a recycled file is to be written over, every byte of it.
        let file = file::open_write(path, mode.direct).map_err(failed(Stage::Open, "opening"))?;
        // Attached at once: a child that is forked before would keep it open.
        let open = attach(queue, path, file)?;
        let preallocated = space::preallocate(&open.file, bytes).map_err(|error| {
            let needed = paths.iter().map(|(_, bytes)| bytes).sum();
            let so_far = files.iter().chain([&open]).map(|open: &OpenFile| &*open.file);
            let shortage = space::shortage(&error, needed, so_far);
            OpenFailure { shortage, ..failed(Stage::Open, "preallocating")(error) }
        })?;
        if preallocated == Preallocated::SizeOnly && notes.is_empty() {
            notes.push(no_preallocation());
        }
        if files.is_empty() {
            let buffer = pool.lease().map_err(failed(Stage::Open, "taking staging memory for"))?;
            let trial = io_mode::trial(queue, &open.attached, Trial::Write(0), buffer);
            trial.result.map_err(failed(Stage::Trial, "writing"))?;
        }
        files.push(open);
    }
    Ok((files, notes))
}

/// Where the first block of a file is.
fn first_offset(plan: &SavePlan, shard: usize) -> u64 {
    let of_shard = plan.blocks.iter().filter(|block| block.shard == shard);
    of_shard.map(|block| block.offset).min().unwrap_or_default()
}

/// Opens files of one directory that another process has created, and reserved space for. `trial_at` is the offset of
/// a block of the first: other processes write those that are not this plan's.
fn open_shared(
    queue: &Arc<Queue>,
    mode: &IoMode,
    pool: &Pool,
    (paths, trial_at): (&[(&Path, u64)], u64),
) -> Attempt<Opened> {
    let mut files: Vec<OpenFile> = Vec::with_capacity(paths.len());
    for &(path, bytes) in paths {
        let failed = |stage, doing| OpenFailure::of(stage, doing, path);
        space::check_limit(bytes).map_err(failed(Stage::Open, "opening"))?;
        let file = file::open_write(path, mode.direct).map_err(failed(Stage::Open, "opening"))?;
        files.push(attach(queue, path, file)?);
    }
    if let Some(first) = files.first() {
        let failed = |stage, doing| OpenFailure::of(stage, doing, &first.path);
        let buffer = pool.lease().map_err(failed(Stage::Open, "taking staging memory for"))?;
        let trial = io_mode::trial(queue, &first.attached, Trial::Write(trial_at), buffer);
        trial.result.map_err(failed(Stage::Trial, "writing"))?;
    }
    Ok((files, Vec::new()))
}

fn no_preallocation() -> Fallback {
    Fallback {
        kind: FallbackKind::Preallocation,
        wanted: "preallocated files".into(),
        got: "files that grow as they are written".into(),
        reason: "the file system has no fallocate".into(),
        remedy: "none needed; a disk that fills up is noticed later than it would be on ext4, XFS or btrfs"
            .into(),
    }
}

/// Cuts the padding off every file that no other process writes, then syncs them all at once: they may be on several
/// disks.
pub(super) fn make_durable(files: &OpenFiles, plan: &SavePlan) -> Result<()> {
    let own = if plan.is_share { &[] } else { plan.shards.as_slice() };
    for (open, shard) in files.iter().zip(own) {
        space::finish(&open.file, shard.bytes)
            .map_err(|e| Error::io("cutting to length", &*open.path, e))?;
    }
    let begin = |open: &OpenFile| open.queue.start_one(&open.attached, Action::Sync, 0);
    let syncing: Vec<Answer> = files.iter().map(begin).collect();
    // Waits for each, also after a failure: nothing may be in progress when the files are closed.
    let mut outcome = Ok(());
    for (open, sync) in files.iter().zip(syncing) {
        outcome = outcome.and(sync.wait().result.map_err(|e| Error::io("syncing", &*open.path, e)));
    }
    outcome
}
