//! The staging pool: a fixed number of equal buffers, prefaulted once and used again and again.

use super::{Buffer, Mapping};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::any::Any;
use std::io;
use std::sync::Arc;

/// A bounded set of staging buffers. Cloning a handle is cheap; the memory is shared.
#[derive(Debug, Clone)]
pub struct Pool {
    mapping: Arc<Mapping>,
    block_bytes: usize,
    count: usize,
    free: Receiver<u16>,
    give_back: Sender<u16>,
}

impl Pool {
    /// io_uring takes at most this many fixed buffers (`IORING_MAX_REG_BUFFERS`).
    pub const BUFFERS_MAX: usize = 16384;

    /// Maps and prefaults `count` buffers of `block_bytes` each.
    ///
    /// # Errors
    /// The system's, when there is no memory for it; [`io::ErrorKind::InvalidInput`] for more than
    /// [`Pool::BUFFERS_MAX`] buffers.
    pub fn new(count: usize, block_bytes: usize) -> io::Result<Self> {
        if count > Self::BUFFERS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{count} buffers are more than the {} that io_uring registers; raise block_bytes",
                    Self::BUFFERS_MAX
                ),
            ));
        }
        let len = count
            .checked_mul(block_bytes)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping::new(len)?;
        mapping.keep_from_children();
        mapping.prefault(0, mapping.len());
        let (give_back, free) = unbounded();
        for slot in 0..count {
            let _ = give_back.send(slot as u16);
        }
        Ok(Self { mapping: Arc::new(mapping), block_bytes, count, free, give_back })
    }

    /// Takes a free buffer, waiting for one to come back if need be.
    pub fn lease(&self) -> Buffer {
        let slot = self.free.recv().expect("the pool holds a sender of its own");
        self.buffer(slot)
    }

    /// Takes a free buffer if there is one now.
    pub fn try_lease(&self) -> Option<Buffer> {
        self.free.try_recv().ok().map(|slot| self.buffer(slot))
    }

    fn buffer(&self, slot: u16) -> Buffer {
        let start = usize::from(slot) * self.block_bytes;
        let range = start..start + self.block_bytes;
        Buffer::of_pool(self.mapping.clone(), range, slot, self.give_back.clone())
    }

    /// Number of buffers.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of one buffer.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of the whole pool.
    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }

    /// What is attached to the pool's memory; see [`Mapping::attachment`].
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> &T {
        self.mapping.attachment(make)
    }

    /// Address of the first buffer; the others follow it back to back. For registration.
    pub fn base(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_lent_to_one_holder_at_a_time_and_comes_back() {
        let pool = Pool::new(2, 4096).unwrap();
        let (a, b) = (pool.lease(), pool.lease());
        assert_ne!(a.slot(), b.slot());
        assert!(pool.try_lease().is_none());
        let freed = a.slot();
        drop(a);
        assert_eq!(pool.try_lease().unwrap().slot(), freed);
    }

    #[test]
    fn buffers_are_aligned_for_direct_io_and_disjoint() {
        let pool = Pool::new(3, 8192).unwrap();
        let mut held: Vec<_> = (0..3).map(|_| pool.lease()).collect();
        for (i, buffer) in held.iter_mut().enumerate() {
            assert_eq!(buffer.as_mut_ptr() as usize % crate::config::ALIGN, 0);
            buffer.fill(i as u8 + 1);
        }
        for (i, buffer) in held.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == i as u8 + 1));
        }
        assert_eq!(pool.base() as usize % super::super::mapping::HUGE_PAGE, 0);
    }

    #[test]
    fn more_buffers_than_io_uring_registers_are_refused() {
        let error = Pool::new(Pool::BUFFERS_MAX + 1, 4096).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let mut buffer = Pool::new(1, 4096).unwrap().lease();
        buffer.fill(7);
        assert_eq!(buffer[4095], 7);
    }
}
