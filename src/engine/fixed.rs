//! Which of the pool's buffers an engine has registered with the kernel, and why not all of them.
//! Registering itself is the engine's.

use super::ladder::{Fallback, Refusal};
use crate::config::Switch;
use crate::pool::{Buffer, Pool, memlock};
use nix::libc::ENOMEM;
use std::io;

/// The leading buffers of a pool, registered; index = slot.
pub(super) struct Fixed {
    /// Keeps the registered memory mapped.
    pool: Option<Pool>,
    count: usize,
}

impl Fixed {
    /// Registers as much of the pool as the memory lock limit and the engine allow. What they do not
    /// allow goes unregistered, and the fallback says so. `register` is given a number of leading
    /// buffers and says how many of them the kernel then has.
    ///
    /// # Errors
    /// With [`Switch::On`], a [`Refusal`] unless all of it is registered; then some of it may be.
    pub(super) fn new(
        pool: Option<&Pool>,
        fixed: Switch,
        register: impl FnMut(&Pool, usize) -> io::Result<usize>,
    ) -> io::Result<(Self, Option<Fallback>)> {
        let Some(pool) = pool.filter(|_| fixed != Switch::Off) else {
            return Ok((Self { pool: None, count: 0 }, None));
        };
        let (count, shortfall) = register_most(pool, register);
        let registered = Self { pool: Some(pool.clone()), count };
        match shortfall {
            None => Ok((registered, None)),
            Some(refusal) if fixed == Switch::On => Err(refusal.into()),
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
}

/// How many leading buffers could be registered, and why not all.
fn register_most(
    pool: &Pool,
    mut register: impl FnMut(&Pool, usize) -> io::Result<usize>,
) -> (usize, Option<Refusal>) {
    let limit = memlock::limit_bytes();
    // Asked before, because a registration over the limit pins for seconds before it fails.
    let allowed = limit.map_or(pool.count(), |bytes| {
        (bytes.saturating_sub(memlock::RING_BYTES) / pool.block_bytes() as u64) as usize
    });
    let mut asked = pool.count().min(allowed);
    while asked > 0 {
        match register(pool, asked) {
            Ok(count) if count < asked => return (count, Some(few(pool, count))),
            Ok(count) if count < pool.count() => break,
            Ok(count) => return (count, None),
            // The kernel charges whole huge pages, and all processes of the user together.
            Err(error) if error.raw_os_error() == Some(ENOMEM) => asked /= 2,
            Err(error) => return (0, Some(refused(&error))),
        }
    }
    (asked, Some(memory_lock(pool, limit)))
}

/// The engine itself takes no more.
fn few(pool: &Pool, count: usize) -> Refusal {
    Refusal::new(
        format!("the engine registers {count} buffers at most, the pool has {}", pool.count()),
        format!("raise block_bytes, so that the pool has no more than {count}"),
    )
}

fn refused(error: &io::Error) -> Refusal {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Refusal>()) {
        Some(known) => known.clone(),
        None => Refusal::new(
            format!("the kernel does not register this memory: {error}"),
            "set fixed = off; the transfers then pin their memory one by one",
        ),
    }
}

fn memory_lock(pool: &Pool, limit: Option<u64>) -> Refusal {
    let (kib, wanted) = (pool.bytes() / 1024, pool.bytes() as u64);
    let limit = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes / 1024));
    Refusal::new(
        format!("the pool has {kib} KiB, the memory lock limit (RLIMIT_MEMLOCK) is {limit}"),
        memlock::remedy(wanted),
    )
}
