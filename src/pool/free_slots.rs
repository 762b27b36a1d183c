//! Which buffers of a pool are free. Knows their numbers, not their memory.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard};

/// The free slots of a pool. Buffers return theirs when they are dropped.
#[derive(Debug)]
pub struct FreeSlots {
    /// Slots that there can be.
    count: usize,
    slots: Mutex<Slots>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Slots {
    /// Slots that were returned. The last one is lent first: its memory may still be in a cache.
    free: Vec<u16>,
    /// Slots that were ever lent; the others have no memory yet.
    used: usize,
    /// Whether buffers were given up, and so may never come back.
    broken: bool,
}

/// A slot that was taken.
pub(super) struct Slot {
    pub number: u16,
    /// Whether it is lent for the first time, and so has no memory yet.
    pub is_new: bool,
}

impl FreeSlots {
    /// `count` slots, all free.
    pub(super) fn new(count: usize) -> Self {
        Self { count, slots: Mutex::default(), changed: Condvar::new() }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a free slot; waits until one is returned if there is none.
    ///
    /// # Errors
    /// If no slot is free and a broken engine could not return some: waiting could last forever.
    pub(super) fn wait(&self) -> io::Result<Slot> {
        let mut slots = self.slots();
        loop {
            if let Some(slot) = slots.take(self.count) {
                return Ok(slot);
            }
            if slots.broken {
                return Err(io::Error::other(
                    "an I/O engine broke and gave up the staging buffers that it had; the next save or \
                     load takes new ones",
                ));
            }
            slots = self.changed.wait(slots).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Takes a free slot, if there is one now.
    pub(super) fn take(&self) -> Option<Slot> {
        self.slots().take(self.count)
    }

    /// Takes a free slot if another one stays free.
    pub(super) fn take_spare(&self) -> Option<Slot> {
        let mut slots = self.slots();
        let free = slots.free.len() + self.count.saturating_sub(slots.used);
        if free < 2 { None } else { slots.take(self.count) }
    }

    /// Returns a slot.
    pub(super) fn put(&self, slot: u16) {
        let mut slots = self.slots();
        debug_assert!(usize::from(slot) < slots.used && !slots.free.contains(&slot));
        slots.free.push(slot);
        drop(slots);
        self.changed.notify_one();
    }

    /// Notes that a buffer will never be returned. Threads that wait for one get an error.
    pub fn give_up(&self) {
        self.slots().broken = true;
        self.changed.notify_all();
    }

    /// Slots that there can be.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Slots that were ever lent.
    pub(super) fn used(&self) -> usize {
        self.slots().used
    }

    /// Whether a buffer was given up.
    pub(super) fn is_broken(&self) -> bool {
        self.slots().broken
    }
}

impl Slots {
    /// Takes a free slot, preferably one that was used before.
    fn take(&mut self, count: usize) -> Option<Slot> {
        if let Some(number) = self.free.pop() {
            return Some(Slot { number, is_new: false });
        }
        let number = u16::try_from(self.used).ok().filter(|_| self.used < count)?;
        self.used += 1;
        Some(Slot { number, is_new: true })
    }
}
