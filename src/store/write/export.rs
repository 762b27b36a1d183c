//! Writes the weights of a model as Hugging Face's programs read them: plain safetensors files, and an index if
//! there are several. The pipeline is that of a save, but there is neither a manifest nor a checksum.

use crate::error::Result;
use crate::format::names;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::report::TARGET;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::trace::What;
use crate::plan::save::plan_model;
use crate::state::StateDict;
use crate::store::write::model_files::{begin, check_plain, publish};
use crate::store::write::save::report;
use crate::sys::file;
use crate::sys::inodes;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// See [`Store::export`](crate::Store::export).
///
/// No file ends in `.safetensors` before all have been written. A kill between the renames leaves
/// numbered files beside `model.safetensors.index.json.part`: [`OpenOptions::foreign`] refuses such
/// a directory, and the next export into it removes them first. On a shared file system that one is refused until
/// somebody removes `.ringstow-model`: only they know that no other host is exporting there.
///
/// If the last sync fails, the model is removed again. If the disk refuses that too, the error is
/// [`Error::NotDurable`]: the model is there, complete, and may not survive a crash.
///
/// [`OpenOptions::foreign`]: crate::OpenOptions::foreign
/// [`Error::NotDurable`]: crate::Error::NotDurable
pub fn export(
    runtime: &Runtime,
    state: &StateDict<'_>,
    path: &Path,
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let export = || state.while_locked(|| export_all(runtime, state, path, job));
    let exported = job.traced(runtime.config(), export);
    exported.inspect(|report| tracing::info!(target: TARGET, "{report}"))
}

fn export_all(
    runtime: &Runtime,
    state: &StateDict<'_>,
    path: &Path,
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let started = Instant::now();
    let contents = state.contents();
    contents.check_sizes()?;
    contents.refuse_base()?;
    check_plain(contents.items)?;
    let config = runtime.config();
    let plan = plan_model(contents.items, config.block_bytes, config.shard_bytes)?;
    let mut rollback = begin(path)?;
    let files: Vec<PathBuf> =
        plan.shards.iter().map(|shard| path.join(names::uncommitted(&shard.name))).collect();
    let planned = started.elapsed().as_secs_f64();
    job.note(What::Plan, started, None, 0);
    rollback.files.extend_from_slice(&files);
    for file in &files {
        file::create_new(file, false)
            .map_err(|e| inodes::creating(file, e))
            .inspect_err(|error| rollback.disown(error))?;
    }
    let written = contents.write(runtime, &plan, (path, &files), job)?;

    let committing = Instant::now();
    publish(&plan, contents.items, (path, names::uncommitted), &mut rollback)?;
    job.note(What::Commit, committing, None, 0);
    let mut report = report(path, 0, &plan, contents.items.len(), written);
    report.seconds.plan = planned;
    report.seconds.commit = committing.elapsed().as_secs_f64();
    report.seconds.total = started.elapsed().as_secs_f64();
    Ok(report)
}

#[cfg(test)]
mod tests;
