//! Memory to load into.

#[cfg(feature = "cuda")]
use super::cuda::{Ready, ReadyEvent, StreamHandle};
use super::runs::copy_runs;
#[cfg(feature = "cuda")]
use crate::error::Result;
use crate::plan::slab::Runs;
#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, DevicePtrMut};
use std::marker::PhantomData;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// All offsets: the room of memory whose bounds only its owner knows.
const ANYWHERE: Range<isize> = isize::MIN..isize::MAX;

/// Memory to load into.
#[derive(Debug)]
pub struct Target<'a> {
    /// The origin, from which places are counted.
    base: *mut u8,
    /// Offsets from there that may be written to.
    room: Range<isize>,
    /// On a GPU: the event after which the memory may be written to. `None` for host memory.
    #[cfg(feature = "cuda")]
    ready_event: Option<Arc<ReadyEvent>>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: stands for a `&mut [u8]`; writers write to disjoint parts (the contract of `write`).
unsafe impl Send for Target<'_> {}
// SAFETY: as above.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    /// The memory of a slice.
    pub fn new(to: &'a mut [u8]) -> Self {
        Self::host(to.as_mut_ptr(), 0..to.len() as isize)
    }

    /// Memory of another language's.
    ///
    /// # Safety
    /// `nbytes` from `base` on are writable, and used by nobody else, until this is dropped.
    pub unsafe fn from_raw(base: *mut u8, nbytes: usize) -> Self {
        Self::host(base, 0..nbytes as isize)
    }

    fn host(base: *mut u8, room: Range<isize>) -> Self {
        Self {
            base,
            room,
            #[cfg(feature = "cuda")]
            ready_event: None,
            memory: PhantomData,
        }
    }

    /// Memory of the GPU of number `ordinal`, at `base`, ready to be written to when what is on
    /// `stream` now has ended. `ready` is one for all targets of a load.
    ///
    /// # Safety
    /// The stream is one of that GPU's primary context. `nbytes` from `base` on are there, and used
    /// by no work that is put on any stream from now on, until this is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) without a driver that can be used, or for a
    /// stream that is being captured into a CUDA graph; [`Error::Gpu`](crate::Error::Gpu) when the
    /// driver refuses.
    #[cfg(feature = "cuda")]
    pub unsafe fn cuda(
        (ordinal, base): (u32, u64),
        nbytes: usize,
        stream: StreamHandle,
        ready: &mut Ready,
    ) -> Result<Self> {
        // SAFETY: the same contract.
        let ready_event = unsafe { ready.event(ordinal, stream) }?;
        let host = Self::host(base as *mut u8, 0..nbytes as isize);
        Ok(Self { ready_event: Some(ready_event), ..host })
    }

    /// The elements of a slice of cudarc's, which are written to when what is on the slice's stream now
    /// has ended.
    ///
    /// ```no_run
    /// use cudarc::driver::CudaContext;
    /// use ringstow::Target;
    /// use ringstow::{Checkpoint, LoadOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let mut weight = stream.alloc_zeros::<f32>(1024)?;
    /// let targets = [("layer.weight", Target::of_slice(&mut weight)?)];
    /// let checkpoint = Checkpoint::open("run/step-1000")?;
    /// checkpoint.load_into(&targets, LoadOptions::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`CudaSource::of_slice`](super::cuda::CudaSource::of_slice).
    #[cfg(feature = "cuda")]
    pub fn of_slice<T: bytemuck::AnyBitPattern>(slice: &'a mut CudaSlice<T>) -> Result<Self> {
        let nbytes = slice.num_bytes();
        let ordinal = super::cuda::primary_ordinal(slice)?;
        let stream = slice.stream().clone();
        // Makes the slice's stream wait for its users on other streams, as far as cudarc knows them. Later
        // users need not wait for the load: it has ended when it returns.
        let (base, _) = slice.device_ptr_mut(&stream);
        let handle = stream.cu_stream() as StreamHandle;
        // SAFETY: borrowed alone for as long as this lives, and made of bytes of any value; the
        // stream is of the primary context.
        unsafe { Self::cuda((ordinal, base), nbytes, handle, &mut Ready::default()) }
    }

    /// The event after which it may be written to, if it is on a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn ready_event(&self) -> Option<&Arc<ReadyEvent>> {
        self.ready_event.as_ref()
    }

    /// Bytes that may be written to.
    pub fn nbytes(&self) -> u64 {
        self.room.end.abs_diff(self.room.start) as u64
    }

    /// Whether all of these offsets from the origin may be written to.
    pub(crate) fn has_room_for(&self, reach: &Range<i128>) -> bool {
        reach.start >= self.room.start as i128 && reach.end <= self.room.end as i128
    }

    /// Copies runs of `bytes` into host memory. Several threads may call this at once; no two of them write the
    /// same byte.
    pub(crate) fn write(&self, bytes: &[u8], runs: Runs) {
        if let Some(to) = self.place_of(bytes, runs) {
            let from = (bytes[runs.from..].as_ptr(), runs.from_step as isize);
            // SAFETY: the runs lie in `bytes`; where they go lies within the memory, in which
            // concurrent writers are disjoint.
            unsafe { copy_runs(from, (to, runs.to_step), runs.len, runs.count) };
        }
    }

    /// Has `fill` write the bytes of a single run, in place, to host memory; returns what that returns. Does nothing for a
    /// GPU's memory, or several runs. Several threads may call this at once; no two of them write the same byte.
    pub(crate) fn fill(&self, run: Runs, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        #[cfg(feature = "cuda")]
        if self.ready_event.is_some() {
            return false;
        }
        let first = run.to as i128;
        if run.count != 1 || !self.has_room_for(&(first..first + run.len as i128)) {
            return false;
        }
        // SAFETY: these bytes lie within the memory, in which concurrent writers are disjoint, and hold bytes of any value.
        fill(unsafe { std::slice::from_raw_parts_mut(self.base.wrapping_offset(run.to), run.len) })
    }

    /// The address that the first of some runs goes to, if there is any.
    ///
    /// # Panics
    /// If they are not all in `bytes`, or do not all go to memory that may be written to.
    pub(super) fn place_of(&self, bytes: &[u8], runs: Runs) -> Option<*mut u8> {
        let last = runs.count.checked_sub(1)?;
        let source = last.checked_mul(runs.from_step).and_then(|at| at.checked_add(runs.len));
        assert!(
            source.and_then(|end| end.checked_add(runs.from)).is_some_and(|e| e <= bytes.len())
        );
        let first = runs.to as i128;
        let last = first + last as i128 * runs.to_step as i128;
        assert!(self.has_room_for(&(first.min(last)..first.max(last) + runs.len as i128)));
        Some(self.base.wrapping_offset(runs.to))
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
        assert!(first <= memory.len(), "the first element is not in the memory");
        let room = -(first as isize)..memory.len() as isize - first as isize;
        // Not of `memory[first..]`: with negative strides, elements lie before the first.
        let memory = Target::host(memory.as_mut_ptr().wrapping_add(first), room);
        Self { memory, strides: strides.to_vec() }
    }

    /// A tensor of another language's, whose first element is at `base`; strides as for
    /// [`StridedTarget::new`].
    ///
    /// # Safety
    /// All elements of the slice that is read into this are writable, and used by nobody else,
    /// until this is dropped.
    pub unsafe fn from_raw(base: *mut u8, strides: Vec<isize>) -> Self {
        Self { memory: Target::host(base, ANYWHERE), strides }
    }

    /// A tensor on a GPU, whose first element is at `base`; strides as for [`StridedTarget::new`], all
    /// else as for [`Target::cuda`].
    ///
    /// # Safety
    /// As for [`Target::cuda`], of all elements of the slice that is read into this.
    ///
    /// # Errors
    /// As for [`Target::cuda`].
    #[cfg(feature = "cuda")]
    pub unsafe fn cuda(
        (ordinal, base): (u32, u64),
        strides: Vec<isize>,
        stream: StreamHandle,
        ready: &mut Ready,
    ) -> Result<Self> {
        // SAFETY: the same contract.
        let memory = unsafe { Target::cuda((ordinal, base), 0, stream, ready) }?;
        Ok(Self { memory: Target { room: ANYWHERE, ..memory }, strides })
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_scattered_byte_by_byte(
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
            let runs = Runs { from: 0, from_step, to, to_step: step, len, count };
            Target::new(&mut memory).write(&bytes, runs);
            prop_assert_eq!(memory, expected);
        }
    }

    #[test]
    fn one_run_is_filled_in_place() {
        let mut memory = vec![0; 10];
        let run = |to, len, count| Runs { from: 0, from_step: len, to, to_step: 5, len, count };
        let fill = |to: &mut [u8]| {
            to.fill(7);
            true
        };
        assert!(Target::new(&mut memory).fill(run(3, 4, 1), fill));
        assert_eq!(memory, [0, 0, 0, 7, 7, 7, 7, 0, 0, 0]);
        let target = Target::new(&mut memory);
        for (to, len, count) in [(0, 4, 2), (0, 4, 0), (7, 4, 1), (-1, 4, 1)] {
            assert!(!target.fill(run(to, len, count), fill));
        }
    }

    #[test]
    fn runs_outside_of_memory_or_bytes_panic() {
        let write = |memory: &mut [u8], to, step, len, count| {
            let runs = Runs { from: 0, from_step: 4, to, to_step: step, len, count };
            let target = Target::new(memory);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target.write(&[1; 8], runs)))
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
