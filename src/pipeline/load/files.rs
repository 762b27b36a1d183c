//! Opens the files of a load, under whichever name each has now.

use super::reads::{Reads, ShardFile};
use crate::config::{Config, Switch};
use crate::engine::io_mode::{IoMode, Stage};
use crate::engine::queue::Queue;
use crate::error::{Error, GO_BACK, Result, is_bad_medium};
use crate::object::{Bucket, ObjectFile, is_url};
use crate::pipeline::job::Job;
use crate::pipeline::open::{Attempt, OpenFailure, attach, by_directory, open_each, try_read};
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::transfers::{CachedFile, OpenFile, OpenFiles, Opened};
use crate::plan::load::BlockRead;
use crate::sys::file_system::FileSystem;
use crate::sys::page_cache::{Held, held};
use crate::sys::{dir, file, rlimit};
use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Opens all files that are read, those of each directory with the first I/O mode that passes its trial
/// there. From then on nobody can take them away. A file that is gone by now is read from a copy of the checkpoint, if there
/// is one that has it.
pub(in crate::pipeline) fn open(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    job: &Arc<Job>,
) -> Result<(OpenFiles, Moved)> {
    let mut files = Cow::Borrowed(reads.files);
    loop {
        match open_all(runtime, config, reads, &files, job) {
            Err(error) if is_gone(&error) && replace_gone(reads, &mut files, &error) => {}
            Err(error) if error.is_not_found() => return Err(missing(reads, error)),
            opened => return opened,
        }
    }
}

fn open_all(
    runtime: &Runtime,
    config: &Config,
    reads: Reads,
    files: &[ShardFile],
    job: &Arc<Job>,
) -> Result<(OpenFiles, Moved)> {
    let paths: Vec<Option<&Path>> = files
        .iter()
        .zip(reads.by_file())
        .map(|(shard, blocks)| (!blocks.is_empty()).then_some(shard.path.as_path()))
        .collect();
    let is_own = |(path, own): (&Option<&Path>, &ShardFile)| path.is_some_and(|p| p == own.path);
    let has_own = paths.iter().zip(reads.files).any(is_own);
    // A checkpoint with copies may have some files here and some in a store.
    let objects = open_objects(&paths)?;
    let on_disks: Vec<Option<&Path>> = paths
        .iter()
        .zip(&objects)
        .map(|(path, object)| path.filter(|_| object.is_none()))
        .collect();
    let count = on_disks.iter().flatten().count();
    rlimit::make_room_for(count);
    let mut opened = open_each(runtime, config, &on_disks, |numbers, queue, mode| {
        let shards = numbers.iter().map(|&number| &files[number]);
        Ok((open_in_directory(queue, mode, shards)?, Vec::new()))
    });
    // What the caller named is not replaced: neither `direct = on` nor an engine of its own.
    if reads.page_cache
        && config.direct != Switch::On
        && !runtime.has_given_engine()
        && let Ok((opened, _)) = &mut opened
    {
        open_cached(reads, files, opened, count);
    }
    if has_own {
        reads.owner.check_same(opened.is_ok())?;
    }
    let (opened, mut moved) = opened?;
    reads.owner.check_copies(&paths)?;
    if objects.iter().any(Option::is_some) {
        moved.engine = match opened.iter().any(Option::is_some) {
            true => format!("{} and {HTTP}", moved.engine),
            false => HTTP.into(),
        };
    }
    let opened = opened.into_iter().zip(objects);
    let opened = opened.map(|(file, object)| file.map(Opened::File).or(object));
    Ok((OpenFiles::of(opened.collect(), job), moved))
}

/// Whether a file, or the whole checkpoint, was removed since it was opened.
fn is_gone(error: &Error) -> bool {
    error.is_not_found() || matches!(error, Error::NoCheckpoint { .. })
}

/// Replaces the checkpoint's own files that are gone by those of its copies; returns whether that changed anything.
fn replace_gone(reads: Reads, files: &mut Cow<'_, [ShardFile]>, error: &Error) -> bool {
    let is_there = |path: &Path| is_url(path) || dir::has(path);
    let is_removed = matches!(error, Error::NoCheckpoint { .. });
    let mut is_changed = false;
    for (number, (own, blocks)) in reads.files.iter().zip(reads.by_file()).enumerate() {
        let is_left = match is_url(&own.path) {
            true => !is_removed, // only the manifest was asked for
            false => is_there(&own.path) || is_there(&own.other_path),
        };
        if blocks.is_empty() || is_left || files[number].path != own.path {
            continue;
        }
        reads.owner.read_copy(number, &"it was removed after it was opened", &mut |copy| {
            if is_there(copy) {
                let shard = &mut files.to_mut()[number];
                (shard.path, shard.other_path) = (copy.into(), copy.into());
                is_changed = true;
            }
            is_there(copy)
        });
    }
    is_changed
}

/// Says that a file of a committed checkpoint is gone.
fn missing(reads: Reads, error: Error) -> Error {
    match &error {
        Error::Io { path, .. } if reads.files.iter().any(|file| file.path == *path) => {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            let reason = format!(
                "{file} was there when it was opened, and is gone; restore it, or {GO_BACK}"
            );
            Error::MissingFiles { path: reads.dir.into(), reason }
        }
        _ => error,
    }
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

/// Opens the files anew of which the page cache holds something, to read that from there. A file of which this fails is
/// read without the page cache.
fn open_cached(
    reads: Reads,
    files: &[ShardFile],
    opened: &mut [Option<OpenFile>],
    descriptors: usize,
) {
    let is_held = |open: &OpenFile, blocks: &[BlockRead]| {
        blocks.iter().any(|block| held(&open.file, &block.range()) != Held::Nothing)
    };
    let mut anew = Vec::new();
    for ((number, open), blocks) in opened.iter_mut().enumerate().zip(reads.by_file()) {
        match open {
            Some(open) if is_held(open, blocks) && file::is_direct(&open.file) => anew.push(number),
            Some(open) if is_held(open, blocks) => {
                open.cached = Some(CachedFile::shared(&open.file))
            }
            _ => {}
        }
    }
    if anew.is_empty() || !rlimit::make_room_for(descriptors + anew.len()) {
        return;
    }
    for number in anew {
        let Some(open) = &mut opened[number] else { continue };
        // Another host may have changed what this one's page cache holds.
        if FileSystem::of_open(&open.file).is_ok_and(|system| !system.is_shared()) {
            open.cached = open_shard(&files[number], false).ok().map(CachedFile::own);
        }
    }
}

/// Opens a shard under the name that it has now.
pub(crate) fn open_shard(shard: &ShardFile, direct: bool) -> io::Result<File> {
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
