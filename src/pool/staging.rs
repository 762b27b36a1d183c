//! The staging pool: a bounded number of equal buffers, taken from the system one by one as they are
//! needed, and used again and again.

use super::copy_memory::take_or_reclaim;
use super::free_slots::{FreeSlots, Slot, Which};
use super::growth::Growth;
use super::{Buffer, Mapping, NoMore};
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A bounded set of staging buffers. Cloning a handle is cheap; the memory is shared.
///
/// Making one reserves addresses and no memory. The memory of a buffer comes from the system when it is
/// leased for the first time, on the thread that leases it, and stays with the pool: a save of one block
/// takes one buffer, however large the pool may become.
///
/// A background save may have more than the pool's own buffers: see [`Pool::lease_any`].
#[derive(Debug, Clone)]
pub struct Pool {
    mapping: Arc<Mapping>,
    block_bytes: usize,
    growth: Arc<Growth>,
    /// Dropped last: who has the only one of them has all of the pool.
    home: Arc<FreeSlots>,
}

impl Pool {
    /// Buffers of a pool at most.
    pub const BUFFERS_MAX: usize = crate::limits::FIXED_BUFFERS_MAX;

    /// Reserves room for `count` buffers of `block_bytes` each.
    ///
    /// # Errors
    /// The system's, when there is no address space for it.
    ///
    /// # Panics
    /// For more than [`Pool::BUFFERS_MAX`] buffers, which a [`Config`](crate::Config) cannot ask for.
    pub fn new(count: usize, block_bytes: usize) -> io::Result<Self> {
        assert!(count <= Self::BUFFERS_MAX, "{count} buffers are more than io_uring registers");
        let len = count
            .checked_mul(block_bytes)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping::new(len)?;
        mapping.keep_from_children();
        let home = Arc::new(FreeSlots::new(count));
        let growth = Growth::new(&home, block_bytes);
        Ok(Self { mapping: Arc::new(mapping), block_bytes, growth, home })
    }

    /// Takes a free buffer; waits until one is returned if there is none.
    ///
    /// # Errors
    /// If no buffer is free and a broken engine could not return some: waiting could last forever.
    pub fn lease(&self) -> io::Result<Buffer> {
        self.home.wait(Which::Own).map(|slot| self.buffer(slot))
    }

    /// Takes a free buffer, if there is one now.
    pub fn try_lease(&self) -> Option<Buffer> {
        self.home.take(Which::Own).map(|slot| self.buffer(slot))
    }

    /// Takes a free buffer if another one stays free. For an owner that may keep it as long as it likes: such owners never
    /// have all buffers, so a save that waits for one gets it.
    pub fn try_lease_spare(&self) -> Option<Buffer> {
        self.home.take_spare().map(|slot| self.buffer(slot))
    }

    /// [`Pool::lease`] for a background save: waits for any buffer, one of the pool's own or not.
    ///
    /// # Errors
    /// As for [`Pool::lease`].
    pub fn lease_any(&self) -> io::Result<Buffer> {
        self.home.wait(Which::Any).map(|slot| self.buffer(slot))
    }

    /// [`Pool::try_lease`] for a background save.
    pub fn try_lease_any(&self) -> Option<Buffer> {
        self.home.take(Which::Any).map(|slot| self.buffer(slot))
    }

    /// Takes more memory for a background save, so that training need not wait for the disk. All processes of the machine
    /// take at most half of what is available.
    ///
    /// # Errors
    /// Why no more memory may be taken.
    pub fn grow(&self) -> Result<(), NoMore> {
        self.growth.grow(&self.home, take_or_reclaim)
    }

    /// Gives memory back that a background save took and no save uses: all of it if none was used during `idle`, otherwise
    /// what others have come to need. Returns how many bytes.
    pub fn give_back(&self, idle: Duration) -> usize {
        self.growth.give_back(&self.home, idle)
    }

    /// Whether nobody else has a handle of this pool or a buffer of it: its memory is given back when this is dropped.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.home) == 1
    }

    /// Bytes of all memory that it has taken: that of its own buffers that were ever lent, and what is beyond them.
    pub fn taken_bytes(&self) -> usize {
        self.used() * self.block_bytes + self.further_bytes()
    }

    /// Bytes of memory that a background save may use without taking more.
    pub fn granted_bytes(&self) -> usize {
        self.home.granted() * self.block_bytes + self.further_bytes()
    }

    /// Bytes of memory beyond the pool's own buffers.
    pub fn further_bytes(&self) -> usize {
        self.growth.bytes()
    }

    /// Calls `prepare` with all memory that [`Pool::grow`] takes from now on; what it fails for is not taken. Only the first
    /// call counts.
    pub fn prepare_further(
        &self,
        prepare: impl Fn(&Mapping) -> Result<(), String> + Send + Sync + 'static,
    ) {
        self.growth.prepare(&self.home, prepare);
    }

    fn buffer(&self, Slot { number, is_new }: Slot) -> Buffer {
        let own = number as usize;
        let mut buffer = if own < self.count() {
            if is_new {
                self.growth.count_own(own + 1, &self.home);
            }
            let start = own * self.block_bytes;
            let range = start..start + self.block_bytes;
            Buffer::of_pool(self.mapping.clone(), range, (self.home.clone(), number))
        } else {
            self.growth.buffer(number, &self.home)
        };
        if is_new {
            buffer.prefault(); // here, and not in the middle of a copy or a transfer
        }
        buffer
    }

    /// Number of the pool's own buffers, once all of them are used.
    pub fn count(&self) -> usize {
        self.home.count()
    }

    /// Number of the pool's own buffers that have memory: the most that were ever lent at once.
    pub fn used(&self) -> usize {
        self.home.used()
    }

    /// Whether buffers were given up with a broken engine. Replace such a pool.
    pub fn is_broken(&self) -> bool {
        self.home.is_broken()
    }

    /// Bytes of one buffer.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of the pool's own buffers, once all of them are used.
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
    fn slot_has_one_holder_at_a_time_and_is_reused() {
        let pool = Pool::new(2, 4096).unwrap();
        let (a, b) = (pool.lease().unwrap(), pool.lease().unwrap());
        assert_ne!(a.slot(), b.slot());
        assert!(pool.try_lease().is_none());
        let freed = a.slot();
        drop(a);
        assert_eq!(pool.try_lease().unwrap().slot(), freed);
    }

    #[test]
    fn spare_buffer_is_never_the_last_one() {
        let pool = Pool::new(3, 4096).unwrap();
        let kept = [pool.try_lease_spare().unwrap(), pool.try_lease_spare().unwrap()];
        assert!(pool.try_lease_spare().is_none());
        drop(pool.try_lease().expect("one is left"));
        assert!(pool.try_lease_spare().is_none());
        drop(kept);
        assert!(pool.try_lease_spare().is_some());
    }

    #[test]
    fn buffers_are_aligned_for_direct_io_and_disjoint() {
        let pool = Pool::new(3, 8192).unwrap();
        let mut held: Vec<_> = (0..3).map(|_| pool.lease().unwrap()).collect();
        for (i, buffer) in held.iter_mut().enumerate() {
            assert_eq!(buffer.as_mut_ptr() as usize % crate::limits::ALIGN, 0);
            buffer.fill(i as u8 + 1);
        }
        for (i, buffer) in held.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == i as u8 + 1));
        }
        assert_eq!(pool.base() as usize % super::super::mapping::HUGE_PAGE, 0);
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let mut buffer = Pool::new(1, 4096).unwrap().lease().unwrap();
        buffer.fill(7);
        assert_eq!(buffer[4095], 7);
    }

    /// Memory that the pool has, in bytes, as the kernel tells it page by page.
    #[cfg(target_os = "linux")]
    fn resident(pool: &Pool) -> usize {
        use std::os::unix::fs::FileExt;
        let pages = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; pool.bytes() / 4096 * 8];
        pages.read_exact_at(&mut entries, pool.base() as u64 / 4096 * 8).unwrap();
        // The highest bit of each little-endian word: present.
        entries.chunks(8).filter(|entry| entry[7] >> 7 == 1).count() * 4096
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "reads /proc/self/pagemap")]
    fn buffer_takes_memory_when_first_lent() {
        const BLOCK: usize = 4 << 20;
        let pool = Pool::new(64, BLOCK).unwrap();
        assert_eq!((pool.used(), resident(&pool)), (0, 0));
        for _ in 0..5 {
            drop(pool.lease().unwrap());
        }
        assert_eq!((pool.used(), resident(&pool)), (1, BLOCK));
        let held = [pool.lease().unwrap(), pool.try_lease().unwrap()];
        assert_eq!((pool.used(), resident(&pool)), (2, 2 * BLOCK));
        drop(held);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn background_save_gets_more_buffers_than_the_pool_has() {
        const BLOCK: usize = 16 << 20;
        let _turn = super::super::in_turn();
        let pool = Pool::new(2, BLOCK).unwrap();
        let lease = |pool: &Pool| {
            pool.try_lease_any().unwrap_or_else(|| {
                pool.grow().unwrap();
                pool.try_lease_any().unwrap()
            })
        };
        let mut held: Vec<Buffer> = (0..7).map(|_| lease(&pool)).collect();
        for (i, buffer) in held.iter_mut().enumerate() {
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % BLOCK.min(2 << 20)), (BLOCK, 0));
            buffer.fill(i as u8 + 1);
        }
        for (i, buffer) in held.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == i as u8 + 1));
        }
        assert_eq!(pool.further_bytes(), 128 << 20);
        assert!(pool.try_lease().is_none(), "others have the pool's own buffers only");
        // One of the pool's own, and one of the second chunk, are in use.
        held.drain(1..6);
        pool.give_back(Duration::ZERO);
        assert_eq!(pool.further_bytes(), 64 << 20);
        assert!(held[1].iter().all(|&byte| byte == 7));
        held.clear();
        pool.give_back(Duration::from_secs(3600));
        assert_eq!(pool.further_bytes(), 64 << 20, "it was used just now");
        pool.give_back(Duration::ZERO);
        assert_eq!(pool.further_bytes(), 0);
        let again: Vec<Buffer> = (0..7).map(|_| lease(&pool)).collect();
        assert_eq!(again.iter().filter(|buffer| buffer[0] == 0).count(), 5, "new memory is zeroed");
    }

    #[test]
    fn lease_fails_when_the_awaited_buffer_is_given_up() {
        let pool = Pool::new(2, 4096).unwrap();
        let (lost, kept) = (pool.lease().unwrap(), pool.lease().unwrap());
        let (tell, told) = crossbeam_channel::bounded(1);
        let waits = pool.clone();
        std::thread::spawn(move || tell.send(waits.lease().is_err()));
        lost.give_up();
        let failed = told.recv_timeout(std::time::Duration::from_secs(60));
        assert!(failed.expect("it waits for ever"), "a buffer was lent that nobody returned");
        assert!(pool.is_broken());
        drop(kept);
        drop(pool.lease().expect("the other one is free"));
        // The memory of the lost buffer stays mapped as long as the pool: the kernel may write to it.
        let held = pool.lease().unwrap();
        assert!(pool.try_lease().is_none());
        drop(held);
    }
}
