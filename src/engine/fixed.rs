//! Which of the pool's buffers an engine has registered with the kernel, and why not all of them.
//! Registering itself is the engine's.

use super::fallback::{Fallback, Refusal};
use crate::config::Switch;
use crate::pool::{Buffer, Pool};
use crate::sys::memlock;
use nix::libc::ENOMEM;
use std::io;
use std::ops::Range;

/// Bytes registered at a time, as one fixed buffer of the kernel's: all of them get memory then, and a pool
/// of small buffers needs few calls.
const STEP_BYTES: usize = 4 << 20;

/// The leading buffers of a pool, registered.
pub(super) struct Fixed {
    /// Keeps the registered memory mapped.
    pool: Option<Pool>,
    /// How many the kernel knows, and how many it may come to know.
    count: usize,
    allowed: usize,
    /// How many of the pool's buffers make one of the kernel's.
    stride: usize,
    fallback: Option<Fallback>,
}

/// One fixed buffer of the kernel's, by its index, and the pool's buffers that it consists of.
pub(super) struct Step {
    pub index: u16,
    pub slots: Range<usize>,
}

impl Fixed {
    /// Registers nothing.
    pub(super) fn none() -> Self {
        Self { pool: None, count: 0, allowed: 0, stride: 1, fallback: None }
    }

    /// Registers at once as much of the pool as the memory lock limit and the engine allow: all of that gets
    /// memory then. The rest stays unregistered, and the fallback says so. `register` takes a number of
    /// leading buffers and returns how many of them it registered, each under its slot.
    ///
    /// # Errors
    /// With [`Switch::On`], a [`Refusal`] unless all of it is registered; then some of it may be.
    pub(super) fn at_once(
        pool: &Pool,
        fixed: Switch,
        register: impl FnMut(&Pool, usize) -> io::Result<usize>,
    ) -> io::Result<Self> {
        let (count, shortfall) = register_most(pool, register);
        let fallback = match shortfall {
            Some(refusal) if fixed == Switch::On => return Err(refusal.into()),
            shortfall => shortfall.map(|refusal| fewer(pool, count, refusal)),
        };
        Ok(Self { pool: Some(pool.clone()), count, allowed: count, stride: 1, fallback })
    }

    /// Registers the pool's first buffers, and the others as they are used ([`Fixed::index_of`]). The
    /// kernel has an empty table of [`Fixed::steps`] entries.
    pub(super) fn growing(
        pool: &Pool,
        register: impl FnOnce(&Pool, &Step) -> io::Result<()>,
    ) -> Self {
        let limit = memlock::limit_bytes();
        let allowed = allowed(pool, limit);
        let fallback =
            (allowed < pool.count()).then(|| fewer(pool, allowed, memory_lock(pool, limit)));
        let mut fixed =
            Self { pool: Some(pool.clone()), count: 0, allowed, stride: stride(pool), fallback };
        if allowed > 0 {
            fixed.grow(register);
        }
        fixed
    }

    /// How many fixed buffers of the kernel's a whole pool makes.
    pub(super) fn steps(pool: &Pool) -> usize {
        pool.count().div_ceil(stride(pool))
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Why not all buffers are registered, or will not be.
    pub(super) fn fallbacks(&self) -> &[Fallback] {
        self.fallback.as_slice()
    }

    /// The index under which the kernel knows a buffer.
    pub(super) fn known(&self, buffer: &Buffer) -> Option<u16> {
        let slot = self.slot_of(buffer).filter(|&slot| slot < self.count)?;
        Some((slot / self.stride) as u16)
    }

    /// Like [`Fixed::known`], but first calls `register` if the kernel does not know the buffer yet.
    pub(super) fn index_of(
        &mut self,
        buffer: &Buffer,
        mut register: impl FnMut(&Pool, &Step) -> io::Result<()>,
    ) -> Option<u16> {
        let slot = self.slot_of(buffer)?;
        // The pool lends slots in order, so the next step mostly suffices.
        while slot >= self.count && slot < self.allowed {
            self.grow(&mut register);
        }
        self.known(buffer)
    }

    /// A buffer's number, if it is one of this pool's own. Compares addresses, since another pool's buffer has a slot
    /// too.
    fn slot_of(&self, buffer: &Buffer) -> Option<usize> {
        let pool = self.pool.as_ref()?;
        let slot = buffer.slot().map(|slot| slot as usize).filter(|&slot| slot < pool.count())?;
        let address = pool.base() as usize + slot * pool.block_bytes();
        let is_its = buffer.as_ptr() as usize == address && buffer.len() <= pool.block_bytes();
        is_its.then_some(slot)
    }

    /// Registers one more step, and no further ones if that fails.
    fn grow(&mut self, register: impl FnOnce(&Pool, &Step) -> io::Result<()>) {
        let Some(pool) = &self.pool else { return };
        let end = (self.count + self.stride).min(self.allowed);
        let step = Step { index: (self.count / self.stride) as u16, slots: self.count..end };
        match register(pool, &step) {
            Ok(()) => self.count = end,
            Err(error) => {
                self.allowed = self.count;
                let why = match error.raw_os_error() {
                    // All processes of the user count together.
                    Some(ENOMEM) => memory_lock(pool, memlock::limit_bytes()),
                    _ => refused(&error),
                };
                self.fallback = Some(fewer(pool, self.count, why));
            }
        }
    }
}

/// How many of a pool's buffers make a step.
fn stride(pool: &Pool) -> usize {
    (STEP_BYTES / pool.block_bytes().max(1)).max(1)
}

/// How many of a pool's buffers fit the memory lock limit. Computed before registering, because a
/// registration over the limit pins memory for seconds before it fails.
fn allowed(pool: &Pool, limit: Option<u64>) -> usize {
    let allowed = limit.map_or(pool.count(), |bytes| {
        (bytes.saturating_sub(memlock::RING_BYTES) / pool.block_bytes() as u64) as usize
    });
    pool.count().min(allowed)
}

/// Registers as many leading buffers as possible, and returns their number and why not all.
fn register_most(
    pool: &Pool,
    mut register: impl FnMut(&Pool, usize) -> io::Result<usize>,
) -> (usize, Option<Refusal>) {
    let limit = memlock::limit_bytes();
    let mut asked = allowed(pool, limit);
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

/// The fallback for a pool that is only partly registered.
fn fewer(pool: &Pool, count: usize, why: Refusal) -> Fallback {
    let wanted = format_args!("{} fixed buffers", pool.count());
    why.fallback(wanted, format_args!("{count} fixed buffers, the others unregistered"))
}

/// Why the engine registers no more.
fn few(pool: &Pool, count: usize) -> Refusal {
    Refusal::new(
        format!("the engine registers {count} buffers at most, the pool has {}", pool.count()),
        format!("raise block_bytes, so that the pool has no more than {count}"),
    )
}

fn refused(error: &io::Error) -> Refusal {
    match Refusal::in_error(error) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool that the kernel registers but for what is behind `refused_from` steps.
    fn grown(
        pool: &Pool,
        refused_from: u16,
    ) -> (Fixed, impl FnMut(&Pool, &Step) -> io::Result<()> + use<>) {
        let register = move |_: &Pool, step: &Step| match step.index < refused_from {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(ENOMEM)),
        };
        (Fixed::growing(pool, register), register)
    }

    #[test]
    fn buffers_are_registered_on_first_use() {
        let pool = Pool::new(8, STEP_BYTES / 2).unwrap();
        let (mut fixed, mut register) = grown(&pool, u16::MAX);
        let limited = !fixed.fallbacks().is_empty(); // by this machine's memory lock limit
        let held: Vec<Buffer> = (0..8).map(|_| pool.lease().unwrap()).collect();
        assert!(fixed.count() <= 2, "{}", fixed.count());
        assert!(limited || fixed.index_of(&held[5], &mut register) == Some(2));
        assert!(limited || fixed.count() == 6);
        assert!(limited || fixed.index_of(&held[0], &mut register) == Some(0));
        assert_eq!(fixed.index_of(&Buffer::alone(4096).unwrap(), &mut register), None);
    }

    #[test]
    fn buffers_that_the_kernel_refuses_stay_unregistered_with_a_fallback() {
        let pool = Pool::new(8, STEP_BYTES).unwrap();
        let (mut fixed, mut register) = grown(&pool, 0);
        assert!(fixed.fallbacks()[0].got.starts_with("0 fixed buffers"));
        let buffer = pool.lease().unwrap();
        assert_eq!(fixed.index_of(&buffer, &mut register), None);
        assert_eq!(fixed.count(), 0);
    }
}
