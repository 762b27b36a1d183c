//! Which buffers of a pool are free. Knows their numbers, not their memory.

use std::io;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};

/// The free slots of a pool. Buffers return theirs when they are dropped.
///
/// The first `count` are the pool's own. Further ones come and go with memory that the pool takes for a while; only who
/// asks for any slot gets these, and of the pool's own no new one that was not granted.
#[derive(Debug)]
pub struct FreeSlots {
    /// Own slots that there can be.
    count: usize,
    slots: Mutex<Slots>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Slots {
    /// Own slots that were returned. The last one is lent first: its memory may still be in a cache.
    free: Vec<u32>,
    /// Own slots that were ever lent; the others have no memory yet.
    used: usize,
    /// Own slots for which memory may be taken without asking.
    granted: usize,
    /// Free slots beyond the pool's own, likewise, and whether each was ever lent.
    further: Vec<Slot>,
    /// Whether buffers were given up, and so may never come back.
    broken: bool,
}

/// Which slots do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The pool's own.
    Own,
    /// Those that have memory or were granted, and further ones.
    Any,
}

/// A slot that was taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub number: u32,
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
    pub(super) fn wait(&self, which: Which) -> io::Result<Slot> {
        let mut slots = self.slots();
        loop {
            if let Some(slot) = slots.take(self.count, which) {
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
    pub(super) fn take(&self, which: Which) -> Option<Slot> {
        self.slots().take(self.count, which)
    }

    /// Takes a free slot of the pool's own if another one stays free.
    pub(super) fn take_spare(&self) -> Option<Slot> {
        let mut slots = self.slots();
        let free = slots.free.len() + self.count.saturating_sub(slots.used);
        if free < 2 { None } else { slots.take(self.count, Which::Own) }
    }

    /// Returns a slot.
    pub(super) fn put(&self, number: u32) {
        let mut slots = self.slots();
        if (number as usize) < self.count {
            debug_assert!((number as usize) < slots.used && !slots.free.contains(&number));
            slots.free.push(number);
        } else {
            slots.further.push(Slot { number, is_new: false });
        }
        drop(slots);
        // All: the one that is woken may not have asked for this kind of slot.
        self.changed.notify_all();
    }

    /// Grants the first `count` own slots.
    pub(super) fn grant(&self, count: usize) {
        let mut slots = self.slots();
        slots.granted = slots.granted.max(count.min(self.count));
        drop(slots);
        self.changed.notify_all();
    }

    /// Own slots that were granted.
    pub(super) fn granted(&self) -> usize {
        self.slots().granted
    }

    /// Adds slots whose memory is there now.
    pub(super) fn add(&self, numbers: Range<u32>) {
        self.slots().further.extend(numbers.rev().map(|number| Slot { number, is_new: true }));
        self.changed.notify_all();
    }

    /// Removes slots that were added, if all of them are free. Returns whether it did.
    pub(super) fn remove(&self, numbers: &Range<u32>) -> bool {
        let mut slots = self.slots();
        let free = slots.further.iter().filter(|slot| numbers.contains(&slot.number)).count();
        if free < numbers.len() {
            return false;
        }
        slots.further.retain(|slot| !numbers.contains(&slot.number));
        true
    }

    /// Notes that a buffer will never be returned. Threads that wait for one get an error.
    pub fn give_up(&self) {
        self.slots().broken = true;
        self.changed.notify_all();
    }

    /// Own slots that there can be.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Own slots that were ever lent.
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
    fn take(&mut self, count: usize, which: Which) -> Option<Slot> {
        if let Some(number) = self.free.pop() {
            return Some(Slot { number, is_new: false });
        }
        let new = if which == Which::Own { count } else { self.granted };
        if self.used < new {
            self.used += 1;
            return Some(Slot { number: self.used as u32 - 1, is_new: true });
        }
        if which == Which::Own { None } else { self.further.pop() }
    }
}
