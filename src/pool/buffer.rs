//! A run of a mapping with exactly one owner.

use super::Mapping;
use super::free_slots::FreeSlots;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// A mapping that was cut into buffers: unusable until all of them are dropped.
#[derive(Debug)]
pub struct CutMapping(Arc<Mapping>);

impl CutMapping {
    /// Where its first byte is, to be used only once it is one mapping again.
    pub fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// Returns the mapping.
    ///
    /// # Panics
    /// If a buffer over it is left.
    pub fn rejoin(self) -> Mapping {
        Arc::try_unwrap(self.0).expect("every buffer over the mapping is dropped")
    }
}

/// Exclusive ownership of some bytes of a [`Mapping`]. Dropping it returns it to its pool, if it has one.
#[derive(Debug)]
pub struct Buffer {
    mapping: Arc<Mapping>,
    range: Range<usize>,
    /// Of a pool's: where it is returned to, and its number there. That of the pool's own leads to the ring's fixed
    /// buffers.
    home: Option<(Arc<FreeSlots>, u32)>,
}

impl Buffer {
    /// Cuts a mapping into adjacent buffers of the given lengths.
    ///
    /// # Panics
    /// If the lengths add up to more than the mapping's.
    pub fn cut(
        mapping: Mapping,
        lens: impl IntoIterator<Item = usize>,
    ) -> (CutMapping, Vec<Buffer>) {
        let mapping = Arc::new(mapping);
        let mut start = 0;
        let buffers = lens.into_iter().map(|len| {
            let range = start..start + len;
            assert!(range.end <= mapping.len());
            start = range.end;
            Buffer { mapping: mapping.clone(), range, home: None }
        });
        let buffers = buffers.collect();
        (CutMapping(mapping), buffers)
    }

    /// A buffer over memory of its own.
    ///
    /// # Errors
    /// The system's, when there is no memory for it.
    pub fn alone(len: usize) -> std::io::Result<Buffer> {
        let mapping = Arc::new(Mapping::new(len)?);
        Ok(Buffer { mapping, range: 0..len, home: None })
    }

    /// A pool's buffer. The pool hands each slot to one holder at a time.
    pub(super) fn of_pool(
        mapping: Arc<Mapping>,
        range: Range<usize>,
        home: (Arc<FreeSlots>, u32),
    ) -> Self {
        Self { mapping, range, home: Some(home) }
    }

    /// Number in the pool; `None` for memory that is not a pool's.
    pub fn slot(&self) -> Option<u32> {
        self.home.as_ref().map(|(_, slot)| *slot)
    }

    /// First byte, for the kernel. Valid for `len()` bytes while this buffer lives.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: the range lies in the mapping.
        unsafe { self.mapping.as_ptr().add(self.range.start) }
    }

    /// Gives the buffer up for good, because the kernel may still use its memory: that stays mapped as long as
    /// the process. Threads that wait for a buffer of the pool get an error.
    pub fn give_up(self) {
        self.home().iter().for_each(|home| home.give_up());
        std::mem::forget(self);
    }

    /// Where it returns to, if it is a pool's.
    pub fn home(&self) -> Option<&Arc<FreeSlots>> {
        self.home.as_ref().map(|(home, _)| home)
    }

    /// Faults the buffer's pages in; see [`Mapping::prefault`].
    pub fn prefault(&mut self) {
        // SAFETY: the range is this buffer's alone.
        unsafe { self.mapping.prefault(self.range.start, self.range.len()) };
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds, initialised (anonymous memory is zeroed), and exclusively ours.
        unsafe {
            std::slice::from_raw_parts(
                self.mapping.as_ptr().add(self.range.start),
                self.range.len(),
            )
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.range.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some((home, slot)) = &self.home {
            home.put(*slot);
        }
    }
}
