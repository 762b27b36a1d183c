//! A save from beginning to end: lay out, write, commit.

use super::commit::Transaction;
use crate::device::Source;
use crate::error::{Error, Result};
use crate::format::{FileEntry, Manifest, TensorInfo};
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::save as pipeline;
use crate::plan::save::{Options, SavePlan, plan};
use serde_json::value::RawValue;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Saves tensors and values as the checkpoint at `path`, durably and whole or not at all.
///
/// `infos` and `sources` belong together, one by one. An earlier checkpoint at `path` stands until
/// the new one is committed.
///
/// # Errors
/// Any [`Error`]; then what was written is removed, and an earlier checkpoint is as it was.
pub fn save(
    runtime: &Runtime,
    infos: &[TensorInfo],
    sources: &[Box<dyn Source + '_>],
    state: Box<RawValue>,
    path: &Path,
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let started = Instant::now();
    check_sizes(infos, sources)?;
    let mut transaction = Transaction::begin(path)?;
    let generation = transaction.generation();
    let config = runtime.config();
    let options = Options {
        rank: 0,
        generation,
        block_bytes: config.block_bytes,
        shard_bytes: config.shard_bytes,
    };
    let plan = plan(infos, options)?;
    job.set_total(plan.file_bytes());
    transaction.begin_files(plan.shards.iter().map(|shard| shard.name.as_str()));
    let planned = started.elapsed();

    let written = pipeline::write(runtime, &plan, sources, path, job)?;

    let committing = Instant::now();
    let tensors = plan.entries(infos);
    let files = file_entries(&plan, &written.crc32);
    transaction.commit(&Manifest::new(generation, config.block_bytes, files, tensors, state))?;
    let mut seconds = written.seconds;
    seconds.plan = planned.as_secs_f64();
    seconds.commit = committing.elapsed().as_secs_f64();
    seconds.total = started.elapsed().as_secs_f64();
    Ok(SaveReport {
        path: path.into(),
        generation,
        tensors: infos.len(),
        tensor_bytes: plan.tensor_bytes,
        file_bytes: plan.file_bytes(),
        files: plan.shards.len(),
        pool_bytes: config.buffers() as u64 * config.block_bytes,
        moved: written.moved,
        seconds,
    })
}

fn file_entries(plan: &SavePlan, crc32: &[Vec<u32>]) -> Vec<FileEntry> {
    let entry = |(shard, crc32): (&crate::plan::save::Shard, &Vec<u32>)| FileEntry {
        name: shard.name.clone(),
        bytes: shard.bytes,
        crc32: crc32.clone(),
    };
    plan.shards.iter().zip(crc32).map(entry).collect()
}

/// Each source has just the bytes that its dtype and shape say.
fn check_sizes(infos: &[TensorInfo], sources: &[Box<dyn Source + '_>]) -> Result<()> {
    if infos.len() != sources.len() {
        let (infos, sources) = (infos.len(), sources.len());
        return Err(Error::invalid(format!("{infos} tensors were named, {sources} handed over")));
    }
    for (info, source) in infos.iter().zip(sources) {
        let (expected, got) = (info.nbytes()?, source.nbytes());
        if expected != got {
            return Err(Error::invalid(format!(
                "tensor {:?}: {} of shape {:?} is {expected} bytes, its data is {got}",
                info.name, info.dtype, info.shape
            )));
        }
    }
    Ok(())
}
