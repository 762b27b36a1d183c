//! One rank's share of a save by several.
//!
//! Two processes may write as the same rank: an old one that nobody stopped, and its restart or retry. The write that
//! began last counts. Each write uses file names of its own, removes the files of its rank's earlier writes, and
//! checks before its receipt that its own files still exist.

use crate::error::{Error, Result};
use crate::format::{Receipt, names};
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::report::TARGET;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::trace::What;
use crate::state::StateDict;
use crate::store::layout::stripes::Stripes;
use crate::store::write::link::Destination;
use crate::store::write::rollback::Rollback;
use crate::store::write::save::{NewFiles, file_entries, paths, report};
use crate::store::write::session::{UnderWay, await_under_way};
use crate::sys::chance::unique;
use crate::sys::dir;
use crate::sys::dir::file_names;
use crate::sys::open_dir::Dir;
use crate::sys::{file, path};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// See [`Store::write_rank`](crate::Store::write_rank).
pub fn write_rank(
    runtime: &Runtime,
    state: &StateDict<'_>,
    rank: u32,
    path: &Path,
    job: &Arc<Job>,
) -> Result<(Receipt, SaveReport)> {
    let write = || state.while_locked(|| write_part(runtime, state, rank, path, job));
    let written = job.traced(runtime.config(), write);
    written.inspect(|(_, report)| tracing::info!(target: TARGET, rank, "{report}"))
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
    let UnderWay { session, generation } = await_under_way(path, job)?;
    // From here on, a receipt of an earlier write is void.
    let done = path.join(names::done(rank));
    dir::remove(&done)?;
    let stripes = Stripes::to_save(path, &runtime.config().stripe)?;
    stripes.check_created()?;
    take_over(&stripes, rank, generation)?;
    let write = unique();
    let name = |name: &str| names::uncommitted_write(name, &write);
    let mut rollback = Rollback::new();
    // No other write has these names.
    let create = file::create_new;
    let to = Destination { stripes: &stripes, rank, generation, name: &name, create };
    let mut reuse =
        contents.reuse(runtime, &to, |path| rollback.files.push(path.to_path_buf()), job)?;
    let planning = Instant::now();
    let unchanged = std::mem::take(&mut reuse.unchanged);
    let mut plan = contents.plan(runtime, &stripes, rank, generation, unchanged)?;
    if contents.items.is_empty() {
        (plan.shards, plan.blocks) = (Vec::new(), Vec::new());
    }
    let mut files = paths(&plan, &stripes, rank, name);
    rollback.files.extend_from_slice(&files);
    let planned = planning.elapsed().as_secs_f64();
    job.note(What::Plan, planning, None, 0);
    let dirs = stripes.opened(&Dir::open(path)?)?;
    let new = NewFiles { stripes: &stripes, dirs: &dirs, paths: &files, create };
    let written = contents.write_recycling(runtime, &plan, new, job);
    let (mut written, recycled_bytes) = match written {
        // A fallback to another I/O mode opens the files again.
        Err(error) if error.is_not_found() => {
            return Err(check_there(path, rank, &files).err().unwrap_or(error));
        }
        written => written?,
    };
    files.extend(reuse.files.iter().map(|(path, _)| path.clone()));
    check_there(path, rank, &files)?;

    let receipt = Receipt {
        rank,
        session,
        write,
        block_bytes: runtime.config().checksum_bytes(),
        files: file_entries(&plan, &mut written, &reuse),
        tensors: plan.entries(contents.items).iter().collect(),
        apart: contents.apart.to_vec(),
    };
    file::write(&done, receipt.mark().as_bytes())?;
    rollback.keep();
    let mut report = report(path, generation, &plan, contents.items.len(), written);
    reuse.add_to(&mut report);
    report.recycled_bytes = recycled_bytes;
    report.seconds.plan = planned;
    report.seconds.total = started.elapsed().as_secs_f64();
    Ok((receipt, report))
}

/// Removes the files of earlier writes of this rank in this generation. That frees their disk space, and a process that
/// still writes to them notices. Files of another generation may be those of a save on another host.
fn take_over(stripes: &Stripes, rank: u32, generation: u64) -> Result<()> {
    for dir in stripes.dirs() {
        for name in file_names(dir)? {
            let shard = names::split_write(&name).map(|(shard, _)| shard);
            let is_own = |shard: &str| {
                (names::shard_rank(shard), names::generation(shard)) == (Some(rank), generation)
            };
            if shard.is_some_and(is_own) {
                dir::remove(&dir.join(name))?;
            }
        }
    }
    Ok(())
}

/// Checks that no other process has removed the files of this write.
fn check_there(dir: &Path, rank: u32, files: &[PathBuf]) -> Result<()> {
    if files.iter().all(dir::has) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the files that rank {rank} has written into {} are gone: another write of this rank took over, or \
         the coordinator gave the save up. If two processes run as rank {rank}, stop this one",
        dir.display()
    )))
}
