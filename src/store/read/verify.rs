//! Checks all of a checkpoint against its checksums.

use crate::error::Result;
use crate::pipeline::job::Job;
use crate::pipeline::load::check;
use crate::pipeline::report::VerifyReport;
use crate::pipeline::runtime::Runtime;
use crate::plan::load::all_blocks;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fingerprint::while_replaced;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Reads every byte of the checkpoint at `path` and compares each block's checksum. Damaged blocks
/// are listed in the report. If a save replaces the checkpoint meanwhile, it is all of the one or all of the
/// other that was read.
///
/// # Errors
/// What [`Checkpoint::open`] gives, a file of another length among it, and failures to read.
pub fn verify(runtime: &Runtime, path: &Path, job: &Arc<Job>) -> Result<VerifyReport> {
    while_replaced(|| verify_once(runtime, path, job))
}

fn verify_once(runtime: &Runtime, path: &Path, job: &Arc<Job>) -> Result<VerifyReport> {
    let started = Instant::now();
    let checkpoint = Checkpoint::open_once(path, runtime.config())?;
    let file_bytes: Vec<u64> = checkpoint.files.iter().map(|file| file.bytes).collect();
    let blocks = all_blocks(&file_bytes, checkpoint.checked_unit(runtime.config().block_bytes));
    job.set_total(file_bytes.iter().sum());
    let reads = checkpoint.reads(&blocks, true);
    let (damage, read) = check(runtime, reads, job)?;
    Ok(VerifyReport {
        path: path.into(),
        files: file_bytes.len(),
        blocks: checkpoint.files.iter().map(|file| file.crc32.len()).sum(),
        read_bytes: file_bytes.iter().sum(),
        damage,
        moved: read.moved,
        seconds: started.elapsed().as_secs_f64(),
    })
}
