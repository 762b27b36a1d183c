//! Opens the files of a load, under whichever name each has now.

use super::reads::{Reads, ShardFile};
use crate::config::Config;
use crate::engine::io_mode::{IoMode, Stage};
use crate::engine::queue::Queue;
use crate::error::{Result, is_bad_medium};
use crate::object::{Bucket, ObjectFile, is_url};
use crate::pipeline::job::Job;
use crate::pipeline::open::{Attempt, OpenFailure, attach, by_directory, open_each, try_read};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{OpenFile, OpenFiles, Opened};
use crate::sys::{file, rlimit};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Opens all files that are read, those of each directory with the first I/O mode that passes its trial
/// there. From then on nobody can take them away.
pub(in crate::pipeline) fn open(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(OpenFiles, Moved)> {
    let paths: Vec<Option<&Path>> = reads
        .files
        .iter()
        .zip(reads.by_file())
        .map(|(shard, blocks)| (!blocks.is_empty()).then_some(shard.path.as_path()))
        .collect();
    // A checkpoint with copies may have some files here and some in a store.
    let objects = open_objects(&paths)?;
    let paths: Vec<Option<&Path>> = paths
        .iter()
        .zip(&objects)
        .map(|(path, object)| path.filter(|_| object.is_none()))
        .collect();
    rlimit::make_room_for(paths.iter().flatten().count());
    let opened = open_each(runtime, config, &paths, |numbers, queue, mode| {
        let shards = numbers.iter().map(|&number| &reads.files[number]);
        Ok((open_in_directory(queue, mode, shards)?, Vec::new()))
    });
    if !reads.blocks.is_empty() {
        reads.owner.check_same(opened.is_ok())?;
    }
    let (files, mut moved) = opened?;
    if objects.iter().any(Option::is_some) {
        moved.engine = match files.iter().any(Option::is_some) {
            true => format!("{} and {HTTP}", moved.engine),
            false => HTTP.into(),
        };
    }
    let opened = files.into_iter().zip(objects);
    let opened = opened.map(|(file, object)| file.map(Opened::File).or(object));
    Ok((OpenFiles::of(opened.collect(), job), moved))
}

/// The engine of objects, in reports.
const HTTP: &str = "http";

/// Opens the objects among files, which takes no request: each read says whether there is still one of its name.
fn open_objects(paths: &[Option<&Path>]) -> Result<Vec<Option<Opened>>> {
    let mut opened: Vec<Option<Opened>> = paths.iter().map(|_| None).collect();
    let urls: Vec<Option<&Path>> = paths.iter().map(|path| path.filter(|p| is_url(p))).collect();
    for (dir, numbers) in by_directory(&urls) {
        let bucket = Arc::new(Bucket::at(dir)?);
        for number in numbers {
            let name = urls[number].and_then(Path::file_name).unwrap_or_default();
            let object = ObjectFile::new(bucket.clone(), name.to_string_lossy());
            opened[number] = Some(Opened::Object(object));
        }
    }
    Ok(opened)
}

/// Opens files of one directory.
fn open_in_directory<'a>(
    queue: &Arc<Queue>,
    mode: &IoMode,
    shards: impl Iterator<Item = &'a ShardFile>,
) -> Attempt<Vec<OpenFile>> {
    let mut files = Vec::new();
    for shard in shards {
        let failed = |stage, doing| OpenFailure::of(stage, doing, &shard.path);
        let file = open_shard(shard, mode.direct).map_err(failed(Stage::Open, "opening"))?;
        let open = attach(queue, &shard.path, file)?;
        if files.is_empty() {
            match try_read(&open) {
                // No other mode reads a bad sector; its own read says that it is bad.
                Err(error) if is_bad_medium(&error) => {}
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
