//! Memory for copies of a whole state, kept for the next copy.

use super::budget::{self, NoMore, Ration, UNIT_BYTES};
use super::{Mapping, growth};
use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::units::size;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Memory for the copies of one save. From 64 MiB on it counts with what all background saves may take together; a copy that
/// would be beyond that is made nevertheless, since its caller was promised one, and a warning says so. When this is dropped,
/// memory that counts is kept for the next copy for a while: new memory is slow.
#[derive(Debug)]
pub struct CopyMemory {
    /// `None` only while it is dropped.
    memory: Option<Memory>,
    is_kept: AtomicBool,
    /// The process that took it: a forked child does not have the memory.
    process: u32,
}

#[derive(Debug)]
struct Memory {
    mapping: Mapping,
    ration: Option<Ration>, // dropped after the memory
}

/// Of this process.
#[derive(Debug)]
struct All {
    lent: usize,
    /// What can be used again, and since when. The last one was used last.
    spare: Vec<(Memory, Instant)>,
}

/// A run may save two states in turn.
const SPARE_MAX: usize = 2;

static ALL: PerProcess<All> =
    PerProcess::new([const { Mutex::new(All { lent: 0, spare: Vec::new() }) }; GENERATIONS]);

impl CopyMemory {
    /// Takes at least `len` bytes, which are zeros or what a copy before this one has left there.
    ///
    /// # Errors
    /// The system's, when there is no memory.
    pub fn take(len: usize) -> io::Result<Self> {
        let memory = match spare(len) {
            Some(memory) => memory,
            None => Memory::new(len)?,
        };
        if memory.ration.is_some()
            && let Some(mut all) = ALL.lock()
        {
            all.lent += 1;
        }
        let is_kept = AtomicBool::new(true);
        Ok(Self { memory: Some(memory), is_kept, process: std::process::id() })
    }

    /// The memory.
    pub fn mapping(&self) -> &Mapping {
        &self.memory.as_ref().expect("it is there until this is dropped").mapping
    }

    /// Has the memory returned to the system once this is dropped.
    pub fn discard(&self) {
        self.is_kept.store(false, Relaxed);
    }
}

impl Drop for CopyMemory {
    fn drop(&mut self) {
        let memory = self.memory.take();
        if self.process != std::process::id() {
            std::mem::forget(memory); // something else may be at these addresses
            return;
        }
        let Some(memory) = memory.filter(|memory| memory.ration.is_some()) else { return };
        let Some(mut all) = ALL.lock() else { return };
        all.lent = all.lent.saturating_sub(1);
        let mut let_go = vec![(memory, Instant::now())]; // dropped without the lock: unmapping takes time
        if self.is_kept.load(Relaxed) {
            all.spare.append(&mut let_go);
            let too_many = all.spare.len().saturating_sub(SPARE_MAX);
            let_go.extend(all.spare.drain(..too_many));
        }
        drop(all);
        drop(let_go);
    }
}

impl Memory {
    fn new(len: usize) -> io::Result<Self> {
        let units = (len / UNIT_BYTES) as u64; // less is not counted
        let taken = (units > 0).then(|| take_or_reclaim(units));
        let mapping = Mapping::new(len)?;
        mapping.keep_from_children();
        let ration = taken.map(|taken| {
            taken.unwrap_or_else(|why| {
                warn_beyond(len, &why);
                Ration::take_anyway(units)
            })
        });
        Ok(Self { mapping, ration })
    }
}

/// Takes units; if there are no more, those of memory that the process only keeps for a later copy or save.
///
/// # Errors
/// As for [`Ration::take`].
pub(super) fn take_or_reclaim(units: u64) -> Result<Ration, NoMore> {
    or_reclaim(|| Ration::take(units))
}

fn or_reclaim<T>(take: impl Fn() -> Result<T, NoMore>) -> Result<T, NoMore> {
    let taken = take();
    let is_used_up = matches!(taken, Err(NoMore::Taken(_)));
    if is_used_up && give_back(Duration::ZERO) + growth::give_back_all() > 0 {
        return take();
    }
    taken
}

fn warn_beyond(len: usize, why: &NoMore) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let NoMore::Taken(why) = why else { return }; // what is not known is said of saves
    ONCE.call_once(|| {
        tracing::warn!(
            "a copy of the state takes {} of memory: {why}. Give the job more memory, or stage without a copy",
            size(len as u64),
        );
    });
}

/// Memory of an earlier copy, if some is large enough, and not much larger.
fn spare(len: usize) -> Option<Memory> {
    let mut all = ALL.lock()?;
    let fits = |(memory, _): &(Memory, Instant)| {
        let has = memory.mapping.len();
        has >= len && has / 2 <= len
    };
    let found = all.spare.iter().rposition(fits)?;
    Some(all.spare.remove(found).0)
}

/// Gives memory back that no copy is in: what was not used during `idle`, or all of it if others have come to need some.
/// Returns how many bytes.
pub fn give_back(idle: Duration) -> usize {
    let is_wanted = budget::excess() > 0;
    let Some(mut all) = ALL.lock() else { return 0 };
    let is_old = |(_, since): &mut (Memory, Instant)| is_wanted || since.elapsed() >= idle;
    let given: Vec<_> = all.spare.extract_if(.., is_old).collect();
    drop(all); // unmapping takes time
    given.iter().map(|(memory, _)| memory.mapping.len()).sum()
}

/// Whether there is memory that may have to be given back one day.
pub fn is_any() -> bool {
    ALL.lock().is_some_and(|all| all.lent > 0 || !all.spare.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::{Pool, in_turn};
    use super::*;
    use std::cell::Cell;

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_is_counted_used_again_and_given_back() {
        const LEN: usize = 200 << 20;
        let _turn = in_turn();
        drop(CopyMemory::take(UNIT_BYTES - 1).unwrap());
        assert!(!is_any(), "what is small is neither counted nor kept");
        let large = CopyMemory::take(1 << 30).unwrap();
        assert!(budget::taken() >= 16);
        large.discard();
        drop(large);
        assert!(budget::taken() < 16, "other tests take less");
        assert_eq!(give_back(Duration::ZERO), 0);
        let first = CopyMemory::take(LEN).unwrap();
        let at = first.mapping().as_ptr() as usize;
        assert!(is_any());
        drop(first);
        let second = CopyMemory::take(LEN - 5000).unwrap();
        assert_eq!(second.mapping().as_ptr() as usize, at);
        let beside = CopyMemory::take(LEN).unwrap();
        assert_ne!(beside.mapping().as_ptr() as usize, at, "it is in use");
        drop(second);
        drop(CopyMemory::take(LEN / 3).unwrap()); // for which it is too large
        assert_eq!(spares(), [LEN, LEN / 3]);
        give_back(Duration::from_secs(3600));
        assert_eq!(spares().len(), 2);
        beside.discard();
        drop(beside);
        assert_eq!(spares().len(), 2);
        drop((CopyMemory::take(LEN).unwrap(), CopyMemory::take(LEN * 3).unwrap()));
        assert_eq!(spares(), [LEN, LEN * 3], "the two that were used last");
        assert_eq!(give_back(Duration::ZERO), LEN * 4);
        assert!(!is_any());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn idle_memory_of_the_process_is_given_back_before_it_is_said_that_there_is_no_more() {
        let _turn = in_turn();
        let (idle, busy) = (Pool::new(1, UNIT_BYTES).unwrap(), Pool::new(1, UNIT_BYTES).unwrap());
        for pool in [&idle, &busy] {
            pool.grow().unwrap(); // its own buffer
            pool.grow().unwrap(); // a chunk
        }
        let held = [busy.lease().unwrap(), busy.try_lease_any().unwrap()];
        drop(CopyMemory::take(UNIT_BYTES).unwrap());
        let used_up = || Err::<(), _>(NoMore::Taken("used up".into()));
        let asked = Cell::new(0);
        let taken = or_reclaim(|| {
            asked.set(asked.get() + 1);
            if idle.further_bytes() + spares().len() > 0 { used_up() } else { Ok(()) }
        });
        assert_eq!((taken, asked.get()), (Ok(()), 2));
        assert_eq!(busy.further_bytes(), UNIT_BYTES, "a save has it");
        asked.set(0);
        let refused = or_reclaim(|| {
            asked.set(asked.get() + 1);
            used_up()
        });
        assert_eq!((refused, asked.get()), (used_up(), 1), "there was nothing to give back");
        drop(held);
    }

    fn spares() -> Vec<usize> {
        ALL.lock().unwrap().spare.iter().map(|(memory, _)| memory.mapping.len()).collect()
    }
}
