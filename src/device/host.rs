//! Tensors in ordinary memory.

use super::{Runs, Sink, Source};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;
use std::sync::Mutex;

impl Source for &[u8] {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        to.copy_from_slice(&self[offset..offset + to.len()]);
    }
}

impl Source for Vec<u8> {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        self.as_slice().read(offset, to);
    }
}

/// Anything that implements [`safetensors::View`].
///
/// A view that lends its bytes is copied from directly. One that can only hand out a copy of all of
/// them (candle's tensors do) is asked once, when its first byte is needed, and the copy is freed
/// with its last byte: extra memory is the tensors being copied at the time, not the model.
#[derive(Debug)]
pub struct ViewSource<V> {
    view: V,
    nbytes: usize,
    copy: Mutex<Copied>,
}

#[derive(Debug, Default)]
struct Copied {
    bytes: Option<std::sync::Arc<Vec<u8>>>,
    /// Bytes of it that were read.
    used: usize,
}

impl<V: safetensors::View> ViewSource<V> {
    /// Wraps a view.
    pub fn new(view: V) -> Self {
        let nbytes = view.data_len();
        Self { view, nbytes, copy: Mutex::default() }
    }

    /// The view's own copy of its bytes, made at the first call.
    fn copied(&self) -> Option<std::sync::Arc<Vec<u8>>> {
        let mut copy = self.copy.lock().expect("no panic while it is held");
        if copy.bytes.is_none() {
            match self.view.data() {
                Cow::Borrowed(_) => return None,
                Cow::Owned(bytes) => copy.bytes = Some(bytes.into()),
            }
        }
        copy.bytes.clone()
    }

    fn used(&self, bytes: usize) {
        let mut copy = self.copy.lock().expect("no panic while it is held");
        copy.used += bytes;
        if copy.used >= self.nbytes {
            *copy = Copied::default();
        }
    }
}

impl<V: safetensors::View + Send + Sync> Source for ViewSource<V> {
    fn nbytes(&self) -> u64 {
        self.nbytes as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        match self.copied() {
            Some(bytes) => {
                to.copy_from_slice(&bytes[offset..offset + to.len()]);
                self.used(to.len());
            }
            None => to.copy_from_slice(&self.view.data()[offset..offset + to.len()]),
        }
    }
}

/// A tensor of another language's: an address, a shape and strides. Gathers as it copies.
#[derive(Debug)]
pub struct Strided {
    base: *const u8,
    item: usize,
    /// (size, stride in bytes) a dimension, outermost first; adjacent ones merged where dense.
    dims: Vec<(usize, isize)>,
    nbytes: usize,
}

// SAFETY: a pointer to memory that `new`'s caller promised to leave alone.
unsafe impl Send for Strided {}
// SAFETY: only read from.
unsafe impl Sync for Strided {}

impl Strided {
    /// A tensor of `shape` at `base`, with strides in bytes (`None`: dense, row-major) and elements
    /// of `item` bytes.
    ///
    /// # Safety
    /// All of the tensor's elements are readable, and not written to, until this is dropped.
    pub unsafe fn new(
        base: *const u8,
        item: usize,
        shape: &[usize],
        strides: Option<&[isize]>,
    ) -> Self {
        let nbytes = shape.iter().product::<usize>() * item;
        let mut dims: Vec<(usize, isize)> = Vec::with_capacity(shape.len());
        match strides {
            None => dims.push((nbytes / item.max(1), item as isize)),
            Some(strides) => {
                for (&size, &stride) in shape.iter().zip(strides).filter(|(size, _)| **size != 1) {
                    match dims.last_mut() {
                        Some((outer, step)) if *step == stride * size as isize => {
                            *outer *= size;
                            *step = stride;
                        }
                        _ => dims.push((size, stride)),
                    }
                }
            }
        }
        if dims.is_empty() {
            dims.push((1, item as isize));
        }
        Self { base, item, dims, nbytes }
    }

    /// The address of the element of this index along the outer dimensions, and the index left for
    /// the innermost one.
    fn locate(&self, mut element: usize) -> (*const u8, usize) {
        let mut offset = 0isize;
        let (inner, outer) = self.dims.split_last().expect("there is always one");
        let within = element % inner.0;
        element /= inner.0;
        for &(size, stride) in outer.iter().rev() {
            offset += (element % size) as isize * stride;
            element /= size;
        }
        (self.base.wrapping_offset(offset), within)
    }
}

impl Source for Strided {
    fn nbytes(&self) -> u64 {
        self.nbytes as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset + to.len() <= self.nbytes);
        assert!(offset.is_multiple_of(self.item) && to.len().is_multiple_of(self.item));
        let &(size, stride) = self.dims.last().expect("there is always one");
        let mut element = offset / self.item;
        let mut to = to;
        while !to.is_empty() {
            let (row, within) = self.locate(element);
            let count = (size - within).min(to.len() / self.item);
            let (head, rest) = to.split_at_mut(count * self.item);
            let from = row.wrapping_offset(within as isize * stride);
            // SAFETY: `count` elements from `within` on lie in one row of the tensor, which the
            // contract of `new` makes readable; `head` has room for just as many.
            unsafe { gather(from, stride, self.item, head) };
            element += count;
            to = rest;
        }
    }
}

/// Copies elements of `item` bytes that lie `stride` bytes apart into `to`, back to back.
///
/// # Safety
/// `to.len() / item` elements are readable from `from` on, at that stride.
unsafe fn gather(from: *const u8, stride: isize, item: usize, to: &mut [u8]) {
    if stride == item as isize {
        // SAFETY: dense, so the elements are `to.len()` adjacent bytes; `to` is a fresh `&mut`.
        return unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }
    // SAFETY: the same contract; the arms fix the element's size for the compiler.
    unsafe {
        match item {
            1 => gather_of::<1>(from, stride, to),
            2 => gather_of::<2>(from, stride, to),
            4 => gather_of::<4>(from, stride, to),
            8 => gather_of::<8>(from, stride, to),
            16 => gather_of::<16>(from, stride, to),
            _ => unreachable!("elements are of 1, 2, 4, 8 or 16 bytes"),
        }
    }
}

/// [`gather`] for elements of `N` bytes.
///
/// # Safety
/// As for [`gather`].
unsafe fn gather_of<const N: usize>(from: *const u8, stride: isize, to: &mut [u8]) {
    for (i, element) in to.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        // SAFETY: element `i` is readable. Read bytewise, so of any alignment.
        *element = unsafe { from.wrapping_offset(i as isize * stride).cast::<[u8; N]>().read() };
    }
}

/// Memory to load into.
#[derive(Debug)]
pub struct HostSink<'a> {
    /// The origin, from which places are counted.
    base: *mut u8,
    /// Offsets from there that may be written to.
    room: Range<isize>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: stands for a `&mut [u8]`; writers write to disjoint parts (the contract of `Sink`).
unsafe impl Send for HostSink<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostSink<'_> {}

impl<'a> HostSink<'a> {
    /// The memory of a slice.
    pub fn new(to: &'a mut [u8]) -> Self {
        Self { base: to.as_mut_ptr(), room: 0..to.len() as isize, memory: PhantomData }
    }

    /// Memory of another language's.
    ///
    /// # Safety
    /// `nbytes` from `base` on are writable, and used by nobody else, until this is dropped.
    pub unsafe fn from_raw(base: *mut u8, nbytes: usize) -> Self {
        Self { base, room: 0..nbytes as isize, memory: PhantomData }
    }

    /// Bytes that may be written to.
    pub fn nbytes(&self) -> u64 {
        self.room.end.abs_diff(self.room.start) as u64
    }

    /// Whether all of these offsets from the origin may be written to.
    pub(crate) fn has_room_for(&self, reach: &Range<i128>) -> bool {
        reach.start >= self.room.start as i128 && reach.end <= self.room.end as i128
    }
}

impl Sink for HostSink<'_> {
    fn write(&self, to: isize, step: isize, from: Runs) {
        let Some(last) = from.count.checked_sub(1) else { return };
        let source = last.checked_mul(from.step).and_then(|at| at.checked_add(from.len));
        assert!(source.is_some_and(|end| end <= from.bytes.len()));
        let first = to as i128;
        let last = first + last as i128 * step as i128;
        assert!(self.has_room_for(&(first.min(last)..first.max(last) + from.len as i128)));
        // SAFETY: the runs lie in `bytes`; where they go lies within the memory, in which concurrent
        // writers are disjoint (the contract of `Sink`).
        unsafe { scatter(from, self.base.wrapping_offset(to), step) };
    }
}

/// A tensor in memory to load into, with strides of any sign. No two of its elements share memory.
#[derive(Debug)]
pub struct StridedSink<'a> {
    memory: HostSink<'a>,
    strides: Vec<isize>,
}

impl<'a> StridedSink<'a> {
    /// A tensor whose first element is at `first` in `memory`, with strides in bytes. For types of
    /// less than a byte the innermost stride is that of the fewest elements that fill whole bytes
    /// (1 for F4, 3 for F6).
    ///
    /// # Panics
    /// If `first` is not in `memory` or at its end.
    pub fn new(memory: &'a mut [u8], first: usize, strides: &[isize]) -> Self {
        let room = -(first as isize)..memory.len() as isize - first as isize;
        let base = memory[first..].as_mut_ptr();
        let memory = HostSink { base, room, memory: PhantomData };
        Self { memory, strides: strides.to_vec() }
    }

    /// A tensor of another language's, whose first element is at `base`; strides as for
    /// [`StridedSink::new`].
    ///
    /// # Safety
    /// All elements of the slice that is read into this are writable, and used by nobody else,
    /// until this is dropped.
    pub unsafe fn from_raw(base: *mut u8, strides: Vec<isize>) -> Self {
        let memory = HostSink { base, room: isize::MIN..isize::MAX, memory: PhantomData };
        Self { memory, strides }
    }

    /// Bytes from one element to the next, one a dimension.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// The memory, in which places are counted from the first element.
    pub(crate) fn memory(&self) -> &HostSink<'a> {
        &self.memory
    }
}

/// Copies runs of bytes to where they go: `to`, and every `step` bytes from there.
///
/// # Safety
/// The runs lie in `from.bytes`, and where they go is writable and nobody else's.
unsafe fn scatter(from: Runs, to: *mut u8, step: isize) {
    // SAFETY: the same contract; the arms fix an element's size for the compiler.
    unsafe {
        match from.len {
            1 => scatter_of::<1>(from, to, step),
            2 => scatter_of::<2>(from, to, step),
            4 => scatter_of::<4>(from, to, step),
            8 => scatter_of::<8>(from, to, step),
            16 => scatter_of::<16>(from, to, step),
            len => {
                for i in 0..from.count {
                    let run = from.bytes.as_ptr().add(i * from.step);
                    ptr::copy_nonoverlapping(run, to.wrapping_offset(i as isize * step), len);
                }
            }
        }
    }
}

/// [`scatter`] for runs of `N` bytes.
///
/// # Safety
/// As for [`scatter`].
unsafe fn scatter_of<const N: usize>(from: Runs, to: *mut u8, step: isize) {
    for i in 0..from.count {
        // SAFETY: run `i` lies in `bytes`, and its place is writable. Bytewise, so of any alignment.
        unsafe {
            let run = from.bytes.as_ptr().add(i * from.step).cast::<[u8; N]>().read();
            to.wrapping_offset(i as isize * step).cast::<[u8; N]>().write(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The dense bytes of a strided view, element by element.
    fn expected(data: &[u8], item: usize, shape: &[usize], strides: &[isize]) -> Vec<u8> {
        let mut dense = Vec::new();
        for mut n in 0..shape.iter().product::<usize>() {
            let mut at = 0;
            for d in (0..shape.len()).rev() {
                at += (n % shape[d]) as isize * strides[d];
                n /= shape[d];
            }
            dense.extend_from_slice(&data[at as usize..at as usize + item]);
        }
        dense
    }

    proptest! {
        #[test]
        fn any_view_is_gathered_as_if_element_by_element(
            item in prop::sample::select(vec![1usize, 2, 4, 8, 16]),
            shape in prop::collection::vec(1..5usize, 0..4),
            strides in prop::collection::vec(0..6usize, 4),
            cut in any::<prop::sample::Index>(),
        ) {
            let data: Vec<u8> = (0..4096).map(|i| (i * 7 % 251) as u8).collect();
            let strides: Vec<isize> =
                strides.iter().take(shape.len()).map(|s| (s * item) as isize).collect();
            // SAFETY: the largest offset is 3 dimensions * 4 steps * 5 items of 16 bytes.
            let source = unsafe { Strided::new(data.as_ptr(), item, &shape, Some(&strides)) };
            let dense = expected(&data, item, &shape, &strides);
            prop_assert_eq!(source.nbytes(), dense.len() as u64);
            let cut = cut.index(dense.len() / item + 1) * item;
            let mut read = vec![0; dense.len()];
            let (head, tail) = read.split_at_mut(cut);
            source.read(0, head);
            source.read(cut, tail);
            prop_assert_eq!(read, dense);
        }
    }

    proptest! {
        #[test]
        fn runs_are_scattered_as_if_byte_by_byte(
            len in prop::sample::select(vec![1usize, 2, 3, 4, 8, 12, 16, 40]),
            count in 0..9usize,
            from_gap in 0..20usize,
            to_gap in 0..20usize,
            backwards in any::<bool>(),
            first in 0..7usize,
        ) {
            let bytes: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
            let (from_step, to_step) = (len + from_gap, (len + to_gap) as isize);
            let (to, step) = match backwards {
                true => (first as isize + to_step * count.saturating_sub(1) as isize, -to_step),
                false => (first as isize, to_step),
            };
            let (mut memory, mut expected) = (vec![0; 1000], vec![0; 1000]);
            for i in 0..count {
                let at = (to + i as isize * step) as usize;
                expected[at..at + len].copy_from_slice(&bytes[i * from_step..i * from_step + len]);
            }
            let runs = Runs { bytes: &bytes, step: from_step, len, count };
            HostSink::new(&mut memory).write(to, step, runs);
            prop_assert_eq!(memory, expected);
        }
    }

    #[test]
    fn nothing_is_written_outside_of_the_memory_nor_read_outside_of_the_bytes() {
        let write = |memory: &mut [u8], to, step, len, count| {
            let runs = Runs { bytes: &[1; 8], step: 4, len, count };
            let sink = HostSink::new(memory);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| sink.write(to, step, runs)))
        };
        let mut memory = [0; 8];
        assert!(write(&mut memory, -1, 4, 4, 1).is_err());
        assert!(write(&mut memory, 0, 5, 4, 2).is_err());
        assert!(write(&mut memory, 0, -4, 4, 2).is_err());
        assert!(write(&mut memory, 0, isize::MAX, 4, 2).is_err());
        assert!(write(&mut memory, 0, 4, 4, 3).is_err());
        assert_eq!(memory, [0; 8]);
        assert!(write(&mut memory, 4, -4, 4, 2).is_ok());
        assert_eq!(memory, [1; 8]);
    }

    #[test]
    fn negative_strides_run_backwards() {
        let data = [1u8, 2, 3, 4];
        // SAFETY: starts at the last byte and steps back over all four.
        let source = unsafe { Strided::new(&data[3], 1, &[4], Some(&[-1])) };
        let mut read = [0; 4];
        source.read(0, &mut read);
        assert_eq!(read, [4, 3, 2, 1]);
    }

    #[test]
    fn a_view_that_must_copy_is_asked_once_and_its_copy_freed() {
        struct Owned(std::sync::atomic::AtomicUsize);
        impl safetensors::View for Owned {
            fn dtype(&self) -> safetensors::Dtype {
                safetensors::Dtype::U8
            }
            fn shape(&self) -> &[usize] {
                &[4]
            }
            fn data(&self) -> Cow<'_, [u8]> {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                vec![1, 2, 3, 4].into()
            }
            fn data_len(&self) -> usize {
                4
            }
        }
        let source = ViewSource::new(Owned(0.into()));
        let mut read = [0; 4];
        source.read(0, &mut read[..2]);
        source.read(2, &mut read[2..]);
        assert_eq!(read, [1, 2, 3, 4]);
        assert_eq!(source.view.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        assert!(source.copy.lock().unwrap().bytes.is_none());
    }
}
