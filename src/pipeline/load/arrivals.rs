//! Parts of files that other processes read and send, for a load that takes them in place of reading the files.
//!
//! A cache, and no more: the load checks what it takes from here like everything else, and reads from the file what does not
//! come, comes damaged, or has been given up since it was not taken in time.

use crate::pool::Buffer;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use std::{fmt, io};

/// How often a thread that waits looks whether its load has ended.
const LOOK: Duration = Duration::from_millis(50);

/// The parts that a load expects, and those that are there.
pub struct Arrivals {
    home: Arc<Home>,
    /// Sorted by file and offset; no two overlap.
    places: Vec<Place>,
    /// The first byte of each part, by its number.
    begins: Vec<u64>,
    /// A part that so many others behind it have been asked for is given up if there is no memory for the next.
    behind: usize,
}

/// Where a part lies.
#[derive(Debug)]
struct Place {
    file: usize,
    range: Range<u64>,
    /// The part's number: parts come in this order.
    number: usize,
}

/// What outlives the load as long as a slot is in use.
#[derive(Debug)]
struct Home {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    parts: Vec<Part>,
    /// The first that may be here.
    oldest: usize,
    /// The last that was asked for.
    asked: usize,
    free: Vec<Buffer>,
    is_closed: bool,
}

#[derive(Debug)]
enum Part {
    Coming,
    Here(Arrived),
    Gone,
}

/// Memory for one part. Once dropped, it is free for another.
pub struct Slot {
    memory: Option<Buffer>,
    home: Weak<Home>,
}

/// A part that is here.
#[derive(Debug, Clone)]
struct Arrived {
    slot: Arc<Slot>,
    begin: u64,
    /// Whether this process has read it itself.
    is_own: bool,
}

/// A block's bytes, in one or more parts.
pub(super) struct Ahead(SmallVec<[(Range<u64>, Arrived); 2]>);

impl Arrivals {
    /// Expects parts, each a range of a file by the file's number, in this order. Keeps `slots` of them at most, each of at
    /// most `slot_bytes`.
    ///
    /// # Errors
    /// The system's, when it has no memory for the slots.
    ///
    /// # Panics
    /// If two parts overlap, or one is longer than a slot.
    pub fn new(
        parts: Vec<(usize, Range<u64>)>,
        slots: usize,
        slot_bytes: usize,
    ) -> io::Result<Self> {
        let free = (0..slots).map(|_| Buffer::alone(slot_bytes));
        let state = State {
            parts: parts.iter().map(|_| Part::Coming).collect(),
            oldest: 0,
            asked: 0,
            free: free.collect::<io::Result<_>>()?,
            is_closed: false,
        };
        let begins = parts.iter().map(|(_, range)| range.start).collect();
        let place = |(number, (file, range))| Place { file, range, number };
        let mut places: Vec<Place> = parts.into_iter().enumerate().map(place).collect();
        places.sort_unstable_by_key(|place| (place.file, place.range.start));
        let is_apart = |pair: &[Place]| {
            pair[0].file < pair[1].file || pair[0].range.end <= pair[1].range.start
        };
        assert!(places.windows(2).all(is_apart), "parts overlap");
        let fits = |place: &Place| place.range.end - place.range.start <= slot_bytes as u64;
        assert!(places.iter().all(fits), "a part is longer than a slot");
        let home = Arc::new(Home { state: Mutex::new(state), changed: Condvar::new() });
        Ok(Self { home, places, begins, behind: slots / 4 })
    }

    /// Memory for a part; `None` if there is none now, and this is not to wait for some.
    pub fn slot(&self, waits: bool) -> Option<Slot> {
        let mut state = self.home.lock();
        loop {
            if let Some(memory) = state.free.pop() {
                return Some(Slot { memory: Some(memory), home: Arc::downgrade(&self.home) });
            }
            match state.take_old(self.behind) {
                Some(old) => {
                    drop(state); // a slot that is dropped takes the lock
                    drop(old);
                    state = self.home.lock();
                }
                None if waits => state = self.home.wait(state),
                None => return None,
            }
        }
    }

    /// Says that a part is in a slot now, from its first byte on.
    pub fn put(&self, number: usize, slot: Arc<Slot>, is_own: bool) {
        let begin = self.begins[number];
        let mut state = self.home.lock();
        let is_wanted = !state.is_closed && matches!(state.parts[number], Part::Coming);
        if is_wanted {
            state.parts[number] = Part::Here(Arrived { slot, begin, is_own });
            self.home.changed.notify_all();
        }
    }

    /// Says that a part does not come.
    pub fn lost(&self, number: usize) {
        let mut state = self.home.lock();
        let was = std::mem::replace(&mut state.parts[number], Part::Gone);
        self.home.changed.notify_all();
        drop(state);
        drop(was);
    }

    /// Says that nothing comes any more, and gives up what is here.
    pub fn close(&self) {
        let mut state = self.home.lock();
        state.is_closed = true;
        let parts = std::mem::take(&mut state.parts);
        state.parts = parts.iter().map(|_| Part::Gone).collect();
        self.home.changed.notify_all();
        drop(state);
        drop(parts);
    }

    /// Waits for a range of a file; `None` if not all of it comes, or once the load `is_over`.
    pub(super) fn ahead(
        &self,
        file: usize,
        range: &Range<u64>,
        is_over: impl Fn() -> bool,
    ) -> Option<Ahead> {
        let first = self
            .places
            .partition_point(|place| (place.file, place.range.end) <= (file, range.start));
        let mut at = range.start;
        let covers = |place: &&Place| {
            let goes_on = place.file == file && place.range.start <= at && at < range.end;
            at = if goes_on { place.range.end } else { at };
            goes_on
        };
        let count = self.places[first..].iter().take_while(covers).count();
        // A block of more parts than there is memory for would wait for ever.
        if at < range.end || count > 2 * self.behind {
            return None;
        }
        let part = |place: &Place| {
            let within = place.range.start.max(range.start)..place.range.end.min(range.end);
            Some((within, self.wait_for(place.number, &is_over)?))
        };
        self.places[first..first + count].iter().map(part).collect::<Option<_>>().map(Ahead)
    }

    fn wait_for(&self, number: usize, is_over: &dyn Fn() -> bool) -> Option<Arrived> {
        let mut state = self.home.lock();
        if state.asked < number {
            state.asked = number;
            self.home.changed.notify_all(); // what is older may be given up
        }
        loop {
            match &state.parts[number] {
                Part::Here(arrived) => return Some(arrived.clone()),
                Part::Gone => return None,
                Part::Coming if is_over() => return None,
                Part::Coming => state = self.home.wait(state),
            }
        }
    }
}

impl State {
    /// Takes away the oldest part that is here, if enough others behind it have been asked for.
    fn take_old(&mut self, behind: usize) -> Option<Part> {
        while self.oldest + behind < self.asked && !matches!(self.parts[self.oldest], Part::Coming)
        {
            let old = std::mem::replace(&mut self.parts[self.oldest], Part::Gone);
            self.oldest += 1;
            if matches!(old, Part::Here(_)) {
                return Some(old);
            }
        }
        None // parts come in order: behind one that is coming, none is here
    }
}

impl Home {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Slot {
    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().expect("it is there until this is dropped")
    }

    /// The memory, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().expect("it is there until this is dropped")
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrivals").field("parts", &self.places.len()).finish_non_exhaustive()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let (Some(home), Some(memory)) = (self.home.upgrade(), self.memory.take()) {
            home.lock().free.push(memory);
            home.changed.notify_all();
        }
    }
}

impl Ahead {
    /// Fills `to` with the block's bytes from this offset in the file.
    pub fn read(&self, to: &mut [u8], offset: u64) {
        let end = offset + to.len() as u64;
        for (range, part) in &self.0 {
            let (from, until) = (range.start.max(offset), range.end.min(end));
            if from < until {
                let start = (from - part.begin) as usize;
                let bytes = &part.slot.bytes()[start..start + (until - from) as usize];
                to[(from - offset) as usize..(until - offset) as usize].copy_from_slice(bytes);
            }
        }
    }

    /// Bytes that another process has read.
    pub fn others_bytes(&self) -> u64 {
        let others = self.0.iter().filter(|(_, part)| !part.is_own);
        others.map(|(range, _)| range.end - range.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const PART: u64 = 8;

    fn arrivals(parts: u64, slots: usize) -> Arrivals {
        let part = |n| (0, n * PART..(n + 1) * PART);
        Arrivals::new((0..parts).map(part).collect(), slots, PART as usize).unwrap()
    }

    fn filled(arrivals: &Arrivals, byte: u8) -> Arc<Slot> {
        let mut slot = arrivals.slot(true).unwrap();
        slot.bytes_mut().fill(byte);
        Arc::new(slot)
    }

    fn read(arrivals: &Arrivals, range: Range<u64>) -> Option<Vec<u8>> {
        let ahead = arrivals.ahead(0, &range, || false)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        ahead.read(&mut bytes, range.start);
        Some(bytes)
    }

    #[test]
    fn block_is_taken_from_the_parts_that_it_lies_in() {
        let arrivals = arrivals(3, 16);
        arrivals.put(0, filled(&arrivals, 1), true);
        arrivals.put(1, filled(&arrivals, 2), false);
        assert_eq!(read(&arrivals, 6..10), Some(vec![1, 1, 2, 2]));
        assert_eq!(arrivals.ahead(0, &(6..10), || false).unwrap().others_bytes(), 2);
        assert_eq!(read(&arrivals, 20..30), None, "it reaches beyond what comes");
        assert_eq!(arrivals.ahead(1, &(0..4), || false).map(drop), None, "of another file");
    }

    #[test]
    fn what_does_not_come_is_not_waited_for() {
        let arrivals = arrivals(3, 16);
        arrivals.lost(0);
        assert_eq!(read(&arrivals, 0..4), None);
        assert_eq!(arrivals.ahead(0, &(8..12), || true).map(drop), None, "the load is over");
        thread::scope(|scope| {
            let waits = scope.spawn(|| read(&arrivals, 8..12));
            arrivals.put(1, filled(&arrivals, 5), false);
            assert_eq!(waits.join().unwrap(), Some(vec![5; 4]));
            let waits = scope.spawn(|| read(&arrivals, 16..20));
            arrivals.close();
            assert_eq!(waits.join().unwrap(), None);
        });
        arrivals.put(2, filled(&arrivals, 6), false);
        assert_eq!(read(&arrivals, 16..20), None, "it was closed before");
    }

    #[test]
    fn memory_is_bounded_and_used_again() {
        const PARTS: u64 = 100;
        let arrivals = arrivals(PARTS, 8);
        thread::scope(|scope| {
            let taken = scope.spawn(|| {
                let parts = (0..PARTS).map(|n| read(&arrivals, n * PART..(n + 1) * PART));
                parts.collect::<Vec<_>>()
            });
            for number in 0..PARTS {
                arrivals.put(number as usize, filled(&arrivals, number as u8), false);
            }
            for (number, bytes) in taken.join().unwrap().into_iter().enumerate() {
                assert_eq!(bytes, Some(vec![number as u8; PART as usize]));
            }
        });
        let kept: Vec<Slot> = std::iter::from_fn(|| arrivals.slot(false)).collect();
        assert!(kept.len() >= 4, "what was not given up is at most a quarter, and what came after");
    }

    #[test]
    fn parts_that_come_after_their_turn_keep_no_memory() {
        let arrivals = arrivals(60, 8);
        thread::scope(|scope| {
            let last = scope.spawn(|| read(&arrivals, 59 * PART..60 * PART));
            while arrivals.home.lock().asked < 59 {
                thread::yield_now();
            }
            let sent: Vec<Arc<Slot>> = (0..8).map(|n| filled(&arrivals, n)).collect();
            for (number, slot) in sent.iter().enumerate() {
                arrivals.put(number, slot.clone(), true);
            }
            assert!(arrivals.slot(false).is_none(), "all are being sent");
            drop(sent);
            for number in 8..60 {
                let mut slot = arrivals.slot(false).expect("no slot is lost");
                slot.bytes_mut().fill(7);
                arrivals.put(number, Arc::new(slot), true);
            }
            assert_eq!(last.join().unwrap(), Some(vec![7; PART as usize]));
        });
    }

    #[test]
    fn parts_asked_for_in_another_order_are_given_up_and_nobody_waits_for_ever() {
        let arrivals = arrivals(20, 8);
        thread::scope(|scope| {
            let taken = scope.spawn(|| read(&arrivals, 19 * PART..20 * PART));
            for number in 0..20 {
                arrivals.put(number, filled(&arrivals, number as u8), false);
            }
            assert_eq!(taken.join().unwrap(), Some(vec![19; PART as usize]));
        });
        assert_eq!(read(&arrivals, 0..PART), None, "it was given up");
    }
}
