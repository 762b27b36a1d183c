//! Loads that need no options: tensors by name, and a region of one.

use crate::error::{Error, Result};
use crate::format::{Chunk, Dtype, Element, TensorEntry};
use crate::plan::slab::{Dense, Place, Slab, dense_strides};
use crate::pool::{Buffer, Mapping};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::load::LoadOptions;
use crate::store::read::loaded::Loaded;
use std::ops::Range;
use std::sync::Arc;

/// A region of a tensor, in memory of its own: dense and in row-major order.
#[derive(Debug)]
pub struct TensorPart {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    memory: Arc<Mapping>,
    nbytes: usize,
}

impl TensorPart {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements a dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The bytes, aligned to the dtype.
    pub fn data(&self) -> &[u8] {
        &self.memory.as_slice()[..self.nbytes]
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `T` is not the tensor's type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        T::of_bytes(self.data(), self.dtype, &self.name)
    }
}

impl Checkpoint {
    /// Loads the tensors of these names into fresh memory, with the configuration with which the checkpoint was
    /// opened and every block checked. [`Checkpoint::load_names`] takes options.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load_names`].
    pub fn load<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Loaded> {
        self.load_names(names, LoadOptions::default())
    }

    /// Loads a region of a tensor: a range per dimension; trailing dimensions that are left out are taken whole. Reads
    /// and checks only the checksum chunks that hold the region.
    ///
    /// ```no_run
    /// # fn main() -> ringstow::Result<()> {
    /// let checkpoint = ringstow::Checkpoint::open("run/step-1000")?;
    /// let rows = checkpoint.load_part("layer.weight", &[16..32, 0..256])?;
    /// let weights: &[f32] = rows.as_slice()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Keys`] if there is no such tensor; [`Error::Invalid`] for ranges outside of it, or that do not
    /// fall on byte boundaries; [`Error::Replaced`] if a save replaced the checkpoint since it was opened;
    /// [`Error::MissingShare`] for a tensor of which this is one rank's share; [`Error::Corrupt`] for a
    /// damaged block; [`Error::Io`].
    pub fn load_part(&self, name: &str, ranges: &[Range<u64>]) -> Result<TensorPart> {
        self.load_region(name, ranges, LoadOptions::default())
    }

    /// [`Checkpoint::load_part`] with options.
    pub(in crate::store) fn load_region(
        &self,
        name: &str,
        ranges: &[Range<u64>],
        options: LoadOptions<'_>,
    ) -> Result<TensorPart> {
        let entry = self.tensor(name).ok_or_else(|| Error::Keys {
            path: self.path().into(),
            missing: vec![name.to_owned()],
            unexpected: Vec::new(),
            mismatched: Vec::new(),
        })?;
        self.check_entries([entry])?;
        self.check_faults(entry)?;
        let ranges = whole_ranges(entry, ranges)?;
        let shape: Vec<u64> = ranges.iter().map(|range| range.end - range.start).collect();
        let uneven = || {
            let dtype = entry.dtype;
            Error::invalid(format!(
                "tensor {name:?} is of {dtype}: {ranges:?} is no whole number of bytes"
            ))
        };
        let nbytes = entry.dtype.nbytes(&shape).ok_or_else(uneven)? as usize;
        let slabs = slabs_of(entry, &ranges, &shape)
            .map_err(|why| Error::invalid(format!("tensor {name:?}, {ranges:?}: {why}")))?;
        let memory = self.fetch(&slabs, nbytes, options)?;
        let (name, dtype) = (name.to_owned(), entry.dtype);
        Ok(TensorPart { name, dtype, shape, memory: Arc::new(memory), nbytes })
    }

    /// Reads slabs into fresh memory.
    fn fetch(&self, slabs: &[Slab], nbytes: usize, options: LoadOptions) -> Result<Mapping> {
        let (runtime, job) = self.resources(options)?;
        let memory = Mapping::new(nbytes.max(1))
            .map_err(|e| Error::io("taking memory for", self.path(), e))?;
        let (whole, mut buffers) = Buffer::cut(memory, std::iter::once(nbytes));
        {
            let target = crate::device::Target::new(&mut buffers[0][..]);
            let targets = vec![&target; slabs.len()];
            let loading = self.loading(options.verify, &runtime, &job);
            let plan = self.plan_slabs(slabs, loading);
            self.scatter(slabs, &targets, &plan, loading)?;
        }
        drop(buffers);
        Ok(whole.rejoin())
    }
}

/// A range for every dimension.
fn whole_ranges(entry: &TensorEntry, ranges: &[Range<u64>]) -> Result<Vec<Range<u64>>> {
    let (name, shape) = (&entry.name, &entry.shape[..]);
    let fits = |(range, &size): (&Range<u64>, &u64)| range.start <= range.end && range.end <= size;
    if ranges.len() > shape.len() || !ranges.iter().zip(shape).all(fits) {
        let reason = format!("tensor {name:?} of {shape:?} has no part {ranges:?}");
        return Err(Error::invalid(reason));
    }
    let rest = shape[ranges.len()..].iter().map(|&size| 0..size);
    Ok(ranges.iter().cloned().chain(rest).collect())
}

/// What each chunk holds of a region, placed in the region's dense memory.
fn slabs_of(
    entry: &TensorEntry,
    ranges: &[Range<u64>],
    shape: &[u64],
) -> std::result::Result<Vec<Slab>, String> {
    let strides = dense_strides(entry.dtype, shape);
    let mut slabs = Vec::new();
    for chunk in &entry.chunks {
        slabs.extend(slab_of(entry, chunk, ranges, &strides)?);
    }
    Ok(slabs)
}

fn slab_of(
    entry: &TensorEntry,
    chunk: &Chunk,
    ranges: &[Range<u64>],
    strides: &[i128],
) -> std::result::Result<Option<Slab>, String> {
    let zeros = vec![0; entry.shape.len()];
    let begin = chunk.offsets().unwrap_or(&zeros);
    let sizes = chunk.sizes().unwrap_or(&entry.shape);
    let (mut offsets, mut lengths, mut at) = (Vec::new(), Vec::new(), 0i128);
    for (d, range) in ranges.iter().enumerate() {
        let start = range.start.max(begin[d]);
        let end = range.end.min(begin[d] + sizes[d]);
        if start >= end {
            return Ok(None);
        }
        offsets.push(start - begin[d]);
        lengths.push(end - start);
        at += i128::from(start - range.start) * strides[d];
    }
    let array = Dense { file: chunk.file as usize, begin: chunk.begin, dtype: entry.dtype, sizes };
    Slab::new(array, &offsets, &lengths, Place { at, strides })
}
