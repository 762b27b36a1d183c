//! Opens the files of a load, under whichever name each has now.

use super::reads::{Reads, ShardFile};
use crate::config::Config;
use crate::engine::io_mode::{IoMode, Stage};
use crate::engine::queue::Queue;
use crate::error::{Result, is_bad_medium};
use crate::object::{Bucket, ObjectFile, is_url};
use crate::pipeline::job::Job;
use crate::pipeline::open::{Attempt, OpenFailure, attach, open_each, try_read};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{OpenFile, OpenFiles, Opened};
use crate::sys::{file, rlimit};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Opens all files that are read, those of each directory with the first I/O mode that passes its trial
/// there. From then on nobody can take them away. If the load `collects` damage, a trial may hit a bad sector.
pub(super) fn open(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
    collects: bool,
) -> Result<(OpenFiles, Moved)> {
    let paths: Vec<Option<&Path>> = reads
        .files
        .iter()
        .zip(reads.by_file())
        .map(|(shard, blocks)| (!blocks.is_empty()).then_some(shard.path.as_path()))
        .collect();
    if is_url(reads.dir) {
        return Ok((
            open_objects(reads, &paths, job)?,
            Moved { engine: HTTP.into(), ..Moved::default() },
        ));
    }
    rlimit::make_room_for(paths.iter().flatten().count());
    let opened = open_each(runtime, config, &paths, |numbers, queue, mode| {
        let shards = numbers.iter().map(|&number| &reads.files[number]);
        Ok((open_in_directory(queue, mode, shards, collects)?, Vec::new()))
    });
    let opened = opened.map(|(files, moved)| (OpenFiles::new(files, job), moved));
    if !reads.blocks.is_empty() {
        reads.owner.check_same(opened.is_ok())?;
    }
    opened
}

/// Opens all files that `reads` names, for a caller that reads by itself.
pub(in crate::pipeline) fn open_all(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(OpenFiles, Moved)> {
    open(runtime, config, reads, job, false)
}

/// The engine of objects, in reports.
const HTTP: &str = "http";

/// Opens objects, which takes no request: each read says whether there is still one of its name.
fn open_objects(reads: Reads, urls: &[Option<&Path>], job: &Arc<Job>) -> Result<OpenFiles> {
    let bucket = Arc::new(Bucket::at(reads.dir)?);
    let object = |url: &Path| {
        let name = url.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        Opened::Object(ObjectFile::new(bucket.clone(), name))
    };
    let opened = urls.iter().map(|url| url.map(object)).collect();
    reads.owner.check_same(true)?;
    Ok(OpenFiles::of(opened, job))
}

/// Opens files of one directory.
fn open_in_directory<'a>(
    queue: &Arc<Queue>,
    mode: &IoMode,
    shards: impl Iterator<Item = &'a ShardFile>,
    collects: bool,
) -> Attempt<Vec<OpenFile>> {
    let mut files = Vec::new();
    for shard in shards {
        let failed = |stage, doing| OpenFailure::of(stage, doing, &shard.path);
        let file = open_shard(shard, mode.direct).map_err(failed(Stage::Open, "opening"))?;
        let open = attach(queue, &shard.path, file)?;
        if files.is_empty() {
            match try_read(&open) {
                // No other mode reads a bad sector; its own read says that it is bad.
                Err(error) if collects && is_bad_medium(&error) => {}
                tried => tried.map_err(failed(Stage::Trial, "reading"))?,
            }
        }
        files.push(open);
    }
    Ok(files)
}

/// Opens a shard under the name that it has now.
fn open_shard(shard: &ShardFile, direct: bool) -> io::Result<File> {
    // Three attempts: a save that commits renames it once, perhaps between the first two.
    let mut opened = file::open_read(&shard.path, direct);
    for path in [&shard.other_path, &shard.path] {
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                opened = file::open_read(path, direct);
            }
            _ => break,
        }
    }
    opened
}
