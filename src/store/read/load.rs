//! Loading tensors of a checkpoint: into fresh memory, or into the caller's.

use crate::device::Target;
use crate::error::{Error, Result};
use crate::format::TensorEntry;
use crate::pipeline::job::Job;
use crate::pipeline::load::{Arrivals, ReadOutcome, Reads, Scatter, read_arenas, read_into};
use crate::pipeline::report::TARGET;
use crate::pipeline::report::{DamagedTensor, LoadReport};
use crate::pipeline::runtime::Runtime;
use crate::plan::load::{BlockRead, Scattered, Unit, Want};
use crate::plan::slab::Slab;
use crate::pool::{Buffer, Mapping};
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use crate::store::read::damage::names_of;
use crate::store::read::fault::wants_of;
use crate::store::read::loaded::{LoadPlace, Loaded, LoadedTensor};
use crate::store::read::places::{arena_ranges, bytes_of, chunk_slab, lies_straight, place};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Instant;

/// What a load does about damaged tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnCorrupt {
    /// It fails.
    #[default]
    Raise,
    /// It leaves them out, and [`LoadReport::damaged`] names them. Every byte of the others is checked. The load first
    /// reads and checks all, then reads what is intact. Takes [`Checkpoint::load_names`] and
    /// [`Checkpoint::load_into`], whose targets of damaged tensors stay as they are, and no options without `verify`.
    Skip,
}

/// How to load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions<'a> {
    /// Check every checksum chunk before returning any of it. Default true.
    pub verify: bool,
    /// What to do about damaged tensors. Default: fail. To load although files are missing, also open the checkpoint
    /// with [`OpenOptions::damaged`](crate::OpenOptions::damaged).
    pub on_corrupt: OnCorrupt,
    /// The pool and engines to use. Default: those that the process shares for the checkpoint's configuration.
    pub runtime: Option<&'a Runtime>,
    /// Shows the progress to other threads, and lets them cancel the load. Default none.
    pub job: Option<&'a Arc<Job>>,
    /// What other processes read and send meanwhile.
    #[doc(hidden)]
    pub arrivals: Option<&'a Arrivals>,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self {
            verify: true,
            on_corrupt: OnCorrupt::Raise,
            runtime: None,
            job: None,
            arrivals: None,
        }
    }
}

impl<'a> LoadOptions<'a> {
    /// The same options with this runtime and job.
    pub fn on(self, runtime: &'a Runtime, job: &'a Arc<Job>) -> Self {
        Self { runtime: Some(runtime), job: Some(job), ..self }
    }
}

/// The caller's runtime, or one that the process shares.
pub(in crate::store) enum RuntimeRef<'a> {
    Given(&'a Runtime),
    Shared(Arc<Runtime>),
}

impl Deref for RuntimeRef<'_> {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        match self {
            Self::Given(runtime) => runtime,
            Self::Shared(runtime) => runtime,
        }
    }
}

/// A load in progress.
#[derive(Clone, Copy)]
pub(in crate::store) struct Loading<'a> {
    pub runtime: &'a Runtime,
    pub job: &'a Arc<Job>,
    /// Whether checksums are compared: not those of another program's files, which have none.
    pub verify: bool,
    unit: Unit,
    started: Instant,
    arrivals: Option<&'a Arrivals>,
}

impl<'a> Loading<'a> {
    /// The same load, which takes what other processes send.
    pub fn taking(self, arrivals: Option<&'a Arrivals>) -> Self {
        Self { arrivals, ..self }
    }

    /// Reads that copy what is in memory already: in the page cache, or sent by other processes.
    fn copied(self, reads: Reads<'a>) -> Reads<'a> {
        Reads { page_cache: true, arrivals: self.arrivals, ..reads }
    }
}

/// How many bytes were read from disk, and how.
pub(in crate::store) struct Fetched {
    pub bytes: u64,
    pub read: ReadOutcome,
}

/// A tensor to load.
#[derive(Clone, Copy)]
pub(in crate::store) struct Request<'a> {
    /// Its number in the manifest.
    number: usize,
    pub entry: &'a TensorEntry,
}

/// Chunks of whole tensors, and what to read for them.
struct Chunks {
    slabs: Vec<Slab>,
    /// For each slab, the number of its tensor.
    owners: Vec<usize>,
    plan: Scattered,
}

impl Checkpoint {
    /// Loads the tensors of these names into fresh memory. Reads only the checksum chunks that hold them. A tensor of
    /// one tensor chunk is used where it was read to; the others are copied together.
    ///
    /// # Errors
    /// [`Error::Keys`] listing all names that are not in the checkpoint; [`Error::MissingShare`] listing all tensors that
    /// a rank checkpoint holds only some of; [`Error::Corrupt`] for a damaged checksum chunk, naming the tensors in it;
    /// [`Error::Io`].
    pub fn load_names<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
        options: LoadOptions<'_>,
    ) -> Result<Loaded> {
        let (runtime, job) = self.resources(options)?;
        let loading = self.loading(options.verify, &runtime, &job).taking(options.arrivals);
        let names: Vec<S> = names.into_iter().collect();
        let (damaged, checked) = self.check_first(&names, options.on_corrupt, loading)?;
        let is_damaged = names_of(&damaged);
        let intact = names.iter().map(S::as_ref).filter(|name| !is_damaged.contains(name));
        let requests = self.find_whole(intact)?;
        let (tensors, mut fetches) = self.load_requests(&requests, loading, |_| {})?;
        fetches.extend(checked);
        let report = self.report(requests.len(), bytes_in(&requests), fetches, loading);
        tracing::info!(target: TARGET, "{report}");
        Ok(Loaded::new(tensors, self.values.clone(), LoadReport { damaged, ..report }))
    }

    /// [`Checkpoint::load_names`] of tensors by their numbers. `mapped` gets the place of each once the memory is there, and
    /// before it is read: nobody may use it until this returns, and nobody ever if this fails. It is not called if a tensor
    /// has several tensor chunks.
    ///
    /// # Errors
    /// As for [`Checkpoint::load_names`].
    ///
    /// # Panics
    /// If there is no tensor of a number.
    #[doc(hidden)]
    pub fn load_numbers(
        &self,
        numbers: &[usize],
        options: LoadOptions<'_>,
        mapped: impl FnOnce(Vec<LoadPlace>),
    ) -> Result<Loaded> {
        let (runtime, job) = self.resources(options)?;
        let loading = self.loading(options.verify, &runtime, &job).taking(options.arrivals);
        let request = |&number: &usize| Request { number, entry: &self.tensors()[number] };
        let requests: Vec<Request> = numbers.iter().map(request).collect();
        self.check_whole(&requests)?;
        let (tensors, fetches) = self.load_requests(&requests, loading, mapped)?;
        let report = self.report(requests.len(), bytes_in(&requests), fetches, loading);
        tracing::info!(target: TARGET, "{report}");
        Ok(Loaded::new(tensors, self.values.clone(), report))
    }

    fn load_requests(
        &self,
        requests: &[Request],
        loading: Loading,
        mapped: impl FnOnce(Vec<LoadPlace>),
    ) -> Result<(Vec<LoadedTensor>, Vec<Fetched>)> {
        let is_straight = requests.iter().all(|request| lies_straight(request.entry));
        // What is sent comes in the order of the files, for one pass.
        let lies_straight = |entry: &TensorEntry| {
            lies_straight(entry) && (loading.arrivals.is_none() || is_straight)
        };
        let (whole, parted): (Vec<_>, Vec<_>) =
            requests.iter().copied().partition(|request| lies_straight(request.entry));
        let straight = self.plan_straight(&whole, loading);
        let chunks = self.plan_chunks(&parted, loading)?;
        loading.job.set_total(bytes_of(&straight) + bytes_of(&chunks.plan.reads));
        let (mut fetches, mut read, mut assembled) = (Vec::new(), Vec::new(), Vec::new());
        // Dropped here if it is not called: its owner may wait for that.
        let mapped = parted.is_empty().then_some(mapped);
        if !whole.is_empty() || parted.is_empty() {
            let mapped = |places| mapped.map_or((), |mapped| mapped(places));
            let (tensors, fetched) = self.load_straight(&whole, &straight, loading, mapped)?;
            read = tensors;
            fetches.push(fetched);
        }
        if !parted.is_empty() {
            let (tensors, fetched) = self.assemble(&parted, &chunks, loading)?;
            assembled = tensors;
            fetches.push(fetched);
        }
        let (mut read, mut assembled) = (read.into_iter(), assembled.into_iter());
        let next = |request: &Request| match lies_straight(request.entry) {
            true => read.next(),
            false => assembled.next(),
        };
        Ok((requests.iter().filter_map(next).collect(), fetches))
    }

    /// Loads tensors into the caller's memory. Each target must have exactly as many bytes as its tensor.
    ///
    /// # Errors
    /// As for [`Checkpoint::load_names`]; [`Error::Keys`] also lists targets of another size. After [`Error::Corrupt`]
    /// and [`Error::Io`], some targets may have changed; after the others, none has.
    pub fn load_into<S: AsRef<str>>(
        &self,
        targets: &[(S, Target<'_>)],
        options: LoadOptions<'_>,
    ) -> Result<LoadReport> {
        let (runtime, job) = self.resources(options)?;
        let loading = self.loading(options.verify, &runtime, &job).taking(options.arrivals);
        let targets = targets.iter().map(|(name, target)| (name.as_ref(), target));
        let names: Vec<&str> = targets.clone().map(|(name, _)| name).collect();
        let (damaged, checked) = self.check_first(&names, options.on_corrupt, loading)?;
        let is_damaged = names_of(&damaged);
        let targets: Vec<(&str, &Target)> =
            targets.filter(|(name, _)| !is_damaged.contains(name)).collect();
        let requests = self.find_whole(targets.iter().map(|(name, _)| name))?;
        self.check_sizes(&requests, &targets)?;
        let chunks = self.plan_chunks(&requests, loading)?;
        job.set_total(bytes_of(&chunks.plan.reads));
        let fetched = self.fill(&chunks, |tensor| targets[tensor].1, loading)?;
        let fetches = std::iter::once(fetched).chain(checked).collect();
        let report = self.report(requests.len(), bytes_in(&requests), fetches, loading);
        tracing::info!(target: TARGET, "{report}");
        Ok(LoadReport { damaged, ..report })
    }

    /// Reads and checks these tensors first, if damaged ones are to be skipped. Returns the damaged ones.
    fn check_first<S: AsRef<str>>(
        &self,
        names: &[S],
        on_corrupt: OnCorrupt,
        loading: Loading,
    ) -> Result<(Vec<DamagedTensor>, Option<Fetched>)> {
        match on_corrupt {
            OnCorrupt::Raise => Ok((Vec::new(), None)),
            OnCorrupt::Skip => {
                let (damaged, checked) = self.find_damaged(names, loading)?;
                Ok((damaged, Some(checked)))
            }
        }
    }

    /// The runtime and job of a load: the caller's, or else the checkpoint's own.
    pub(in crate::store) fn resources<'a>(
        &self,
        options: LoadOptions<'a>,
    ) -> Result<(RuntimeRef<'a>, Arc<Job>)> {
        let runtime = match options.runtime {
            Some(runtime) => RuntimeRef::Given(runtime),
            None => RuntimeRef::Shared(Runtime::shared(self.config())?),
        };
        let job = options.job.map_or_else(|| Job::of(runtime.config()), Arc::clone);
        Ok((runtime, job))
    }

    /// Starts a load. Without verification it reads pages instead of whole checksum chunks.
    pub(in crate::store) fn loading<'a>(
        &self,
        verify: bool,
        runtime: &'a Runtime,
        job: &'a Arc<Job>,
    ) -> Loading<'a> {
        let verify = verify && self.kind() == CheckpointKind::Ringstow;
        let unit = match verify {
            true => self.checked_unit(runtime.config().block_bytes),
            false => Unit::Pages(runtime.config().block_bytes),
        };
        Loading { runtime, job, verify, unit, started: Instant::now(), arrivals: None }
    }

    /// Bytes that a load of these tensors at once reads.
    pub(in crate::store) fn bytes_to_read<'a>(
        &self,
        entries: impl Iterator<Item = &'a TensorEntry>,
        loading: Loading,
    ) -> u64 {
        let wants: Vec<Want> = entries.flat_map(wants_of).collect();
        bytes_of(&loading.unit.reads(&wants, &self.file_bytes()))
    }

    /// Whole checksum chunks, as many at once as a staging buffer holds.
    pub(in crate::store) fn checked_unit(&self, most: u64) -> Unit {
        Unit::Blocks { bytes: self.manifest().block_bytes, most }
    }

    /// The entries of these names. Fails if the checkpoint lacks elements of one.
    fn find_whole<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
    ) -> Result<Vec<Request<'_>>> {
        let requests = self.find(names)?;
        self.check_whole(&requests)?;
        Ok(requests)
    }

    /// Fails if the checkpoint lacks elements of a tensor.
    pub(in crate::store) fn check_whole(&self, requests: &[Request]) -> Result<()> {
        self.check_entries(requests.iter().map(|request| request.entry))?;
        requests.iter().try_for_each(|request| self.check_faults(request.entry))
    }

    /// The entries of these names. Refuses duplicates: two results cannot own one tensor's memory.
    pub(in crate::store) fn find<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
    ) -> Result<Vec<Request<'_>>> {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        let mut seen = vec![false; self.tensors().len()];
        for name in names {
            let name = name.as_ref();
            match self.number(name) {
                Some(number) if !std::mem::replace(&mut seen[number], true) => {
                    found.push(Request { number, entry: &self.tensors()[number] });
                }
                Some(_) => {
                    return Err(Error::invalid(format!("tensor {name:?} is requested twice")));
                }
                None => missing.push(name.to_owned()),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let path = self.path().into();
        Err(Error::Keys { path, missing, unexpected: Vec::new(), mismatched: Vec::new() })
    }

    fn check_sizes(&self, requests: &[Request], targets: &[(&str, &Target<'_>)]) -> Result<()> {
        let mismatched: Vec<String> = requests
            .iter()
            .zip(targets)
            .map(|(request, (_, target))| (request.entry, target))
            .filter(|(entry, target)| entry.nbytes() != target.nbytes())
            .map(|(entry, target)| {
                let (has, room) = (entry.nbytes(), target.nbytes());
                format!("{:?} has {has} bytes in the checkpoint, {room} in memory", entry.name)
            })
            .collect();
        if mismatched.is_empty() {
            return Ok(());
        }
        let path = self.path().into();
        Err(Error::Keys { path, missing: Vec::new(), unexpected: Vec::new(), mismatched })
    }

    pub(in crate::store) fn file_bytes(&self) -> Vec<u64> {
        self.files.iter().map(|file| file.bytes).collect()
    }

    /// Reads of the medium.
    pub(in crate::store) fn reads<'a>(
        &'a self,
        blocks: &'a [BlockRead],
        verify: bool,
    ) -> Reads<'a> {
        let checksum_bytes = self.manifest().block_bytes;
        Reads {
            dir: self.path(),
            files: &self.files,
            blocks,
            checksum_bytes,
            verify,
            page_cache: false,
            arrivals: None,
            owner: self,
        }
    }

    fn plan_straight(&self, requests: &[Request], loading: Loading) -> Vec<BlockRead> {
        let places: Vec<Want> = requests.iter().map(|request| place(request.entry)).collect();
        loading.unit.reads(&places, &self.file_bytes())
    }

    /// Reads tensors of one tensor chunk straight into the memory that they keep.
    fn load_straight(
        &self,
        requests: &[Request],
        reads: &[BlockRead],
        loading: Loading,
        mapped: impl FnOnce(Vec<LoadPlace>),
    ) -> Result<(Vec<LoadedTensor>, Fetched)> {
        let places: Vec<Want> = requests.iter().map(|request| place(request.entry)).collect();
        let ranges = arena_ranges(&places, reads);
        let mapped = |addresses: Vec<usize>| {
            let place = |(place, range): (&Want, &Range<usize>)| LoadPlace {
                address: addresses[place.file],
                range: range.clone(),
            };
            mapped(places.iter().zip(&ranges).map(place).collect());
        };
        let reads_of = loading.copied(self.reads(reads, loading.verify));
        let (arenas, read) = read_arenas(loading.runtime, reads_of, loading.job, mapped)?;
        let arenas: Vec<Arc<Mapping>> = arenas.into_iter().map(Arc::new).collect();
        let tensor = |(request, (place, range)): (&Request, (&Want, Range<usize>))| {
            LoadedTensor::new((&self.manifest, request.number), (&arenas[place.file], range))
        };
        let tensors = requests.iter().zip(places.iter().zip(ranges)).map(tensor).collect();
        Ok((tensors, Fetched { bytes: bytes_of(reads), read }))
    }

    /// Reads tensors of several chunks into one fresh mapping.
    fn assemble(
        &self,
        requests: &[Request],
        chunks: &Chunks,
        loading: Loading,
    ) -> Result<(Vec<LoadedTensor>, Fetched)> {
        /// Alignment for every element type, so that no two tensors share a cache line.
        const APART: usize = 64;
        let lens = requests
            .iter()
            .map(|request| (request.entry.nbytes() as usize).next_multiple_of(APART));
        let memory = Mapping::new(lens.clone().sum())
            .map_err(|e| Error::io("allocating memory for", self.path(), e))?;
        let (whole, mut buffers) = Buffer::cut(memory, lens.clone());
        let targets: Vec<Target> =
            buffers.iter_mut().map(|buffer| Target::new(&mut buffer[..])).collect();
        let fetched = self.fill(chunks, |tensor| &targets[tensor], loading)?;
        drop(buffers);
        let arena = Arc::new(whole.rejoin());
        let mut start = 0;
        let tensor = |(request, len): (&Request, usize)| {
            let range = start..start + request.entry.nbytes() as usize;
            start += len;
            LoadedTensor::new((&self.manifest, request.number), (&arena, range))
        };
        Ok((requests.iter().zip(lens).map(tensor).collect(), fetched))
    }

    fn plan_chunks(&self, requests: &[Request], loading: Loading) -> Result<Chunks> {
        let (slabs, owners) = tensor_slabs(requests)?;
        let plan = self.plan_slabs(&slabs, loading);
        Ok(Chunks { slabs, owners, plan })
    }

    /// Reads chunks into their tensors' memory.
    fn fill<'a, 'm: 'a>(
        &self,
        chunks: &Chunks,
        memory: impl Fn(usize) -> &'a Target<'m>,
        loading: Loading,
    ) -> Result<Fetched> {
        let targets: Vec<&Target> = chunks.owners.iter().map(|&tensor| memory(tensor)).collect();
        self.scatter(&chunks.slabs, &targets, &chunks.plan, loading)
    }

    pub(in crate::store) fn plan_slabs(&self, slabs: &[Slab], loading: Loading) -> Scattered {
        Scattered::plan(slabs, &self.file_bytes(), loading.unit)
    }

    /// Reads what is planned, and copies each slab into its target.
    pub(in crate::store) fn scatter(
        &self,
        slabs: &[Slab],
        targets: &[&Target],
        plan: &Scattered,
        loading: Loading,
    ) -> Result<Fetched> {
        let reads = loading.copied(self.reads(&plan.reads, loading.verify));
        let read =
            read_into(loading.runtime, reads, Scatter { slabs, targets, plan }, loading.job)?;
        Ok(Fetched { bytes: bytes_of(&plan.reads), read })
    }

    /// The report of one or more passes; `moved` is that of the first.
    pub(in crate::store) fn report(
        &self,
        tensors: usize,
        tensor_bytes: u64,
        fetches: Vec<Fetched>,
        loading: Loading,
    ) -> LoadReport {
        let read_bytes = fetches.iter().map(|fetched| fetched.bytes).sum();
        let cached_bytes = fetches.iter().map(|fetched| fetched.read.cached_bytes).sum();
        let received_bytes = fetches.iter().map(|fetched| fetched.read.received_bytes).sum();
        let mut reads = fetches.into_iter().map(|fetched| fetched.read);
        let ReadOutcome { mut moved, mut seconds, .. } = reads.next().expect("at least one pass");
        for ReadOutcome { seconds: more, .. } in reads {
            seconds.prepare += more.prepare;
            seconds.read += more.read;
            seconds.checksum_cpu += more.checksum_cpu;
        }
        moved.fallbacks.extend(self.copies.used());
        seconds.total = loading.started.elapsed().as_secs_f64();
        let (path, verified) = (self.path().into(), loading.verify);
        let (step, damaged) = (self.manifest().step, Vec::new());
        LoadReport {
            path,
            step,
            dropped: self.manifest().dropped.clone(),
            tensors,
            tensor_bytes,
            read_bytes,
            cached_bytes,
            received_bytes,
            verified,
            moved,
            seconds,
            damaged,
        }
    }
}

fn bytes_in(requests: &[Request]) -> u64 {
    requests.iter().map(|request| request.entry.nbytes()).sum()
}

/// The chunks of whole tensors as slabs in the tensors' dense memory, and the tensor's number for each slab.
fn tensor_slabs(requests: &[Request]) -> Result<(Vec<Slab>, Vec<usize>)> {
    let mut slabs = Vec::with_capacity(requests.len());
    let mut owners = Vec::with_capacity(requests.len());
    for (owner, Request { entry, .. }) in requests.iter().enumerate() {
        for chunk in &entry.chunks {
            let slab = chunk_slab(entry, chunk).map_err(|why| {
                Error::invalid(format!("tensor {:?} cannot be assembled: {why}", entry.name))
            })?;
            if let Some(slab) = slab {
                slabs.push(slab);
                owners.push(owner);
            }
        }
    }
    Ok((slabs, owners))
}
