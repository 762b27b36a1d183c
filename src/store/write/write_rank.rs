//! One rank's part of a save by several.
//!
//! Two processes may write as one rank: an old incarnation that nobody stopped, or a retry. The write that
//! began last counts. Each write has files under names that no other uses, takes the files of earlier writes of
//! its rank away, and before it gives its word looks whether its own are still there.

use crate::error::{Error, Result};
use crate::format::{Receipt, names};
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::trace::What;
use crate::state::StateDict;
use crate::store::layout::stripes::Places;
use crate::store::layout::unique::unique;
use crate::store::write::rollback::Parts;
use crate::store::write::save::{file_entries, paths, report};
use crate::store::write::session::{UnderWay, under_way};
use crate::sys::dir;
use crate::sys::dir::file_names;
use crate::sys::{file, path};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Writes one rank's part of the checkpoint at `path`: durable, and not committed. The coordinator's
/// [`Session`](crate::store::write::session::Session), begun before, commits all parts.
///
/// # Errors
/// [`Error::Invalid`] if no session has begun there, or another write of the same rank took over; any other
/// [`Error`]. Then what was written is removed, and an earlier checkpoint is as it was.
pub fn write_rank(
    runtime: &Runtime,
    state: &StateDict<'_>,
    rank: u32,
    path: &Path,
    job: &Arc<Job>,
) -> Result<(Receipt, SaveReport)> {
    job.trace_to(runtime.config());
    job.traced(|| write_part(runtime, state, rank, path, job))
}

fn write_part(
    runtime: &Runtime,
    state: &StateDict<'_>,
    rank: u32,
    path: &Path,
    job: &Arc<Job>,
) -> Result<(Receipt, SaveReport)> {
    let started = Instant::now();
    let contents = state.contents();
    contents.check_sizes()?;
    path::check(path)?;
    let UnderWay { session, generation } = under_way(path)?;
    // No receipt of an earlier write is true from here on.
    let done = path.join(names::done(rank));
    dir::remove(&done)?;
    let places = Places::to_save(path, &runtime.config().stripe)?;
    places.check_made()?;
    take_over(&places, rank)?;
    let mut plan = contents.plan(runtime, &places, rank, generation)?;
    if contents.items.is_empty() {
        (plan.shards, plan.blocks) = (Vec::new(), Vec::new());
    }
    let write = unique();
    let files = paths(&plan, &places, rank, |name| names::written_part(name, &write));
    let mut parts = Parts::new();
    parts.files.extend_from_slice(&files);
    let planned = started.elapsed().as_secs_f64();
    job.note(What::Plan, started, None, 0);
    let written = contents.write_over_spares(runtime, &plan, (&places, &files), job);
    let (written, recycled_bytes) = match written {
        // Another engine was about to be tried, which opens the files again.
        Err(error) if error.is_not_found() => {
            return Err(check_there(path, rank, &files).err().unwrap_or(error));
        }
        written => written?,
    };
    check_there(path, rank, &files)?;

    let receipt = Receipt {
        rank,
        session,
        write,
        block_bytes: runtime.config().checksum_bytes(),
        files: file_entries(&plan, &written.crc32),
        tensors: plan.entries(contents.items).iter().collect(),
    };
    file::write(&done, receipt.mark().as_bytes())?;
    parts.keep();
    let mut report = report(runtime, path, generation, &plan, contents.items.len(), written);
    report.recycled_bytes = recycled_bytes;
    report.seconds.plan = planned;
    report.seconds.total = started.elapsed().as_secs_f64();
    Ok((receipt, report))
}

/// Removes the files of earlier writes of this rank: it frees their room, and tells whoever still writes to
/// them.
fn take_over(places: &Places, rank: u32) -> Result<()> {
    for dir in places.dirs() {
        for name in file_names(dir)? {
            let shard = names::written(&name).map(|(shard, _)| shard);
            if shard.and_then(names::shard_rank) == Some(rank) {
                dir::remove(&dir.join(name))?;
            }
        }
    }
    Ok(())
}

/// Whether no other process has removed the files of this write.
fn check_there(dir: &Path, rank: u32, files: &[PathBuf]) -> Result<()> {
    if files.iter().all(|file| dir::has(file)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the files that rank {rank} has written into {} are gone: another write of this rank took over, or \
         the coordinator gave the save up. If two processes run as rank {rank}, stop this one",
        dir.display()
    )))
}
