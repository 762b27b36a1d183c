//! Memory to load into.

use super::Runs;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

/// Memory to load into.
#[derive(Debug)]
pub struct Target<'a> {
    /// The origin, from which places are counted.
    base: *mut u8,
    /// Offsets from there that may be written to.
    room: Range<isize>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: stands for a `&mut [u8]`; writers write to disjoint parts (the contract of `write`).
unsafe impl Send for Target<'_> {}
// SAFETY: as above.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
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

    /// Takes runs of bytes: the first goes `to` bytes from the origin, each further one `step` bytes
    /// from the one before. By several threads at once, of which no two give it the same byte.
    pub(crate) fn write(&self, to: isize, step: isize, from: Runs) {
        let Some(last) = from.count.checked_sub(1) else { return };
        let source = last.checked_mul(from.step).and_then(|at| at.checked_add(from.len));
        assert!(source.is_some_and(|end| end <= from.bytes.len()));
        let first = to as i128;
        let last = first + last as i128 * step as i128;
        assert!(self.has_room_for(&(first.min(last)..first.max(last) + from.len as i128)));
        // SAFETY: the runs lie in `bytes`; where they go lies within the memory, in which concurrent
        // writers are disjoint.
        unsafe { scatter(from, self.base.wrapping_offset(to), step) };
    }
}

/// A tensor in memory to load into, with strides of any sign. No two of its elements share memory.
#[derive(Debug)]
pub struct StridedTarget<'a> {
    memory: Target<'a>,
    strides: Vec<isize>,
}

impl<'a> StridedTarget<'a> {
    /// A tensor whose first element is at `first` in `memory`, with strides in bytes. For types of
    /// less than a byte the innermost stride is that of the fewest elements that fill whole bytes
    /// (1 for F4, 3 for F6).
    ///
    /// # Panics
    /// If `first` is not in `memory` or at its end.
    pub fn new(memory: &'a mut [u8], first: usize, strides: &[isize]) -> Self {
        let room = -(first as isize)..memory.len() as isize - first as isize;
        let base = memory[first..].as_mut_ptr();
        let memory = Target { base, room, memory: PhantomData };
        Self { memory, strides: strides.to_vec() }
    }

    /// A tensor of another language's, whose first element is at `base`; strides as for
    /// [`StridedTarget::new`].
    ///
    /// # Safety
    /// All elements of the slice that is read into this are writable, and used by nobody else,
    /// until this is dropped.
    pub unsafe fn from_raw(base: *mut u8, strides: Vec<isize>) -> Self {
        let memory = Target { base, room: isize::MIN..isize::MAX, memory: PhantomData };
        Self { memory, strides }
    }

    /// Bytes from one element to the next, one a dimension.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// The memory, in which places are counted from the first element.
    pub(crate) fn memory(&self) -> &Target<'a> {
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
            Target::new(&mut memory).write(to, step, runs);
            prop_assert_eq!(memory, expected);
        }
    }

    #[test]
    fn nothing_is_written_outside_of_the_memory_nor_read_outside_of_the_bytes() {
        let write = |memory: &mut [u8], to, step, len, count| {
            let runs = Runs { bytes: &[1; 8], step: 4, len, count };
            let sink = Target::new(memory);
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
}
