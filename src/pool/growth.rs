//! What a pool takes beyond its own buffers: chunks of memory, for background saves.

use super::budget::{self, NoMore, Ration, UNIT_BYTES};
use super::free_slots::FreeSlots;
use super::{Buffer, Mapping};
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Called with each new chunk: pins it for a GPU, or says why not.
type Prepare = Box<dyn Fn(&Mapping) -> Result<(), String> + Send + Sync>;

/// Takes units of memory, or says why there are no more.
pub(super) type Take = fn(u64) -> Result<Ration, NoMore>;

/// What all pools of the process have, and the slots of each.
static ALL: PerProcess<Vec<(Weak<Growth>, Weak<FreeSlots>)>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// Gives back all chunks of the process that no buffer is lent of. Returns their bytes.
pub(super) fn give_back_all() -> usize {
    let all = ALL.lock().map_or_else(Vec::new, |all| all.clone());
    let there = all.iter().filter_map(|(growth, home)| Some((growth.upgrade()?, home.upgrade()?)));
    there.map(|(growth, home)| growth.give_back(&home, Duration::ZERO)).sum()
}

/// The chunks, by their number.
pub(super) struct Growth {
    block_bytes: usize,
    /// The slot of the first buffer that is not the pool's own.
    first: u32,
    /// For the memory of the pool's own buffers.
    own: Mutex<Vec<Ration>>,
    chunks: Mutex<Chunks>,
    prepare: OnceLock<Prepare>,
}

#[derive(Debug)]
struct Chunks {
    /// `None` for a number whose chunk was given back.
    all: Vec<Option<Chunk>>,
    /// When a buffer of one was last asked for.
    used_at: Instant,
}

/// Memory for some buffers.
#[derive(Debug)]
struct Chunk {
    mapping: Arc<Mapping>,
    _ration: Ration, // dropped after the memory
}

impl Growth {
    pub fn new(home: &Arc<FreeSlots>, block_bytes: usize) -> Arc<Self> {
        let chunks = Mutex::new(Chunks { all: Vec::new(), used_at: Instant::now() });
        let (first, own, prepare) = (home.count() as u32, Mutex::default(), OnceLock::new());
        let growth = Arc::new(Self { block_bytes, first, own, chunks, prepare });
        if let Some(mut all) = ALL.lock() {
            all.retain(|(growth, _)| growth.strong_count() > 0);
            all.push((Arc::downgrade(&growth), Arc::downgrade(home)));
        }
        growth
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Buffers of a chunk.
    fn per_chunk(&self) -> usize {
        (UNIT_BYTES / self.block_bytes).max(1)
    }

    fn chunk_bytes(&self) -> usize {
        self.per_chunk() * self.block_bytes
    }

    /// Units of a chunk.
    fn units(&self) -> u64 {
        self.chunk_bytes().div_ceil(UNIT_BYTES) as u64
    }

    fn slots(&self, chunk: usize) -> Range<u32> {
        let start = self.first + (chunk * self.per_chunk()) as u32;
        start..start + self.per_chunk() as u32
    }

    /// Counts the memory of the pool's own buffers, of which `used` have some: they may have it in any case.
    pub fn count_own(&self, used: usize, home: &FreeSlots) {
        if home.count() * self.block_bytes < UNIT_BYTES {
            return home.grant(home.count()); // too small to count
        }
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        while own.len() * self.per_chunk() < used {
            own.push(Ration::take_anyway(self.units()));
        }
        home.grant(own.len() * self.per_chunk());
    }

    /// Takes memory for some more of the pool's own buffers, of which it may have two in any case, or else one more chunk.
    ///
    /// # Errors
    /// Why there is no more memory.
    pub fn grow(&self, home: &FreeSlots, take: Take) -> Result<(), NoMore> {
        match home.granted() {
            granted if granted == home.count() => self.add_chunk(home, take),
            0 | 1 => {
                self.count_own(2, home);
                Ok(())
            }
            granted => self.grant_more(granted, home, take),
        }
    }

    fn grant_more(&self, granted: usize, home: &FreeSlots, take: Take) -> Result<(), NoMore> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if home.granted() > granted {
            return Ok(()); // another thread was first
        }
        own.push(match take(self.units()) {
            Err(NoMore::Unknown(_)) => Ration::take_anyway(self.units()), // as any save
            taken => taken?,
        });
        home.grant(own.len() * self.per_chunk());
        Ok(())
    }

    /// Takes one more chunk, and adds its buffers to the free ones.
    fn add_chunk(&self, home: &FreeSlots, take: Take) -> Result<(), NoMore> {
        let ration = take(self.units())?;
        let mapping = Mapping::new(self.chunk_bytes());
        let mapping = mapping.map_err(|error| NoMore::Taken(error.to_string()))?;
        mapping.keep_from_children();
        if let Some(prepare) = self.prepare.get() {
            prepare(&mapping).map_err(NoMore::Taken)?;
        }
        let chunk = Chunk { mapping: Arc::new(mapping), _ration: ration };
        let mut chunks = self.chunks();
        let free = chunks.all.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            chunks.all.push(None);
            chunks.all.len() - 1
        });
        chunks.all[number] = Some(chunk);
        drop(chunks);
        home.add(self.slots(number));
        Ok(())
    }

    /// The buffer of a slot that was taken.
    pub fn buffer(&self, slot: u32, home: &Arc<FreeSlots>) -> Buffer {
        let within = (slot - self.first) as usize;
        let mut chunks = self.chunks();
        chunks.used_at = Instant::now();
        let chunk = chunks.all[within / self.per_chunk()].as_ref();
        let mapping = chunk.expect("a chunk stays while a buffer of it is lent").mapping.clone();
        let start = within % self.per_chunk() * self.block_bytes;
        Buffer::of_pool(mapping, start..start + self.block_bytes, (home.clone(), slot))
    }

    /// Calls `prepare` with each chunk that is taken from now on, and does without a chunk for which it fails. Gives free
    /// ones back that were taken before. Only the first call counts.
    pub fn prepare(
        &self,
        home: &FreeSlots,
        prepare: impl Fn(&Mapping) -> Result<(), String> + Send + Sync + 'static,
    ) {
        if self.prepare.set(Box::new(prepare)).is_ok() {
            self.give_back(home, Duration::ZERO);
        }
    }

    /// Gives chunks back that no buffer is lent of: all of them if none was asked for during `idle`, or as many as others
    /// have come to need. Returns their bytes.
    pub fn give_back(&self, home: &FreeSlots, idle: Duration) -> usize {
        let is_idle = self.chunks().used_at.elapsed() >= idle;
        let mut wanted = if is_idle { u64::MAX } else { budget::excess() };
        let mut given: Vec<Chunk> = Vec::new(); // dropped without the lock: unmapping takes time
        let mut chunks = self.chunks();
        for number in (0..chunks.all.len()).rev() {
            if wanted == 0 {
                break;
            }
            if chunks.all[number].is_some() && home.remove(&self.slots(number)) {
                given.extend(chunks.all[number].take());
                wanted = wanted.saturating_sub(1);
            }
        }
        drop(chunks);
        given.iter().map(|chunk| chunk.mapping.len()).sum()
    }

    /// Bytes of all chunks.
    pub fn bytes(&self) -> usize {
        self.chunks().all.iter().flatten().map(|chunk| chunk.mapping.len()).sum()
    }
}

impl fmt::Debug for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Growth").field("first", &self.first).finish_non_exhaustive()
    }
}
