//! Compares tensors by their bytes, in bounded memory.

use super::elements::ElementDiff;
use crate::error::Result;
use crate::format::TensorEntry;
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::load::LoadOptions;
use crate::store::read::loaded::Loaded;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of each checkpoint that are in memory at once. A tensor whose elements are no whole bytes is read as a whole.
const PIECE_BYTES: u64 = 64 << 20;

/// Reads tensors of two checkpoints and compares them.
pub struct Contents<'a> {
    a: &'a Checkpoint,
    b: &'a Checkpoint,
    runtime: &'a Runtime,
    job: &'a Arc<Job>,
    /// Bytes of tensors that were read.
    pub read_bytes: u64,
}

impl<'a> Contents<'a> {
    pub fn new(
        (a, b): (&'a Checkpoint, &'a Checkpoint),
        runtime: &'a Runtime,
        job: &'a Arc<Job>,
    ) -> Self {
        Self { a, b, runtime, job, read_bytes: 0 }
    }

    /// One of the two checkpoints.
    pub fn side(&self, is_a: bool) -> &'a Checkpoint {
        if is_a { self.a } else { self.b }
    }

    /// Loads tensors or objects of one of them.
    ///
    /// # Errors
    /// As for [`Checkpoint::load_names`].
    pub fn load<'n>(
        &mut self,
        is_a: bool,
        names: impl IntoIterator<Item = &'n str>,
    ) -> Result<Loaded> {
        let options = LoadOptions::default().on(self.runtime, self.job);
        let loaded = self.side(is_a).load_names(names, options)?;
        self.read_bytes += loaded.report.tensor_bytes;
        Ok(loaded)
    }

    /// Compares these tensors of `a` with those of the same names in `b`, which have the same dtypes and shapes.
    pub fn compare<'t>(
        &mut self,
        tensors: &[&'t TensorEntry],
    ) -> Result<Vec<(&'t TensorEntry, ElementDiff)>> {
        let bytes = |one: &Checkpoint| {
            let there = tensors.iter().filter_map(|tensor| one.tensor(&tensor.name));
            one.bytes_to_read(there, one.loading(true, self.runtime, self.job))
        };
        self.job.set_total_of_all(bytes(self.a) + bytes(self.b));
        let mut found = Vec::with_capacity(tensors.len());
        let (large, small): (Vec<_>, Vec<_>) =
            tensors.iter().partition(|tensor| tensor.nbytes() > PIECE_BYTES);
        for batch in batches(&small) {
            self.compare_whole(batch, &mut found)?;
        }
        for tensor in large {
            match pieces(tensor) {
                Some(pieces) => found.push((tensor, self.compare_pieces(tensor, pieces)?)),
                None => self.compare_whole(&[tensor], &mut found)?,
            }
        }
        Ok(found)
    }

    /// Reads whole tensors of both at once.
    fn compare_whole<'t>(
        &mut self,
        tensors: &[&'t TensorEntry],
        found: &mut Vec<(&'t TensorEntry, ElementDiff)>,
    ) -> Result<()> {
        let names = || tensors.iter().map(|tensor| &tensor.name);
        let [one, other] =
            [self.a, self.b].map(|checkpoint| checkpoint.load_names(names(), self.options()));
        let (one, other) = (one?, other?);
        for (&tensor, ((_, x), (_, y))) in tensors.iter().zip(one.tensors().zip(other.tensors())) {
            let mut difference = ElementDiff::of(tensor.dtype);
            difference.add(x.data(), y.data());
            found.push((tensor, difference));
            self.read_bytes += 2 * tensor.nbytes();
        }
        Ok(())
    }

    /// Reads a tensor region by region.
    fn compare_pieces(
        &mut self,
        tensor: &TensorEntry,
        pieces: impl Iterator<Item = Vec<Range<u64>>>,
    ) -> Result<ElementDiff> {
        let mut difference = ElementDiff::of(tensor.dtype);
        for ranges in pieces {
            let [one, other] = [self.a, self.b]
                .map(|checkpoint| checkpoint.load_region(&tensor.name, &ranges, self.options()));
            let (one, other) = (one?, other?);
            difference.add(one.data(), other.data());
            self.read_bytes += 2 * one.data().len() as u64;
        }
        Ok(difference)
    }

    fn options(&self) -> LoadOptions<'a> {
        LoadOptions::default().on(self.runtime, self.job)
    }
}

/// Tensors of at most [`PIECE_BYTES`] together.
fn batches<'s, 't>(tensors: &'s [&'t TensorEntry]) -> impl Iterator<Item = &'s [&'t TensorEntry]> {
    let mut rest = tensors;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |tensor: &&&TensorEntry| {
            bytes += tensor.nbytes();
            bytes <= PIECE_BYTES
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (batch, others) = rest.split_at(count);
        rest = others;
        (!batch.is_empty()).then_some(batch)
    })
}

/// Regions of at most [`PIECE_BYTES`] that make up a tensor, in row-major order; `None` if its elements are no whole
/// bytes.
fn pieces(tensor: &TensorEntry) -> Option<impl Iterator<Item = Vec<Range<u64>>>> {
    if !tensor.dtype.bits().is_multiple_of(8) {
        return None;
    }
    let shape = tensor.shape.clone();
    // The dimension to cut: all after it fit together.
    let mut row = tensor.dtype.bits() / 8;
    let mut cut = shape.len();
    while cut > 0 && row.saturating_mul(shape[cut - 1]) <= PIECE_BYTES {
        cut -= 1;
        row *= shape[cut];
    }
    let cut = cut.checked_sub(1)?;
    let step = (PIECE_BYTES / row).max(1);
    let per_row = shape[cut].div_ceil(step);
    let count = shape[..cut].iter().product::<u64>() * per_row;
    Some((0..count).map(move |number| {
        let start = number % per_row * step;
        let mut ranges = vec![0..0; cut + 1];
        ranges[cut] = start..(start + step).min(shape[cut]);
        let mut rest = number / per_row;
        for d in (0..cut).rev() {
            ranges[d] = rest % shape[d]..rest % shape[d] + 1;
            rest /= shape[d];
        }
        ranges
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Dtype;

    fn tensor(dtype: Dtype, shape: &[u64]) -> TensorEntry {
        TensorEntry {
            name: "t".into(),
            dtype,
            shape: shape.into(),
            object: false,
            chunks: Default::default(),
        }
    }

    #[test]
    fn pieces_cover_a_tensor_once_and_in_order() {
        let mib = 1 << 20;
        for shape in [&[100 * mib][..], &[3, 50 * mib], &[7, 9, 2 * mib], &[2, 3, 70 * mib, 1]] {
            let tensor = tensor(Dtype::F32, shape);
            let mut next = 0;
            for ranges in pieces(&tensor).unwrap() {
                let lengths = |d: usize| match ranges.get(d) {
                    Some(range) => range.end - range.start,
                    None => shape[d],
                };
                let strides = |d: usize| -> u64 { shape[d + 1..].iter().product() };
                let at: u64 = ranges.iter().enumerate().map(|(d, r)| r.start * strides(d)).sum();
                assert_eq!(at, next, "{shape:?}");
                let elements: u64 = (0..shape.len()).map(lengths).product();
                assert!(elements * 4 <= PIECE_BYTES);
                next += elements;
            }
            assert_eq!(next, shape.iter().product::<u64>());
        }
        assert!(pieces(&tensor(Dtype::F4, &[1 << 30])).is_none());
    }
}
