//! The I/O thread's loop: take commands, keep the engine full, carry transfers to their end.

use super::channel::{Command, Shared};
use super::request::{Outcome, Reply, Request, cancelled};
use crate::engine::retry::{Progress, Step};
use crate::engine::{Action, Completion, Engine, FileId, Op, not_attached};
use crate::limits::ALIGN;
use crate::sys::file;
use crate::sys::seam::{self, Call};
use crossbeam_channel::Receiver;
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Everything that the I/O thread owns. The order of the first two fields matters: the engine is
/// dropped first, so that it gives up its buffers before the requests in flight are answered; then
/// the queue counts as dead, so that no thread that gets such an answer submits more.
pub(super) struct Actor {
    engine: Box<dyn Engine>,
    alive: Arc<()>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    files: HashMap<FileId, Open>,
    /// Accepted, not started yet.
    waiting: Waiting,
    /// Started. The key is the operation's token.
    in_flight: Slab<Pending>,
    /// Started, and failed by a test before the engine got them.
    refused: Vec<Completion>,
    /// The system was short of something for them: they start again once an operation completes.
    resting: Vec<(Pending, Action, Duration)>,
    stopping: bool,
}

/// An attached file.
struct Open {
    file: Arc<File>,
    direct: bool,
    /// Requests waiting and in flight.
    requests: usize,
    /// Detach it when there are none left.
    closing: bool,
}

/// A request that waits or is in flight. The engine has its action.
struct Pending {
    file: FileId,
    /// File offset, first byte of the buffer and length that were asked for.
    asked: (u64, usize, usize),
    progress: Progress,
    started: Option<Instant>,
    abort: Option<Arc<AtomicBool>>,
    reply: Reply,
}

/// Requests in two lines, each first in, first out. They take turns, so that a load need not wait for all that a
/// background save has copied.
#[derive(Default)]
struct Waiting {
    lines: [VecDeque<(Pending, Action)>; 2],
    /// The line whose turn it is.
    next: usize,
}

impl Waiting {
    fn push(&mut self, request: (Pending, Action), is_bulk: bool) {
        self.lines[usize::from(is_bulk)].push_back(request);
    }

    fn pop(&mut self) -> Option<(Pending, Action)> {
        let first = self.next;
        self.next = 1 - first;
        self.lines[first].pop_front().or_else(|| self.lines[1 - first].pop_front())
    }

    fn is_empty(&self) -> bool {
        self.lines.iter().all(VecDeque::is_empty)
    }

    fn into_all(self) -> impl Iterator<Item = (Pending, Action)> {
        self.lines.into_iter().flatten()
    }
}

impl Pending {
    fn aborted(&self) -> bool {
        self.abort.as_ref().is_some_and(|abort| abort.load(Ordering::Relaxed))
    }
}

impl Actor {
    pub(super) fn new(
        engine: Box<dyn Engine>,
        alive: Arc<()>,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            engine,
            alive,
            commands,
            shared,
            files: HashMap::new(),
            waiting: Waiting::default(),
            in_flight: Slab::new(),
            refused: Vec::new(),
            resting: Vec::new(),
            stopping: false,
        }
    }

    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.take_commands();
            self.start_waiting();
            self.shared.publish(&*self.engine); // before any request that changed it is answered
            if self.in_flight.is_empty() && !self.resting.is_empty() {
                self.rest();
            }
            if self.stopping && self.in_flight.is_empty() && self.waiting.is_empty() {
                return;
            }
            if !self.refused.is_empty() {
                done.append(&mut self.refused);
            } else if let Err(error) = self.engine.wait(&mut done) {
                return self.give_up(&error);
            }
            let mut has_freed = false;
            for completion in done.drain(..) {
                has_freed |= self.settle(completion);
            }
            if has_freed {
                self.start_resting();
            }
        }
    }

    /// Pauses, and starts again what rests: nothing is in flight whose completion could say when.
    fn rest(&mut self) {
        let pauses = self.resting.iter().map(|(_, _, pause)| *pause);
        thread::sleep(pauses.min().unwrap_or_default());
        self.start_resting();
    }

    fn start_resting(&mut self) {
        for (pending, action, _) in std::mem::take(&mut self.resting) {
            self.start(pending, action);
        }
    }

    fn take_commands(&mut self) {
        self.shared.wake.acknowledge();
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach(file, reply) => {
                    let _ = reply.send(self.attach(file));
                }
                Command::Detach(file) => {
                    if let Some(open) = self.files.get_mut(&file) {
                        open.closing = true;
                        self.close_if_unused(file);
                    }
                }
                Command::Settle(reply) => {
                    let _ = reply.send(());
                }
                Command::Submit(request) => self.accept(request),
                Command::Stop => self.stopping = true,
            }
        }
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        let direct = file::is_direct(&file);
        let id = self.engine.attach(Arc::clone(&file))?;
        self.files.insert(id, Open { file, direct, requests: 0, closing: false });
        Ok(id)
    }

    fn accept(&mut self, request: Request) {
        let Request { file, action, needed, is_bulk, abort, reply } = request;
        let open = match self.files.get_mut(&file) {
            Some(open) if !open.closing => open,
            _ => return answer(reply, Err(not_attached(file)), action),
        };
        if let Err(error) = check(&action, needed, open.direct) {
            return answer(reply, Err(error), action);
        }
        let asked = action.transfer().map_or((0, 0, 0), |t| (t.offset, t.start, t.len));
        let progress = Progress::new(!matches!(action, Action::Read(_)), open.direct, needed);
        open.requests += 1;
        let started = None;
        let pending = Pending { file, asked, progress, started, abort, reply };
        self.waiting.push((pending, action), is_bulk);
    }

    fn start_waiting(&mut self) {
        while self.in_flight.len() + self.resting.len() < self.engine.depth() {
            let Some((pending, action)) = self.waiting.pop() else { return };
            self.start(pending, action);
        }
    }

    fn start(&mut self, mut pending: Pending, action: Action) {
        if pending.aborted() {
            return self.finish(pending, Err(cancelled()), action);
        }
        debug_assert!(self.in_flight.len() < self.engine.depth());
        pending.started.get_or_insert_with(Instant::now);
        let file = pending.file;
        let token = self.in_flight.insert(pending) as u64;
        let call = match &action {
            Action::Write(_) => Call::WriteBlock,
            Action::Read(_) => Call::ReadBlock,
            Action::Sync => Call::Sync,
        };
        let op = Op { token, file, action };
        match seam::passed(call, &*self.files[&file].file) {
            Ok(()) => self.engine.submit(op),
            Err(error) => self.refused.push(Completion { op, result: Err(error) }),
        }
    }

    /// Takes a completion: finishes the request, starts the rest of it, or has it rest. Tells whether the system may have more
    /// of what it was short of.
    fn settle(&mut self, completion: Completion) -> bool {
        let Completion { op: Op { token, mut action, .. }, result } = completion;
        // Panics at a token that is not in flight: an engine returns each of its own once.
        let mut pending = self.in_flight.remove(token as usize);
        match pending.progress.next(result) {
            Step::Done => {
                let done = match action {
                    Action::Sync => {
                        seam::made(Call::Synced, &*self.files[&pending.file].file, || Ok(()))
                    }
                    _ => Ok(()),
                };
                self.finish(pending, done, action);
            }
            Step::Fail(error) => self.finish(pending, Err(error), action),
            Step::Continue { skip, pause } => {
                if let Some(transfer) = action.transfer_mut() {
                    let (offset, start, len) = pending.asked;
                    transfer.offset = offset + skip as u64;
                    transfer.start = start + skip;
                    transfer.len = len - skip;
                }
                let Some(pause) = pause else {
                    self.start(pending, action);
                    return true;
                };
                self.resting.push((pending, action, pause));
                return false;
            }
        }
        true
    }

    fn finish(&mut self, pending: Pending, result: io::Result<()>, action: Action) {
        if let Some(open) = self.files.get_mut(&pending.file) {
            open.requests -= 1;
            self.close_if_unused(pending.file);
        }
        let (buffer, started) = (action.into_buffer(), pending.started);
        pending.reply.send(Outcome { result, buffer, started });
    }

    fn close_if_unused(&mut self, file: FileId) {
        if self.files.get(&file).is_some_and(|open| open.closing && open.requests == 0) {
            self.files.remove(&file);
            self.engine.detach(file);
        }
    }

    /// The engine is broken: everything outstanding fails with its error.
    fn give_up(self, error: &io::Error) {
        let Self { engine, alive, in_flight, waiting, resting, .. } = self;
        drop(engine);
        drop(alive);
        let broken = || io::Error::new(error.kind(), format!("the I/O engine broke: {error}"));
        for (_, pending) in in_flight {
            let started = pending.started;
            pending.reply.send(Outcome { result: Err(broken()), buffer: None, started });
        }
        let resting = resting.into_iter().map(|(pending, action, _)| (pending, action));
        for (pending, action) in waiting.into_all().chain(resting) {
            answer(pending.reply, Err(broken()), action);
        }
    }
}

fn answer(reply: Reply, result: io::Result<()>, action: Action) {
    reply.send(Outcome { result, buffer: action.into_buffer(), started: None });
}

/// Refuses what no engine could do. Alignment is checked here for every file system, because some
/// take any, and would hide a mistake until the day it meets another disk.
fn check(action: &Action, needed: usize, direct: bool) -> io::Result<()> {
    let invalid = |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let Some(transfer) = action.transfer() else { return Ok(()) };
    transfer.check()?;
    if needed > transfer.len {
        return invalid(format!("{needed} bytes needed of a transfer of {}", transfer.len));
    }
    if direct && !transfer.is_aligned() {
        let (offset, start, len) = (transfer.offset, transfer.start, transfer.len);
        return invalid(format!(
            "a direct transfer must be aligned to {ALIGN}: {len} bytes from {start} of the buffer \
             at offset {offset}"
        ));
    }
    Ok(())
}
