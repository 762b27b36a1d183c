//! Loading tensors of a checkpoint: into fresh memory, or into memory that is there.

use super::Checkpoint;
use crate::device::Sink;
use crate::device::host::HostSink;
use crate::error::{Error, Result};
use crate::format::{Dtype, TensorEntry};
use crate::pipeline::job::Job;
use crate::pipeline::load::{Reads, Scatter, read_arenas, read_into};
use crate::pipeline::report::LoadReport;
use crate::pipeline::runtime::Runtime;
use crate::plan::load::{BlockRead, Want, blocks};
use crate::pool::Mapping;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// How to load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Check every block against its checksum before any of it is handed out. Default true.
    pub verify: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { verify: true }
    }
}

/// Tensors in memory of their own.
#[derive(Debug)]
pub struct Loaded {
    tensors: Vec<LoadedTensor>,
    by_name: HashMap<String, usize>,
    /// What the load did.
    pub report: LoadReport,
}

/// One of them: what it is, and where.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    /// What it is.
    pub entry: TensorEntry,
    /// The memory in which it lies, one for all tensors of a shard.
    pub arena: Arc<Mapping>,
    /// Where in that memory.
    pub range: Range<usize>,
}

/// A tensor's type, shape and bytes. Implements [`safetensors::View`].
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    entry: &'a TensorEntry,
    data: &'a [u8],
}

impl Loaded {
    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|&index| self.tensors[index].view())
    }

    /// Names and tensors, in the order in which they were asked for.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|t| (t.entry.name.as_str(), t.view()))
    }

    /// Takes the tensors apart, for bindings that hand each out by itself.
    pub fn into_tensors(self) -> Vec<LoadedTensor> {
        self.tensors
    }
}

impl LoadedTensor {
    fn view(&self) -> TensorView<'_> {
        TensorView { entry: &self.entry, data: &self.arena.as_slice()[self.range.clone()] }
    }
}

impl<'a> TensorView<'a> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Elements a dimension.
    pub fn shape(&self) -> &'a [u64] {
        &self.entry.shape
    }

    /// The bytes, dense and in row-major order, aligned to the dtype.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `T` is not the tensor's type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        let wrong = || {
            Error::invalid(format!(
                "tensor {:?} is of {}, not of {}",
                self.entry.name,
                self.entry.dtype,
                T::DTYPE
            ))
        };
        if self.entry.dtype != T::DTYPE {
            return Err(wrong());
        }
        bytemuck::try_cast_slice(self.data).map_err(|_| wrong())
    }
}

impl safetensors::View for TensorView<'_> {
    /// The type; U8 for a dtype of which safetensors knows nothing.
    fn dtype(&self) -> safetensors::Dtype {
        self.entry.dtype.safetensors().unwrap_or(safetensors::Dtype::U8)
    }

    fn shape(&self) -> &[usize] {
        bytemuck::cast_slice(&self.entry.shape)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.data.into()
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// A Rust type that is some [`Dtype`]'s element.
pub trait Element: bytemuck::AnyBitPattern {
    /// That type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}

impl Checkpoint {
    /// Loads the tensors of these names into fresh memory, reading no more than the blocks in which
    /// they lie.
    ///
    /// # Errors
    /// [`Error::Keys`] naming all that are not in the checkpoint; [`Error::Corrupt`] for a damaged
    /// block; [`Error::Io`].
    pub fn load_names<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
        options: LoadOptions,
        runtime: &Runtime,
        job: &Arc<Job>,
    ) -> Result<Loaded> {
        let started = Instant::now();
        let wanted = self.find(names)?;
        let places: Vec<Want> = wanted.iter().map(|entry| place(entry)).collect::<Result<_>>()?;
        let reads = self.blocks(&places);
        job.set_total(reads.iter().map(|read| read.len as u64).sum());
        let (arenas, read) = read_arenas(runtime, self.reads(&reads, options), job)?;
        let arenas: Vec<Arc<Mapping>> = arenas.into_iter().map(Arc::new).collect();
        let report = self.report(&wanted, &reads, options, read, started);
        let ranges = arena_ranges(&places, &reads);
        let tensors: Vec<LoadedTensor> = wanted
            .into_iter()
            .zip(places.iter().zip(ranges))
            .map(|(entry, (place, range))| {
                let arena = arenas[place.file].clone();
                LoadedTensor { entry: entry.clone(), arena, range }
            })
            .collect();
        let names = tensors.iter().enumerate().map(|(i, t)| (t.entry.name.clone(), i));
        Ok(Loaded { by_name: names.collect(), tensors, report })
    }

    /// Loads tensors into memory of the caller's, each of just the bytes that its tensor has.
    ///
    /// # Errors
    /// [`Error::Keys`] naming all that are not in the checkpoint or of another size, before a byte
    /// is changed; [`Error::Corrupt`] for a damaged block and [`Error::Io`], when blocks read before
    /// it are in place already.
    pub fn load_into<S: AsRef<str>>(
        &self,
        targets: &[(S, HostSink<'_>)],
        options: LoadOptions,
        runtime: &Runtime,
        job: &Arc<Job>,
    ) -> Result<LoadReport> {
        let started = Instant::now();
        let wanted = self.find(targets.iter().map(|(name, _)| name))?;
        self.check_sizes(&wanted, targets)?;
        let places: Vec<Want> = wanted.iter().map(|entry| place(entry)).collect::<Result<_>>()?;
        let reads = self.blocks(&places);
        job.set_total(reads.iter().map(|read| read.len as u64).sum());
        let mut scatter: Vec<Scatter> = places
            .into_iter()
            .zip(targets)
            .filter(|(place, _)| !place.range.is_empty())
            .map(|(place, (_, sink))| Scatter { file: place.file, range: place.range, sink })
            .collect();
        scatter.sort_by_key(|s| (s.file, s.range.start));
        let read = read_into(runtime, self.reads(&reads, options), &scatter, job)?;
        Ok(self.report(&wanted, &reads, options, read, started))
    }

    /// The entries of these names, each asked for once: two holders of one tensor's memory could
    /// not both be its owner.
    fn find<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Vec<&TensorEntry>> {
        let (mut found, mut missing, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        for name in names {
            match self.tensor(name.as_ref()) {
                Some(entry) if seen.insert(&entry.name) => found.push(entry),
                Some(twice) => {
                    let name = &twice.name;
                    return Err(Error::invalid(format!("tensor {name:?} was asked for twice")));
                }
                None => missing.push(name.as_ref().to_owned()),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let path = self.path().into();
        Err(Error::Keys { path, missing, unexpected: Vec::new(), mismatched: Vec::new() })
    }

    fn check_sizes<S>(&self, wanted: &[&TensorEntry], targets: &[(S, HostSink<'_>)]) -> Result<()> {
        let mismatched: Vec<String> = wanted
            .iter()
            .zip(targets)
            .filter(|(entry, (_, sink))| entry.nbytes() != sink.nbytes())
            .map(|(entry, (_, sink))| {
                let (has, room) = (entry.nbytes(), sink.nbytes());
                format!("{:?} has {has} bytes in the checkpoint, {room} in memory", entry.name)
            })
            .collect();
        if mismatched.is_empty() {
            return Ok(());
        }
        let path = self.path().into();
        Err(Error::Keys { path, missing: Vec::new(), unexpected: Vec::new(), mismatched })
    }

    fn blocks(&self, places: &[Want]) -> Vec<BlockRead> {
        let file_bytes: Vec<u64> = self.files.iter().map(|file| file.bytes).collect();
        blocks(places, &file_bytes, self.manifest().block_bytes)
    }

    fn reads<'a>(&'a self, blocks: &'a [BlockRead], options: LoadOptions) -> Reads<'a> {
        Reads { dir: self.path(), files: &self.files, blocks, verify: options.verify }
    }

    fn report(
        &self,
        wanted: &[&TensorEntry],
        reads: &[BlockRead],
        options: LoadOptions,
        read: crate::pipeline::load::Read,
        started: Instant,
    ) -> LoadReport {
        let mut seconds = read.seconds;
        seconds.total = started.elapsed().as_secs_f64();
        LoadReport {
            path: self.path().into(),
            tensors: wanted.len(),
            tensor_bytes: wanted.iter().map(|entry| entry.nbytes()).sum(),
            read_bytes: reads.iter().map(|read| read.len as u64).sum(),
            verified: options.verify,
            moved: read.moved,
            seconds,
        }
    }
}

/// Where a tensor lies that one chunk holds whole.
fn place(entry: &TensorEntry) -> Result<Want> {
    match entry.chunks.as_slice() {
        [chunk] => {
            Ok(Want { file: chunk.file as usize, range: chunk.begin..chunk.begin + entry.nbytes() })
        }
        chunks => Err(Error::Unsupported {
            what: format!("tensor {:?} is sharded in {} chunks", entry.name, chunks.len()),
            remedy: "this version loads tensors that lie in one piece".into(),
        }),
    }
}

/// Where in its file's arena each place lies, given the blocks that the arenas hold.
fn arena_ranges(places: &[Want], reads: &[BlockRead]) -> Vec<Range<usize>> {
    use crate::config::ALIGN;
    // (file, block's offset in the file, block's offset in the arena)
    let mut starts: Vec<(usize, u64, usize)> = Vec::with_capacity(reads.len());
    let mut at = 0;
    for read in reads {
        if starts.last().is_none_or(|&(file, ..)| file != read.file) {
            at = 0;
        }
        starts.push((read.file, read.offset, at));
        at += read.len.next_multiple_of(ALIGN);
    }
    let range = |place: &Want| {
        let len = (place.range.end - place.range.start) as usize;
        if len == 0 {
            return 0..0;
        }
        let after = starts.partition_point(|&(file, offset, _)| {
            (file, offset) <= (place.file, place.range.start)
        });
        let (_, offset, at) = starts[after - 1];
        let start = at + (place.range.start - offset) as usize;
        start..start + len
    };
    places.iter().map(range).collect()
}
