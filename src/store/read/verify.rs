//! Checks a checkpoint against its checksums: all of it, or some tensors, so that a load can skip damaged ones.

use crate::error::{Error, Result};
use crate::pipeline::job::Job;
use crate::pipeline::load::{ShardFile, check};
use crate::pipeline::report::{Damage, DamagedTensor, VerifyReport};
use crate::pipeline::runtime::Runtime;
use crate::plan::load::Want;
use crate::store::read::again::while_replaced;
use crate::store::read::checkpoint::{Checkpoint, OpenOptions};
use crate::store::read::fault::{Fault, FaultKind, wants_of};
use crate::store::read::load::{Fetched, LoadOptions, Loading};
use crate::store::read::places::bytes_of;
use crate::sys::file;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Reads every byte of the checkpoint at `path` and compares each checksum chunk with its checksum. The report lists
/// all damage, and the tensors that it hits: chunks that differ, bad sectors, files that are missing or cut, that are no files, or
/// that this process may not open. If a save
/// replaces the checkpoint meanwhile, the result is entirely of the old or entirely of the new one.
///
/// # Errors
/// What [`OpenOptions::open`] returns with `damaged`, a damaged manifest included; failures to read other than damage.
pub fn verify(runtime: &Runtime, path: &Path, job: &Arc<Job>) -> Result<VerifyReport> {
    job.traced(runtime.config(), || while_replaced(|| verify_once(runtime, path, job)))
}

fn verify_once(runtime: &Runtime, path: &Path, job: &Arc<Job>) -> Result<VerifyReport> {
    let started = Instant::now();
    let checkpoint = OpenOptions::new().damaged(true).open_once(path, runtime.config())?;
    let here: Vec<usize> = checkpoint.files_here().collect();
    let all: Vec<Want> =
        here.iter().map(|&file| Want { file, range: 0..checkpoint.files[file].bytes }).collect();
    let (damage, Fetched { bytes: read_bytes, read }) =
        checkpoint.check_wants(&all, runtime, job)?;
    Ok(VerifyReport {
        path: path.into(),
        files: here.len(),
        elsewhere: checkpoint.files.len() - here.len(),
        blocks: here.iter().map(|&file| checkpoint.files[file].crc32.len()).sum(),
        read_bytes,
        damage,
        problem: checkpoint.problem.clone(),
        tensors: checkpoint.tensors().len(),
        moved: read.moved,
        seconds: started.elapsed().as_secs_f64(),
    })
}

impl Checkpoint {
    /// Reads what is wanted of the files, as far as it exists, and compares it with its checksums. Returns all damage
    /// to the files by file and offset, and what was read.
    ///
    /// # Errors
    /// Failures that are not damage.
    pub(in crate::store) fn check_wants(
        &self,
        wants: &[Want],
        runtime: &Runtime,
        job: &Arc<Job>,
    ) -> Result<(Vec<Damage>, Fetched)> {
        let file_bytes = self.file_bytes();
        let mut faults = self.faults.clone();
        loop {
            let there: Vec<Want> =
                wants.iter().map(|want| self.readable_of(want, &faults)).collect();
            let unit = self.checked_unit(runtime.config().block_bytes);
            let blocks = unit.reads(&there, &file_bytes);
            let bytes = bytes_of(&blocks);
            job.set_total(bytes);
            match check(runtime, self.reads(&blocks, true), job) {
                Ok((mut damage, read)) => {
                    let here = faults.iter().filter(|fault| fault.kind != FaultKind::Elsewhere);
                    damage.extend(here.map(|fault| self.damage_of(fault)));
                    damage.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
                    return Ok((damage, Fetched { bytes, read }));
                }
                Err(error) => {
                    let first = self.fault_behind(error, &faults)?;
                    let others = self.refused(&faults).filter(|fault| fault.file != first.file);
                    let others: Vec<Fault> = others.collect();
                    faults.push(first);
                    faults.extend(others);
                    faults.sort_by_key(|fault| fault.file);
                }
            }
        }
    }

    /// The faults of all files that cannot be opened now, besides those that are known: each would end a pass of its own.
    fn refused(&self, known: &[Fault]) -> impl Iterator<Item = Fault> {
        let unknown = |file: &usize| Fault::in_file(known, *file).is_none();
        (0..self.files.len()).filter(unknown).filter_map(|number| {
            let ShardFile { path, bytes, .. } = &self.files[number];
            Fault::of_error(number, *bytes, &file::open_read(path, false).err()?)
        })
    }

    /// The fault of a file that cannot be opened.
    ///
    /// # Errors
    /// An error that says nothing about a file, and one of a file whose fault is known.
    fn fault_behind(&self, error: Error, known: &[Fault]) -> Result<Fault> {
        let Error::Io { doing: "opening", path, cause, .. } = &error else { return Err(error) };
        let is_it = |file: &ShardFile| [&file.path, &file.other_path].contains(&path);
        let unknown = |file: &usize| Fault::in_file(known, *file).is_none();
        let file = self.files.iter().position(is_it).filter(unknown);
        let fault = file.and_then(|file| Fault::of_error(file, self.files[file].bytes, cause));
        fault.ok_or(error)
    }

    /// Reads and checks the tensors of these names, and returns those that are damaged, in the order of the names. A
    /// tensor is damaged if a checksum chunk with bytes of it is not what was written, or cannot be read.
    ///
    /// # Errors
    /// [`Error::Keys`] listing all names that are not in the checkpoint; [`Error::Invalid`] without checksums: for
    /// another program's files, or with `verify` off; failures that are not damage.
    pub fn damaged<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
        options: LoadOptions<'_>,
    ) -> Result<Vec<DamagedTensor>> {
        let (runtime, job) = self.resources(options)?;
        let names: Vec<S> = names.into_iter().collect();
        let loading = self.loading(options.verify, &runtime, &job);
        self.find_damaged(&names, loading).map(|(damaged, _)| damaged)
    }

    /// [`Checkpoint::damaged`], and what was read to find out.
    pub(in crate::store) fn find_damaged<S: AsRef<str>>(
        &self,
        names: &[S],
        loading: Loading,
    ) -> Result<(Vec<DamagedTensor>, Fetched)> {
        if !loading.verify {
            return Err(Error::invalid(format!(
                "{}: damage is found by its checksums, so on_corrupt = skip needs verify = true and a checkpoint of \
                 ringstow's",
                self.path().display()
            )));
        }
        for fault in self.faults.iter().filter(|fault| fault.lost.is_empty()) {
            let (file, Fault { expected, got, .. }) =
                (self.files[fault.file].path.display(), fault);
            tracing::warn!(%file, expected, got, "a file is longer than the manifest says; the bytes that it lists are checked and loaded");
        }
        let requests = self.find(names)?;
        let wants: Vec<Want> =
            requests.iter().flat_map(|request| wants_of(request.entry)).collect();
        let (damage, checked) = self.check_wants(&wants, loading.runtime, loading.job)?;
        let mut found = DamagedTensor::all_in(&damage);
        let names = requests.iter().map(|request| request.entry.name.as_str());
        let order: HashMap<&str, usize> = names.zip(0..).collect();
        found.retain(|tensor| order.contains_key(tensor.name.as_str()));
        found.sort_by_key(|tensor| order[tensor.name.as_str()]);
        Ok((found, checked))
    }
}
