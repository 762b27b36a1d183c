//! Wraps any engine and, from a seed, does what a kernel may do but seldom does. The engine underneath still moves the
//! bytes. Operations that fail for good are the seam's (`sys::seam::fail_nth`).

use fastrand::Rng;
use nix::libc::{EAGAIN, EINTR};
use ringstow::internals::engine::fallback::Fallback;
use ringstow::internals::engine::{Action, Completion, Engine, FileId, Op, Waker};
use ringstow::internals::limits::ALIGN;
use ringstow::internals::sys::file;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Which faults to make, and how many. The default is none.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The same seed and operations give the same faults, except for the order of completions, which
    /// the inner engine decides.
    pub seed: u64,
    /// Percentage of transfers that move less than requested.
    pub short_percent: u8,
    /// Percentage of operations that are interrupted (`EINTR`).
    pub interrupt_percent: u8,
    /// Percentage of operations for which the system is short of something (`EAGAIN`).
    pub defer_percent: u8,
    /// Percentage of completions that are held back until others have passed them.
    pub reorder_percent: u8,
    /// After this many completions [`Engine::wait`] fails: the engine is broken.
    pub break_after: Option<u64>,
}

impl Faults {
    /// Everything that a correct caller must survive without noticing.
    pub fn survivable(seed: u64) -> Self {
        let (short_percent, interrupt_percent, defer_percent, reorder_percent) = (30, 10, 10, 40);
        let defaults = Self::default();
        Self { seed, short_percent, interrupt_percent, defer_percent, reorder_percent, ..defaults }
    }
}

/// An engine with faults.
pub struct Faulty {
    inner: Box<dyn Engine>,
    faults: Faults,
    random: Rng,
    direct: HashMap<FileId, bool>,
    /// Operations that were shortened, by token.
    shortened: HashMap<u64, Short>,
    inner_in_flight: usize,
    held: Vec<Completion>,
    completed: u64,
}

struct Short {
    /// Bytes that the caller requested.
    requested: usize,
    /// Bytes to report at most.
    report: usize,
}

impl Faulty {
    /// Wraps an engine.
    pub fn new(inner: Box<dyn Engine>, faults: Faults) -> Self {
        Self {
            random: Rng::with_seed(faults.seed),
            inner,
            faults,
            direct: HashMap::new(),
            shortened: HashMap::new(),
            inner_in_flight: 0,
            held: Vec::new(),
            completed: 0,
        }
    }

    fn happens(&mut self, percent: u8) -> bool {
        self.random.u8(..100) < percent
    }

    /// How this operation is interrupted, if it is.
    fn interruption(&mut self) -> Option<i32> {
        match self.happens(self.faults.interrupt_percent) {
            true => Some(EINTR),
            false => self.happens(self.faults.defer_percent).then_some(EAGAIN),
        }
    }

    /// Makes the transfer a short one. A read moves everything and reports less; a direct write stays
    /// aligned and reports less. A kernel may do both.
    fn shorten(&mut self, op: &mut Op) {
        let is_write = matches!(op.action, Action::Write(_));
        let is_direct = self.direct.get(&op.file).copied().unwrap_or(false);
        let Some(transfer) = op.action.transfer_mut() else { return };
        if transfer.len < 2 || !self.happens(self.faults.short_percent) {
            return;
        }
        let requested = transfer.len;
        let report = self.random.usize(1..requested);
        if is_write {
            transfer.len =
                if is_direct { report.next_multiple_of(ALIGN).min(requested) } else { report };
        }
        self.shortened.insert(op.token, Short { requested, report });
    }

    /// Reverts what [`Faulty::shorten`] did to the operation, and reports fewer bytes.
    fn restore(&mut self, completion: &mut Completion) {
        let Some(short) = self.shortened.remove(&completion.op.token) else { return };
        let is_read = matches!(completion.op.action, Action::Read(_));
        let Some(transfer) = completion.op.action.transfer_mut() else { return };
        transfer.len = short.requested;
        if let Ok(moved) = &mut completion.result {
            let reported = short.report.min(*moved);
            if is_read {
                // Overwrite what is not reported, so that a caller that uses it fails.
                let start = transfer.start;
                transfer.buffer[start + reported..start + *moved].fill(0xDB);
            }
            *moved = reported;
        }
    }

    /// Releases some of the held completions, in any order: each unless it is held back again, and at least
    /// one if nothing else can complete.
    fn release(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        let mut kept = Vec::new();
        self.random.shuffle(&mut self.held);
        while let Some(completion) = self.held.pop() {
            if self.happens(self.faults.reorder_percent) {
                kept.push(completion);
            } else {
                done.push(completion);
            }
        }
        if done.len() == before && self.inner_in_flight == 0 {
            done.extend(kept.pop());
        }
        self.completed += (done.len() - before) as u64;
        self.held = kept;
    }
}

impl Engine for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn registered(&self) -> usize {
        self.inner.registered()
    }

    fn fallbacks(&self) -> &[Fallback] {
        self.inner.fallbacks()
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        let direct = file::is_direct(&file);
        let id = self.inner.attach(file)?;
        self.direct.insert(id, direct);
        Ok(id)
    }

    fn detach(&mut self, file: FileId) {
        self.direct.remove(&file);
        self.inner.detach(file);
    }

    fn submit(&mut self, mut op: Op) {
        if let Some(errno) = self.interruption() {
            let result = Err(io::Error::from_raw_os_error(errno));
            return self.held.push(Completion { op, result });
        }
        self.shorten(&mut op);
        self.inner_in_flight += 1;
        self.inner.submit(op);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        if self.faults.break_after.is_some_and(|count| self.completed >= count) {
            return Err(io::Error::other("broken on purpose"));
        }
        let before = done.len();
        loop {
            let mut real = Vec::new();
            // With nothing in flight below, there is nothing to wait for but the held completions.
            let block = self.inner_in_flight > 0 || self.held.is_empty();
            if block {
                self.inner.wait(&mut real)?;
            }
            let woken = block && real.is_empty();
            self.inner_in_flight -= real.len();
            for mut completion in real {
                self.restore(&mut completion);
                self.held.push(completion);
            }
            self.release(done);
            if woken || done.len() > before {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}
