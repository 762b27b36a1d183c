//! A region of a tensor: where its bytes are in a file, and where they go in memory. Pure arithmetic on runs of bytes,
//! never on single bytes.

use crate::format::{Dtype, cover};
use std::ops::Range;

/// A dense array in a file, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    /// Index in the manifest's files.
    pub file: usize,
    /// Offset of its first byte in that file.
    pub begin: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per dimension; [`Dtype::nbytes`] of them does not overflow.
    pub sizes: &'a [u64],
}

/// Where a region goes in memory, in bits: types of less than a byte have no strides in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Bits from the memory's origin to the first element.
    pub at: i128,
    /// Bits from one element to the next, one number per dimension; of any sign.
    pub strides: &'a [i128],
}

/// A region of a dense array, and its place in memory. Not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slab {
    /// Index in the manifest's files.
    pub file: usize,
    /// Offset in the file of its first byte.
    begin: u64,
    /// Offset in memory of the same byte.
    at: i64,
    /// Bytes that are adjacent in the file and in memory.
    run: u64,
    /// The dimensions to step through, outermost first; none if the slab is one run.
    dims: Vec<Dim>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dim {
    count: u64,
    /// Bytes from one step to the next in the file, and in memory.
    from: u64,
    to: i64,
    /// Bytes of the file from the first to the last of one step; at most `from`.
    extent: u64,
}

impl Dim {
    /// Bytes of the file from the first to the last of all steps.
    fn span(&self) -> u64 {
        (self.count - 1) * self.from + self.extent
    }
}

/// Evenly spaced runs of bytes, in a block of the file and in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// Bytes from the block's first to the first run.
    pub from: usize,
    /// Bytes from one run to the next in the block.
    pub from_step: usize,
    /// Bytes from the memory's origin to the first run.
    pub to: isize,
    /// Bytes from one run to the next in memory.
    pub to_step: isize,
    /// Bytes of each run.
    pub len: usize,
    /// How many runs.
    pub count: usize,
}

/// Bits from one element to the next in a dense array of these sizes.
pub fn dense_strides(dtype: Dtype, sizes: &[u64]) -> Vec<i128> {
    let mut strides = vec![0; sizes.len()];
    let mut step = i128::from(dtype.bits());
    for (stride, &size) in strides.iter_mut().zip(sizes).rev() {
        *stride = step;
        step = step.saturating_mul(size.into());
    }
    strides
}

impl Slab {
    /// Adjacent bytes that go to the memory's origin; `None` for an empty range.
    pub fn run(file: usize, range: &Range<u64>) -> Option<Self> {
        let run = range.end.checked_sub(range.start).filter(|&run| run > 0)?;
        Some(Self { file, begin: range.start, at: 0, run, dims: Vec::new() })
    }

    /// The region of `lengths` at `offsets` in `array`; `None` if it is empty.
    ///
    /// # Errors
    /// The reason if it reaches outside of the array, does not fall on whole bytes, or has elements that
    /// share memory.
    pub fn new(
        array: Dense,
        offsets: &[u64],
        lengths: &[u64],
        to: Place,
    ) -> Result<Option<Self>, String> {
        check_box(array.sizes, offsets, lengths, to.strides)?;
        if lengths.contains(&0) {
            return Ok(None);
        }
        let slab = Self::in_bits(array, offsets, lengths, to).in_bytes(array)?;
        match slab.overlaps_itself() {
            true => Err("its elements would share memory: a stride is too short".into()),
            false => Ok(Some(slab)),
        }
    }

    /// Merges a dimension with the one within it if it continues that, in the file and in memory.
    fn in_bits(array: Dense, offsets: &[u64], lengths: &[u64], to: Place) -> InBits {
        let mut run = array.dtype.bits();
        let (mut begin, mut from) = (0, run);
        let mut dims: Vec<(u64, u64, i128)> = Vec::new(); // innermost first
        for d in (0..lengths.len()).rev() {
            let (count, to) = (lengths[d], to.strides[d]);
            begin += offsets[d] * from;
            match dims.last_mut() {
                _ if count == 1 => {}
                None if from == run && to == run.into() => run *= count,
                Some((n, inner_from, inner_to))
                    if from == *n * *inner_from
                        && Some(to) == inner_to.checked_mul((*n).into()) =>
                {
                    *n *= count;
                }
                _ => dims.push((count, from, to)),
            }
            from *= array.sizes[d];
        }
        InBits { begin, at: to.at, run, dims }
    }

    /// Bytes of all of it.
    pub fn nbytes(&self) -> u64 {
        self.dims.iter().map(|dim| dim.count).product::<u64>() * self.run
    }

    /// Where in memory its lowest byte goes, and one past its highest.
    pub fn reach(&self) -> Range<i128> {
        let (mut low, mut high) = (i128::from(self.at), i128::from(self.at) + i128::from(self.run));
        for dim in &self.dims {
            let last = i128::from(dim.to) * i128::from(dim.count - 1);
            low += last.min(0);
            high += last.max(0);
        }
        low..high
    }

    /// Whether two of its bytes may go to the same place. Exact for sliced, transposed and flipped arrays;
    /// otherwise conservatively true.
    fn overlaps_itself(&self) -> bool {
        let mut steps: Vec<(u64, u64)> =
            self.dims.iter().map(|dim| (dim.to.unsigned_abs(), dim.count)).collect();
        steps.sort_unstable();
        let mut taken = u128::from(self.run);
        steps.iter().any(|&(step, count)| {
            let overlaps = u128::from(step) < taken;
            taken += u128::from(step) * u128::from(count - 1);
            overlaps
        })
    }

    /// Calls `each` with the ranges of the file that it needs, rising; ranges less than `gap` bytes apart are
    /// one.
    pub fn spans(&self, gap: u64, each: &mut impl FnMut(Range<u64>)) {
        // Gaps do not shrink from the innermost dimension outwards, so the first large one decides. There
        // are at most as many spans as gaps fit into the file.
        let close = |dim: &&Dim| dim.from - dim.extent < gap;
        let outer = self.dims.len() - self.dims.iter().rev().take_while(close).count();
        let len = self.dims.get(outer).map_or(self.run, Dim::span);
        walk(&self.dims[..outer], self.begin, &mut |at| each(at..at + len));
    }

    /// What of it lies in `span` of the file, and where that goes.
    pub fn runs(&self, span: &Range<u64>, emit: &mut impl FnMut(Runs)) {
        clip(&self.dims, self.run, (self.begin, self.at), span, emit);
    }
}

fn check_box(
    sizes: &[u64],
    offsets: &[u64],
    lengths: &[u64],
    strides: &[i128],
) -> Result<(), String> {
    let rank = sizes.len();
    if offsets.len() != rank || lengths.len() != rank || strides.len() != rank {
        let (o, l, s) = (offsets.len(), lengths.len(), strides.len());
        return Err(format!(
            "{o} offsets, {l} lengths and {s} strides were given for {rank} dimensions"
        ));
    }
    match cover::within(sizes, (offsets, lengths)) {
        true => Ok(()),
        false => Err(format!(
            "a region of {lengths:?} elements at {offsets:?} reaches outside of the chunk's {sizes:?}"
        )),
    }
}

/// A slab in bits. Dimensions are (count, step in the file, step in memory), innermost first.
struct InBits {
    begin: u64,
    at: i128,
    run: u64,
    dims: Vec<(u64, u64, i128)>,
}

impl InBits {
    fn in_bytes(self, array: Dense) -> Result<Slab, String> {
        let split = || {
            format!(
                "the region does not fall on whole bytes: elements of {} have {} bits",
                array.dtype,
                array.dtype.bits()
            )
        };
        let bytes = |bits: u64| bits.is_multiple_of(8).then_some(bits / 8).ok_or_else(split);
        let offset = |bits: i128| match bits % 8 {
            0 => i64::try_from(bits / 8).map_err(|_| "a stride leaves the memory".to_owned()),
            _ => Err(split()),
        };
        let run = bytes(self.run)?;
        let mut dims = Vec::with_capacity(self.dims.len());
        let mut extent = run;
        for (count, from, to) in self.dims {
            let dim = Dim { count, from: bytes(from)?, to: offset(to)?, extent };
            extent = dim.span();
            dims.push(dim);
        }
        dims.reverse();
        let begin = array.begin + bytes(self.begin)?;
        debug_assert!(dims.iter().all(|dim| dim.count > 1 && dim.extent <= dim.from));
        let slab = Slab { file: array.file, begin, at: offset(self.at)?, run, dims };
        // Then no later sum of offsets overflows.
        let reach = slab.reach();
        match reach.start >= i64::MIN.into() && reach.end <= i64::MAX.into() {
            true => Ok(slab),
            false => Err("the strides leave the memory".into()),
        }
    }
}

/// Calls `each` with the offset of every step of every dimension.
fn walk(dims: &[Dim], at: u64, each: &mut impl FnMut(u64)) {
    match dims.split_first() {
        None => each(at),
        Some((dim, inner)) => (0..dim.count).for_each(|i| walk(inner, at + i * dim.from, each)),
    }
}

/// Emits the parts of the dimensions' runs that are in `span`. The first run is at `(from, to)`.
fn clip(
    dims: &[Dim],
    run: u64,
    (from, to): (u64, i64),
    span: &Range<u64>,
    emit: &mut impl FnMut(Runs),
) {
    let Some((dim, inner)) = dims.split_first() else {
        let (start, end) = (from.max(span.start), (from + run).min(span.end));
        if start < end {
            let to = to + (start - from) as i64;
            emit(runs(start - span.start, 0, to, 0, end - start, 1));
        }
        return;
    };
    let place = |i: u64| (from + i * dim.from, to + i as i64 * dim.to);
    // The steps that overlap the span.
    let mut first = match span.start.checked_sub(from + dim.extent) {
        Some(behind) => behind / dim.from + 1,
        None => 0,
    };
    let mut end = span.end.saturating_sub(from).div_ceil(dim.from).min(dim.count);
    // Only the first and the last can be cut off.
    if first < end && place(first).0 < span.start {
        clip(inner, run, place(first), span, emit);
        first += 1;
    }
    if first < end && place(end - 1).0 + dim.extent > span.end {
        end -= 1;
        clip(inner, run, place(end), span, emit);
    }
    if first >= end {
        return;
    }
    let ((from, to), count) = (place(first), end - first);
    match inner {
        [] => emit(runs(from - span.start, dim.from, to, dim.to, run, count)),
        // Transposed in memory: copy in the order of the memory. Scattered reads of a block that is in the cache cost
        // less than scattered writes.
        [across]
            if across.to.unsigned_abs() > dim.to.unsigned_abs() && count >= TRANSPOSED_RUNS_MIN =>
        {
            for j in 0..across.count {
                let (from, to) = (from + j * across.from, to + j as i64 * across.to);
                emit(runs(from - span.start, dim.from, to, dim.to, run, count));
            }
        }
        _ => (first..end).for_each(|i| clip(inner, run, place(i), span, emit)),
    }
}

/// Fewest runs for which the order of the memory is faster than that of the file.
const TRANSPOSED_RUNS_MIN: u64 = 8;

fn runs(from: u64, from_step: u64, to: i64, to_step: i64, len: u64, count: u64) -> Runs {
    Runs {
        from: from as usize,
        from_step: from_step as usize,
        to: to as isize,
        to_step: to_step as isize,
        len: len as usize,
        count: count as usize,
    }
}

#[cfg(test)]
#[path = "slab_tests.rs"]
mod tests;
