//! The I/O thread's loop: take commands, keep the engine full, carry transfers to their end.

use super::{Account, Command, Life, Outcome, Reply, Request, cancelled};
use crate::config::ALIGN;
use crate::engine::retry::{Progress, Step};
use crate::engine::{Action, Completion, Engine, FileId, Op, not_attached};
use crate::sys::file;
use crossbeam_channel::Receiver;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Everything that the I/O thread owns. The engine comes first, and so is dropped first: it gives
/// up its buffers before the requests in flight are answered. So does the sign of life: who gets
/// the answer does not come back with more.
pub(super) struct Actor {
    engine: Box<dyn Engine>,
    life: Life,
    commands: Receiver<Command>,
    rung: Arc<AtomicBool>,
    /// What is known of the engine outside, and here: looked at often, and seldom another.
    account: Arc<Mutex<Account>>,
    told: Account,
    files: HashMap<FileId, Open>,
    /// Accepted, not started yet; first in, first out.
    waiting: VecDeque<(Flight, Action)>,
    /// Started, by token.
    in_flight: HashMap<u64, Flight>,
    token_next: u64,
    stopping: bool,
}

/// An attached file.
struct Open {
    direct: bool,
    /// Requests waiting and in flight.
    requests: usize,
    /// To be detached when there are none left.
    closing: bool,
}

/// A request under way, less its action, which the engine has.
struct Flight {
    file: FileId,
    /// File offset, first byte of the buffer and length that were asked for.
    asked: (u64, usize, usize),
    progress: Progress,
    started: Option<Instant>,
    abort: Option<Arc<AtomicBool>>,
    reply: Reply,
}

impl Flight {
    fn aborted(&self) -> bool {
        self.abort.as_ref().is_some_and(|abort| abort.load(Ordering::Relaxed))
    }
}

impl Actor {
    pub(super) fn new(
        engine: Box<dyn Engine>,
        life: Life,
        commands: Receiver<Command>,
        (rung, account): (Arc<AtomicBool>, Arc<Mutex<Account>>),
    ) -> Self {
        Self {
            told: Account::of(&*engine),
            account,
            engine,
            life,
            commands,
            rung,
            files: HashMap::new(),
            waiting: VecDeque::new(),
            in_flight: HashMap::new(),
            token_next: 0,
            stopping: false,
        }
    }

    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.take_commands();
            self.start_waiting();
            self.tell();
            if self.stopping && self.in_flight.is_empty() && self.waiting.is_empty() {
                return;
            }
            if let Err(error) = self.engine.wait(&mut done) {
                return self.give_up(&error);
            }
            for completion in done.drain(..) {
                self.settle(completion);
            }
        }
    }

    /// Tells what has changed about the engine, before anyone gets an answer that it came with.
    fn tell(&mut self) {
        let now = Account::of(&*self.engine);
        if now != self.told {
            self.told = now.clone();
            *self.account.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = now;
        }
    }

    fn take_commands(&mut self) {
        // Cleared before looking: a command that this look misses rings again.
        self.rung.swap(false, Ordering::AcqRel);
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
        let id = self.engine.attach(file)?;
        self.files.insert(id, Open { direct, requests: 0, closing: false });
        Ok(id)
    }

    fn accept(&mut self, request: Request) {
        let Request { file, action, needed, abort, reply } = request;
        let open = match self.files.get_mut(&file) {
            Some(open) if !open.closing => open,
            _ => return answer(reply, Err(not_attached(file)), action),
        };
        if let Err(error) = check(&action, needed, open.direct) {
            return answer(reply, Err(error), action);
        }
        let (asked, progress) = match action.transfer() {
            Some(t) => {
                let write = matches!(action, Action::Write(_));
                ((t.offset, t.start, t.len), Progress::new(write, open.direct, needed))
            }
            None => ((0, 0, 0), Progress::of_sync()),
        };
        open.requests += 1;
        let started = None;
        self.waiting.push_back((Flight { file, asked, progress, started, abort, reply }, action));
    }

    fn start_waiting(&mut self) {
        while self.in_flight.len() < self.engine.depth() {
            let Some((flight, action)) = self.waiting.pop_front() else { return };
            self.start(flight, action);
        }
    }

    fn start(&mut self, mut flight: Flight, action: Action) {
        if flight.aborted() {
            return self.finish(flight, Err(cancelled()), action);
        }
        flight.started.get_or_insert_with(Instant::now);
        let token = self.token_next;
        self.token_next += 1;
        self.engine.submit(Op { token, file: flight.file, action });
        self.in_flight.insert(token, flight);
    }

    /// Takes a completion: the request's end, or the start of its rest.
    fn settle(&mut self, completion: Completion) {
        let Completion { op: Op { token, mut action, .. }, result } = completion;
        let mut flight = self.in_flight.remove(&token).expect("an engine returns its own tokens");
        match flight.progress.next(result) {
            Step::Done => self.finish(flight, Ok(()), action),
            Step::Fail(error) => self.finish(flight, Err(error), action),
            Step::Continue { skip, pause } => {
                if pause {
                    thread::yield_now();
                }
                if let Some(transfer) = action.transfer_mut() {
                    let (offset, start, len) = flight.asked;
                    transfer.offset = offset + skip as u64;
                    transfer.start = start + skip;
                    transfer.len = len - skip;
                }
                self.start(flight, action);
            }
        }
    }

    fn finish(&mut self, flight: Flight, result: io::Result<()>, action: Action) {
        if let Some(open) = self.files.get_mut(&flight.file) {
            open.requests -= 1;
            self.close_if_unused(flight.file);
        }
        let (buffer, started) = (action.into_buffer(), flight.started);
        flight.reply.send(Outcome { result, buffer, started });
    }

    fn close_if_unused(&mut self, file: FileId) {
        if self.files.get(&file).is_some_and(|open| open.closing && open.requests == 0) {
            self.files.remove(&file);
            self.engine.detach(file);
        }
    }

    /// The engine is broken: everything outstanding fails with its error.
    fn give_up(self, error: &io::Error) {
        let Self { engine, life, in_flight, waiting, .. } = self;
        drop(engine);
        drop(life);
        let broken = || io::Error::new(error.kind(), format!("the I/O engine broke: {error}"));
        for flight in in_flight.into_values() {
            let started = flight.started;
            flight.reply.send(Outcome { result: Err(broken()), buffer: None, started });
        }
        for (flight, action) in waiting {
            answer(flight.reply, Err(broken()), action);
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
