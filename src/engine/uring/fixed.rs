//! The pool as the ring's fixed buffers: mapped and pinned once, not at every transfer.

use crate::config::Switch;
use crate::engine::ladder::{Fallback, Refusal};
use crate::pool::{Buffer, Pool, memlock};
use io_uring::IoUring;
use nix::libc::{ENOMEM, iovec};
use std::io;

/// The leading buffers of a pool, registered; index = slot.
pub(super) struct Fixed {
    /// Keeps the registered memory mapped.
    pool: Option<Pool>,
    count: usize,
}

impl Fixed {
    /// Registers as much of the pool as the memory lock limit allows. What it does not allow goes
    /// unregistered, and the fallback says so.
    ///
    /// # Errors
    /// With [`Switch::On`], a [`Refusal`] unless all of it is registered.
    pub(super) fn new(
        ring: &IoUring,
        pool: Option<&Pool>,
        fixed: Switch,
        supported: bool,
    ) -> io::Result<(Self, Option<Fallback>)> {
        let none = Self { pool: None, count: 0 };
        let Some(pool) = pool.filter(|_| fixed != Switch::Off) else {
            return Ok((none, None));
        };
        let (count, shortfall) = if supported {
            register(ring, pool)
        } else {
            let reason = "this kernel has no READ_FIXED and WRITE_FIXED";
            (0, Some(Refusal::new(reason, "use Linux 5.6 or later, or set fixed = off")))
        };
        let registered = Self { pool: Some(pool.clone()), count };
        match shortfall {
            None => Ok((registered, None)),
            Some(refusal) if fixed == Switch::On => {
                registered.release(ring);
                Err(refusal.into())
            }
            Some(Refusal { reason, remedy }) => {
                let wanted = format!("{} fixed buffers", pool.count());
                let got = format!("{count} fixed buffers, the others unregistered");
                Ok((registered, Some(Fallback { wanted, got, reason, remedy })))
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The index under which the kernel knows a buffer. Told by its address too, since a buffer of
    /// another pool has slots as well.
    pub(super) fn index_of(&self, buffer: &Buffer) -> Option<u16> {
        let pool = self.pool.as_ref()?;
        let slot = buffer.slot().filter(|&slot| usize::from(slot) < self.count)?;
        let address = pool.base() as usize + usize::from(slot) * pool.block_bytes();
        (buffer.as_ptr() as usize == address && buffer.len() <= pool.block_bytes()).then_some(slot)
    }

    /// Gives the memory lock quota back now; the end of the ring does so only some 20 ms later.
    pub(super) fn release(&self, ring: &IoUring) {
        if self.count > 0 {
            let _ = ring.submitter().unregister_buffers();
        }
    }
}

/// How many leading buffers could be registered, and why not all.
fn register(ring: &IoUring, pool: &Pool) -> (usize, Option<Refusal>) {
    let limit = memlock::limit_bytes();
    let wanted = pool.bytes() as u64;
    // Asked before, because a registration over the limit pins for seconds before it fails.
    let allowed = limit.map_or(pool.count(), |bytes| {
        (bytes.saturating_sub(memlock::RING_BYTES) / pool.block_bytes() as u64) as usize
    });
    let mut count = pool.count().min(allowed);
    let mut last = None;
    while count > 0 {
        match register_leading(ring, pool, count) {
            Ok(()) => break,
            // The kernel charges whole huge pages, and all processes of the user together.
            Err(error) if error.raw_os_error() == Some(ENOMEM) => count /= 2,
            Err(error) => {
                count = 0;
                last = Some(error);
            }
        }
    }
    if count == pool.count() {
        return (count, None);
    }
    let refusal = match last {
        Some(error) => Refusal::new(
            format!("the kernel does not register this memory: {error}"),
            "set fixed = off; the transfers then pin their memory one by one",
        ),
        None => {
            let limit = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes / 1024));
            let kib = wanted / 1024;
            Refusal::new(
                format!(
                    "the pool has {kib} KiB, the memory lock limit (RLIMIT_MEMLOCK) is {limit}"
                ),
                memlock::remedy(wanted),
            )
        }
    };
    (count, Some(refusal))
}

fn register_leading(ring: &IoUring, pool: &Pool, count: usize) -> io::Result<()> {
    let buffers: Vec<iovec> = (0..count)
        .map(|slot| iovec {
            iov_base: pool.base().wrapping_add(slot * pool.block_bytes()).cast(),
            iov_len: pool.block_bytes(),
        })
        .collect();
    // SAFETY: the buffers are the pool's, back to back, and its mapping outlives the registration:
    // `Fixed` holds the pool until the engine has been dropped, ring first.
    unsafe { ring.submitter().register_buffers(&buffers) }
}
