//! A save: lay out, write, commit. [`write_rank`](crate::store::write::write_rank::write_rank()) writes one rank's
//! share of a save by several.

use crate::engine::fallback::Fallback;
use crate::error::{Error, Result};
use crate::format::{FileEntry, Item, Manifest, names};
use crate::pipeline::fallbacks::warn_once_of;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::report::TARGET;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::save as pipeline;
use crate::pipeline::save::{Check, Written};
use crate::pipeline::trace::What;
use crate::plan::save::{Options, SavePlan, Shard, plan_changed};
use crate::plan::unchanged::Unchanged;
use crate::state::{Contents, StateDict};
use crate::store::layout::recycled;
use crate::store::layout::stripes::Stripes;
use crate::store::write::link::Destination;
use crate::store::write::reuse::Reuse;
use crate::store::write::transaction::Transaction;
use crate::sys::inodes;
use crate::sys::open_dir::Dir;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// See [`save`](crate::save).
pub fn save(
    runtime: &Runtime,
    state: &StateDict<'_>,
    path: &Path,
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let save = || state.while_locked(|| save_all(runtime, state, path, job));
    let saved = job.traced(runtime.config(), save);
    saved.inspect(|report| tracing::info!(target: TARGET, "{report}"))
}

fn save_all(
    runtime: &Runtime,
    state: &StateDict<'_>,
    path: &Path,
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let started = Instant::now();
    let (contents, tree) = (state.contents(), state.tree()?);
    contents.check_sizes()?;
    state.check_apart()?;
    let mut transaction = Transaction::begin(path, &runtime.config().stripe)?;
    transaction.recycle(runtime.config().recycle);
    if state.is_only_new() {
        transaction.only_new()?;
    }
    let (generation, create) = (transaction.generation(), transaction.create());
    let mut links = Vec::new();
    let to = Destination {
        stripes: transaction.stripes(),
        rank: 0,
        generation,
        name: &names::uncommitted,
        create,
    };
    let reuse = contents.reuse(runtime, &to, |path| links.push(path.to_path_buf()), job);
    transaction.begin_files(&links);
    let mut reuse = reuse?;
    let planning = Instant::now();
    let unchanged = std::mem::take(&mut reuse.unchanged);
    let plan = contents.plan(runtime, transaction.stripes(), 0, generation, unchanged)?;
    let mut paths = paths(&plan, transaction.stripes(), 0, names::uncommitted);
    transaction.begin_files(&paths);
    let (stripes, dirs) = (transaction.stripes(), transaction.opened()?);
    let files = NewFiles { stripes, dirs: &dirs, paths: &paths, create };
    let planned = planning.elapsed().as_secs_f64();
    job.note(What::Plan, planning, None, 0);
    let written = contents.write_recycling(runtime, &plan, files, job);
    let (mut written, recycled_bytes) = written.inspect_err(|error| transaction.disown(error))?;

    let committing = Instant::now();
    let tensors = plan.entries(contents.items);
    let files = file_entries(&plan, &mut written, &reuse);
    paths.extend(reuse.files.iter().map(|(path, _)| path.clone()));
    let block_bytes = runtime.config().checksum_bytes();
    let mut manifest = Manifest::new(generation, 1, block_bytes, files, tensors, tree);
    manifest.step = state.saved_step();
    manifest.take_place(path);
    manifest.metrics.clone_from(state.saved_metrics());
    manifest.stripes = transaction.stripes().noted(paths.iter().map(PathBuf::as_path));
    written.moved.fallbacks.extend(transaction.commit(&manifest)?);
    job.note(What::Commit, committing, None, 0);
    let mut report = report(path, generation, &plan, contents.items.len(), written);
    reuse.add_to(&mut report);
    (report.step, report.recycled_bytes) = (state.saved_step(), recycled_bytes);
    report.seconds.plan = planned;
    report.seconds.commit = committing.elapsed().as_secs_f64();
    report.seconds.total = started.elapsed().as_secs_f64();
    Ok(report)
}

/// The files that a save writes its shards to.
pub(in crate::store) struct NewFiles<'a> {
    pub stripes: &'a Stripes,
    /// The directories that they are in, open.
    pub dirs: &'a [Arc<Dir>],
    /// One for each shard.
    pub paths: &'a [PathBuf],
    /// Creates one. Never opens an existing one: another process may still write to it.
    pub create: fn(&Path, bool) -> io::Result<File>,
}

impl Contents<'_> {
    pub(in crate::store) fn plan(
        &self,
        runtime: &Runtime,
        stripes: &Stripes,
        rank: u32,
        generation: u64,
        unchanged: Unchanged,
    ) -> Result<SavePlan> {
        let config = runtime.config();
        let (block_bytes, shard_bytes) = (config.block_bytes, config.shard_bytes);
        let lanes = stripes.lanes(config.files);
        let apart = &self.parts()?;
        let options = Options { rank, generation, block_bytes, shard_bytes, lanes, apart };
        let plan = plan_changed(self.items, options, unchanged)?;
        Ok(SavePlan { is_hashed: self.base.is_some(), ..plan })
    }

    /// Writes the planned shards, over recycled files if there are any. Also returns the recycled bytes.
    pub(in crate::store) fn write_recycling(
        &self,
        runtime: &Runtime,
        plan: &SavePlan,
        files: NewFiles<'_>,
        job: &Arc<Job>,
    ) -> Result<(Written, u64)> {
        let NewFiles { stripes, dirs, paths, create } = files;
        let claimed = recycled::claim(dirs, &plan.shards, paths)?;
        for path in paths.iter().filter(|path| !claimed.files.contains(*path)) {
            create(path, false).map_err(|e| inodes::creating(path, e))?;
        }
        let (mut written, gave_up) = match plan.shards.is_empty() {
            true => (self.write_nothing(job)?, None),
            false => self.write_giving_up(runtime, plan, (stripes, dirs, paths), job)?,
        };
        written.moved.fallbacks.extend(claimed.refused);
        if let Some(gave_up) = gave_up {
            warn_once_of(stripes.own(), &gave_up.wanted, &gave_up);
            written.moved.fallbacks.push(gave_up);
        }
        if let Some(shared) = stripes.shared_disk() {
            warn_once_of(stripes.own(), &shared.wanted, &shared);
            written.moved.fallbacks.push(shared);
        }
        Ok((written, claimed.bytes))
    }

    /// Writes the planned shards. If the disk is full, removes the remaining recycled files and tries once more.
    fn write_giving_up(
        &self,
        runtime: &Runtime,
        plan: &SavePlan,
        (stripes, dirs, paths): (&Stripes, &[Arc<Dir>], &[PathBuf]),
        job: &Arc<Job>,
    ) -> Result<(Written, Option<Fallback>)> {
        let write = || self.write(runtime, plan, (stripes.own(), paths), job);
        let error = match write() {
            // Retry only if no byte was copied: tensors may change after that.
            Err(error) if error.is_disk_full() && job.progress().staged == 0 && !job.stopped() => {
                error
            }
            written => return Ok((written?, None)),
        };
        match recycled::give_up(dirs)? {
            0 => Err(error),
            bytes => Ok((write()?, Some(recycled::gave_up(bytes, &error)))),
        }
    }

    /// The end of a save whose files are all linked, or which has no tensors.
    fn write_nothing(&self, job: &Arc<Job>) -> Result<Written> {
        if !self.items.is_empty() {
            self.check.map_or(Ok(()), |check| check())?;
        }
        self.held.unlock();
        job.set_staged();
        Ok(Written::nothing())
    }

    /// Writes the planned shards to existing files.
    pub(in crate::store) fn write(
        &self,
        runtime: &Runtime,
        plan: &SavePlan,
        (dir, paths): (&Path, &[PathBuf]),
        job: &Arc<Job>,
    ) -> Result<Written> {
        job.set_total(plan.file_bytes());
        let staged = || {
            self.check.map_or(Ok(()), |check| check())?;
            self.held.unlock();
            Ok(())
        };
        let sources = (self.items, self.sources, Some(&staged as Check<'_>));
        pipeline::write(runtime, plan, sources, (dir, paths), job)
    }

    /// Refuses a base: an exported model has no manifest to store hashes in.
    pub(in crate::store) fn refuse_base(&self) -> Result<()> {
        match self.base {
            None => Ok(()),
            Some(_) => {
                Err(Error::invalid("an exported model is written whole: export it without a base"))
            }
        }
    }

    /// Checks that each source has as many bytes as its dtype and shape need.
    pub(in crate::store) fn check_sizes(&self) -> Result<()> {
        if self.items.len() != self.sources.len() {
            let (items, sources) = (self.items.len(), self.sources.len());
            return Err(Error::invalid(format!(
                "{items} tensors were named, {sources} handed over"
            )));
        }
        for (Item { info, .. }, source) in self.items.iter().zip(self.sources) {
            info.check_bytes(source.nbytes())?;
        }
        Ok(())
    }
}

/// The path that each shard is written to; `name` turns the shard's name into the file's.
pub(in crate::store) fn paths(
    plan: &SavePlan,
    stripes: &Stripes,
    rank: u32,
    name: impl Fn(&str) -> String,
) -> Vec<PathBuf> {
    let path = |shard: &Shard| stripes.dir_of(shard, rank).join(name(&shard.name));
    plan.shards.iter().map(path).collect()
}

/// The manifest's entries of the files that were written, and of those that were linked. Takes the checksums.
pub(in crate::store) fn file_entries(
    plan: &SavePlan,
    written: &mut Written,
    reuse: &Reuse,
) -> Vec<FileEntry> {
    let mut hashes = std::mem::take(&mut written.hashes).into_iter();
    let entry = |(shard, crc32): (&Shard, Vec<u32>)| FileEntry {
        name: shard.name.clone(),
        bytes: shard.bytes,
        crc32,
        hashes: hashes.next().unwrap_or_default(),
    };
    let written = plan.shards.iter().zip(std::mem::take(&mut written.crc32)).map(entry);
    written.chain(reuse.files.iter().map(|(_, entry)| entry.clone())).collect()
}

pub(in crate::store) fn report(
    path: &Path,
    generation: u64,
    plan: &SavePlan,
    tensors: usize,
    written: Written,
) -> SaveReport {
    SaveReport {
        path: path.into(),
        step: None,
        generation,
        tensors,
        tensor_bytes: plan.tensor_bytes,
        file_bytes: plan.file_bytes(),
        files: plan.shards.len(),
        linked_bytes: 0,
        unchanged_bytes: 0,
        recycled_bytes: 0,
        pool_bytes: written.pool_bytes,
        moved: written.moved,
        seconds: written.seconds,
    }
}
