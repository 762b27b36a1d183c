//! A failing disk, for tests: wraps any engine and makes it do, from a seed, what the kernel may
//! do but seldom does. The real engine underneath still moves the bytes.

use super::ladder::Fallback;
use super::{Action, Completion, Engine, FileId, Op, Waker};
use crate::config::ALIGN;
use crate::sys::file;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Which faults, and how many. The default is none.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Same seed, same operations, same faults (the order of completions apart, which is the
    /// inner engine's).
    pub seed: u64,
    /// Transfers in a hundred that move less than asked.
    pub short_percent: u8,
    /// Operations in a hundred that are interrupted (`EINTR`) or put off (`EAGAIN`).
    pub interrupt_percent: u8,
    /// Completions in a hundred that are held back until others have passed them.
    pub reorder_percent: u8,
    /// Operations that fail for good.
    pub failures: Vec<Failure>,
    /// After this many completions [`Engine::wait`] fails: the engine is broken.
    pub break_after: Option<u64>,
}

impl Faults {
    /// Everything that a correct caller must survive without noticing.
    pub fn survivable(seed: u64) -> Self {
        Self {
            seed,
            short_percent: 30,
            interrupt_percent: 20,
            reorder_percent: 40,
            ..Self::default()
        }
    }

    /// One operation that fails for good.
    pub fn failing(kind: OpKind, nth: u64, errno: i32) -> Self {
        Self { failures: vec![Failure { kind, nth, errno }], ..Self::default() }
    }
}

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// [`Action::Write`].
    Write,
    /// [`Action::Read`].
    Read,
    /// [`Action::Sync`].
    Sync,
}

impl OpKind {
    fn of(action: &Action) -> Self {
        match action {
            Action::Write(_) => Self::Write,
            Action::Read(_) => Self::Read,
            Action::Sync => Self::Sync,
        }
    }
}

/// The nth operation (from 0) of a kind fails, and moves nothing.
#[derive(Debug, Clone, Copy)]
pub struct Failure {
    /// Which operations are counted.
    pub kind: OpKind,
    /// How many of them succeed first.
    pub nth: u64,
    /// What the caller gets: `EIO`, `ENOSPC`.
    pub errno: i32,
}

/// An engine with faults.
pub struct Faulty {
    inner: Box<dyn Engine>,
    faults: Faults,
    random: Random,
    /// Operations seen, by kind.
    counts: HashMap<OpKind, u64>,
    direct: HashMap<FileId, bool>,
    /// What the inner engine has been asked to move less of, or to report less of, by token.
    shortened: HashMap<u64, Short>,
    inner_in_flight: usize,
    held: Vec<Completion>,
    completed: u64,
}

struct Short {
    /// Bytes that the caller asked for.
    asked: usize,
    /// Bytes to report at most.
    report: usize,
}

impl Faulty {
    /// Wraps an engine.
    pub fn new(inner: Box<dyn Engine>, faults: Faults) -> Self {
        Self {
            random: Random(faults.seed),
            inner,
            faults,
            counts: HashMap::new(),
            direct: HashMap::new(),
            shortened: HashMap::new(),
            inner_in_flight: 0,
            held: Vec::new(),
            completed: 0,
        }
    }

    /// The errno with which this operation fails, if it does.
    fn errno_for(&mut self, action: &Action) -> Option<i32> {
        let kind = OpKind::of(action);
        let count = self.counts.entry(kind).or_default();
        let nth = *count;
        *count += 1;
        if let Some(failure) = self.faults.failures.iter().find(|f| f.kind == kind && f.nth == nth)
        {
            return Some(failure.errno);
        }
        self.random
            .percent(self.faults.interrupt_percent)
            .then(|| if self.random.percent(50) { nix::libc::EINTR } else { nix::libc::EAGAIN })
    }

    /// Makes the transfer a short one. A read moves everything and reports less, a direct write
    /// stays aligned and reports less: both as a kernel may.
    fn shorten(&mut self, op: &mut Op) {
        let write = matches!(op.action, Action::Write(_));
        let direct = self.direct.get(&op.file).copied().unwrap_or(false);
        let Some(transfer) = op.action.transfer_mut() else { return };
        if transfer.len < 2 || !self.random.percent(self.faults.short_percent) {
            return;
        }
        let asked = transfer.len;
        let report = 1 + self.random.below(asked as u64 - 1) as usize;
        if write {
            transfer.len = if direct { report.next_multiple_of(ALIGN).min(asked) } else { report };
        }
        self.shortened.insert(op.token, Short { asked, report });
    }

    /// Undoes what [`Faulty::shorten`] did to the operation, and reports what it decided.
    fn restore(&mut self, completion: &mut Completion) {
        let Some(short) = self.shortened.remove(&completion.op.token) else { return };
        let read = matches!(completion.op.action, Action::Read(_));
        let Some(transfer) = completion.op.action.transfer_mut() else { return };
        transfer.len = short.asked;
        if let Ok(moved) = &mut completion.result {
            let reported = short.report.min(*moved);
            if read {
                // What is not reported was not read: make sure that nobody uses it.
                let start = transfer.start;
                transfer.buffer[start + reported..start + *moved].fill(0xDB);
            }
            *moved = reported;
        }
    }

    /// Lets some of the held completions out, in any order: all but those held back, and at least
    /// one if none could come otherwise.
    fn release(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        let mut kept = Vec::new();
        self.random.shuffle(&mut self.held);
        while let Some(completion) = self.held.pop() {
            if self.random.percent(self.faults.reorder_percent) {
                kept.push(completion);
            } else {
                self.completed += 1;
                done.push(completion);
            }
        }
        if done.len() == before && self.inner_in_flight == 0 {
            self.completed += u64::from(!kept.is_empty());
            done.extend(kept.pop());
        }
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

    fn fallbacks(&self) -> Vec<Fallback> {
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
        if let Some(errno) = self.errno_for(&op.action) {
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
            // With nothing under way below, only what is held can be waited for.
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

/// SplitMix64: small, seedable, good enough to choose faults with.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to `bound - 1`.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn percent(&mut self, percent: u8) -> bool {
        self.below(100) < u64::from(percent)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}
