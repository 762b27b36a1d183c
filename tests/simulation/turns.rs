//! Whose turn it is. A program is a thread with a runtime of its own, and ringstow starts further threads for it. Of all
//! threads of all programs one runs at a time, from one system call to the next: each call waits at the seam, before it
//! is made, until its program has the turn. A seed decides whose turn is next, which calls fail, and before which a
//! program dies. Between the turns, the observer looks at the disk.
//!
//! A program that died makes no further call: each one fails. So it ends, and its locks are gone.

use crate::calls::{Broken, Id, Step, Trouble, What};
use durable_image::Recorder;
use fake_engines::{AtOnce, Twist, Twisted};
use fastrand::Rng;
use ringstow::internals::sys::chance::{self, Chance};
use ringstow::internals::sys::seam::{Call, Outcome, Watch, on_thread};
use ringstow::{Config, Runtime};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

pub struct Turns {
    root: PathBuf,
    broken: Broken,
    /// Follows what the disk may hold, while the power may be cut.
    recorder: Mutex<Option<Recorder>>,
    state: Mutex<State>,
}

struct State {
    random: Rng,
    /// A program has the turn for so many calls on average.
    pace: u32,
    /// Whose turn it is; `None`: the observer's.
    running: Option<Id>,
    observer: Thread,
    programs: Vec<Program>,
    threads: Vec<JoinHandle<()>>,
    steps: Vec<Step>,
    /// Rises with every call and every event.
    now: u64,
    /// What must not happen whatever the programs do.
    wrong: Option<String>,
}

struct Program {
    trouble: Option<Trouble>,
    status: Status,
    is_dead: bool,
    has_failed: bool,
    calls: u64,
    /// Whether one of its threads waits at a call.
    is_at_call: bool,
    /// The thread that waits for the turn.
    waiting: Option<Thread>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Status {
    Ready,
    /// Another one must end first.
    WaitsFor(Id),
    /// It is slow: others have their turns first.
    SleepsUntil(u64),
    Ended,
}

/// The error of every call of a program that died.
const DEAD: Outcome = Outcome::Fail(5);

impl Turns {
    /// For programs below `root`. The calling thread is the observer, whose turn it is.
    pub fn new(seed: u64, root: &Path, broken: Broken) -> Arc<Self> {
        let mut random = Rng::with_seed(seed ^ 0x7475_726e);
        let pace = [1, 2, 6, 20, 60][random.usize(..5)];
        let state = State {
            random,
            pace,
            running: None,
            observer: thread::current(),
            programs: Vec::new(),
            threads: Vec::new(),
            steps: Vec::new(),
            now: 0,
            wrong: None,
        };
        let (root, recorder, state) = (root.into(), Mutex::default(), Mutex::new(state));
        Arc::new(Self { root, broken, recorder, state })
    }

    /// Has the recorder follow all calls from now on.
    pub fn record(&self, recorder: Option<Recorder>) {
        *self.recorder() = recorder;
    }

    fn recorder(&self) -> MutexGuard<'_, Option<Recorder>> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the recorder of a call that may change the disk.
    fn tell(&self, call: Call, path: &Path) {
        use Call::{
            Allocate, Create, Cut, MakeDir, Remove, RemoveDir, Rename, Sync, Synced, Write,
            WriteBlock,
        };
        let changes = [
            Create, Write, WriteBlock, Allocate, Cut, Sync, Synced, Rename, Remove, MakeDir,
            RemoveDir,
        ];
        let is_void = self.broken == Broken::Syncs && call == Sync && path.is_dir();
        if let Some(recorder) = self.recorder().as_ref().filter(|_| changes.contains(&call)) {
            recorder.before(if is_void { Call::Look } else { call }, path);
        }
    }

    /// The observer, or a program (`by`), starts a program, which has its first turn later. Its runtime comes from
    /// [`Turns::runtime`]. A dead program starts none.
    pub fn start(
        self: &Arc<Self>,
        by: Option<Id>,
        trouble: Option<Trouble>,
        life: impl FnOnce(Id) + Send + 'static,
    ) -> Option<Id> {
        let mut state = self.state();
        if by.is_some_and(|id| state.programs[id].is_dead) {
            return None;
        }
        let id = state.programs.len();
        state.programs.push(Program::new(trouble));
        let random = Rng::with_seed(state.random.u64(..));
        let turns = Arc::clone(self);
        let program = thread::Builder::new().name(format!("program {id}"));
        let run = move || {
            let _watch = turns.watch(id);
            chance::fix(FromTurns { id, ahead: 0, random, turns: Arc::clone(&turns) });
            turns.wait(id);
            let life = catch_unwind(AssertUnwindSafe(|| life(id)));
            turns.end(id, life.is_err());
        };
        state.threads.push(program.spawn(run).expect("there are threads"));
        Some(id)
    }

    /// A program's runtime. Its I/O thread makes one transfer at a time.
    pub fn runtime(self: &Arc<Self>, id: Id, config: &Config) -> Runtime {
        let turns = Arc::clone(self);
        let build = move || {
            let watched = Watched { _watch: turns.watch(id) };
            Ok(Twisted::engine(Box::new(AtOnce::in_order()), watched))
        };
        Runtime::with_engine(config.clone(), Arc::new(build)).expect("the configuration is valid")
    }

    /// Has the calls of this thread wait for the program's turns.
    fn watch(self: &Arc<Self>, id: Id) -> Watch {
        let turns = Arc::clone(self);
        on_thread(move |_, call, path| turns.call(id, call, path))
    }

    /// A program is about to make a call.
    fn call(&self, id: Id, call: Call, path: &Path) -> Outcome {
        let mut state = self.state();
        if state.programs[id].is_dead {
            return DEAD;
        }
        if std::mem::replace(&mut state.programs[id].is_at_call, true) {
            state.wrong.get_or_insert(format!("program {id} makes two calls at once: {call:?}"));
        }
        state.take_turns(id);
        drop(state);
        self.wait(id);
        let mut state = self.state();
        let program = &mut state.programs[id];
        program.is_at_call = false;
        program.calls += 1;
        let outcome = match program.trouble {
            _ if program.is_dead => return DEAD,
            Some(Trouble { at, what: What::Dies }) if program.calls == at => Outcome::Kill,
            Some(Trouble { at, what: What::Fails { errno, calls } })
                if (at..at + calls).contains(&program.calls) =>
            {
                Outcome::Fail(errno)
            }
            _ => Outcome::Pass,
        };
        program.has_failed |= matches!(outcome, Outcome::Fail(_));
        program.is_dead = outcome == Outcome::Kill;
        // Above the root, names differ from run to run.
        let above = if self.root.starts_with(path) { Path::new("..") } else { path };
        let below = path.strip_prefix(&self.root).unwrap_or(above).to_path_buf();
        state.now += 1;
        state.steps.push(Step { program: id, call, path: below, outcome });
        match outcome {
            Outcome::Kill => return DEAD,
            Outcome::Pass => self.tell(call, path),
            _ => {}
        }
        outcome
    }

    /// Waits until it is the program's turn, or it is dead.
    fn wait(&self, id: Id) {
        loop {
            let mut state = self.state();
            if state.running == Some(id) || state.programs[id].is_dead {
                state.programs[id].waiting = None;
                return;
            }
            state.programs[id].waiting = Some(thread::current());
            drop(state);
            thread::park();
        }
    }

    /// Gives the observer the turn, and waits for the next.
    pub fn pause(&self, id: Id) {
        let mut state = self.state();
        if state.programs[id].is_dead {
            return;
        }
        state.give(None);
        drop(state);
        self.wait(id);
    }

    /// Waits until another program has ended.
    pub fn join(&self, id: Id, other: Id) {
        let mut state = self.state();
        if state.programs[id].is_dead || state.programs[other].status == Status::Ended {
            return;
        }
        state.programs[id].status = Status::WaitsFor(other);
        state.give_next();
        drop(state);
        self.wait(id);
    }

    fn end(&self, id: Id, has_panicked: bool) {
        let mut state = self.state();
        if has_panicked {
            state.wrong.get_or_insert(format!("program {id} panicked"));
        }
        state.programs[id].status = Status::Ended;
        state.give(None);
    }

    /// Whether it was killed.
    pub fn is_dead(&self, id: Id) -> bool {
        self.state().programs[id].is_dead
    }

    /// Whether one of its calls failed.
    pub fn has_failed(&self, id: Id) -> bool {
        self.state().programs[id].has_failed
    }

    /// The time of an event, later than all before. It stands still for a program that died.
    pub fn now(&self, id: Id) -> u64 {
        let mut state = self.state();
        state.now += u64::from(!state.programs[id].is_dead);
        state.now
    }

    /// The time at which the observer looks at the disk.
    pub fn now_of_observer(&self) -> u64 {
        let mut state = self.state();
        state.now += 1;
        state.now
    }

    /// The observer lets programs go on until it has the turn again. Returns whether any is alive.
    ///
    /// # Errors
    /// What must not happen whatever the programs do.
    pub fn go_on(&self) -> Result<bool, String> {
        let mut state = self.state();
        state.give_next();
        drop(state);
        loop {
            let mut state = self.state();
            if let Some(wrong) = state.wrong.take() {
                return Err(wrong);
            }
            if state.running.is_none() {
                return Ok(state.programs.iter().any(|program| program.status != Status::Ended));
            }
            drop(state);
            thread::park();
        }
    }

    /// The observer kills all programs at once, and waits until they have ended.
    pub fn kill_all(&self) {
        let mut state = self.state();
        for program in &mut state.programs {
            program.is_dead = true;
            program.waiting.as_ref().map(Thread::unpark);
        }
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        for thread in threads {
            thread.join().expect("a program's panic is caught");
        }
    }

    /// The calls so far.
    pub fn steps(&self) -> Vec<Step> {
        self.state().steps.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Program {
    fn new(trouble: Option<Trouble>) -> Self {
        let (status, is_dead, has_failed) = (Status::Ready, false, false);
        let (calls, is_at_call, waiting) = (0, false, None);
        Self { trouble, status, is_dead, has_failed, calls, is_at_call, waiting }
    }
}

impl State {
    /// May give others turns before this program's call.
    fn take_turns(&mut self, id: Id) {
        if self.random.u32(..self.pace) != 0 {
            return;
        }
        if self.random.u32(..24) == 0 {
            self.programs[id].status = Status::SleepsUntil(self.now + self.random.u64(1..400));
        }
        match self.random.u32(..40) {
            0 => self.give(None),
            _ => self.give_next(),
        }
    }

    /// Gives the turn to a program that can run; to the observer if there is none.
    fn give_next(&mut self) {
        let ready: Vec<Id> = (0..self.programs.len())
            .filter(|&id| self.is_ready(self.programs[id].status))
            .collect();
        let first_awake = || {
            let sleeps = |(id, program): (Id, &Program)| match program.status {
                Status::SleepsUntil(time) => Some((time, id)),
                _ => None,
            };
            self.programs.iter().enumerate().filter_map(sleeps).min().map(|(_, id)| id)
        };
        let next = match ready.len() {
            0 => first_awake(),
            count => Some(ready[self.random.usize(..count)]),
        };
        self.give(next);
    }

    fn is_ready(&self, status: Status) -> bool {
        match status {
            Status::Ready => true,
            Status::WaitsFor(other) => self.programs[other].status == Status::Ended,
            Status::SleepsUntil(time) => time <= self.now,
            Status::Ended => false,
        }
    }

    fn give(&mut self, next: Option<Id>) {
        self.running = next;
        match next {
            None => self.observer.unpark(),
            Some(id) => {
                let program = &mut self.programs[id];
                program.status = Status::Ready;
                program.waiting.as_ref().map(Thread::unpark);
            }
        }
    }
}

/// An engine whose thread has a program's watch.
struct Watched {
    _watch: Watch,
}

impl Twist for Watched {}

/// A program's clock and random numbers. Its host's clock may be wrong, and is set right or wrong at any call.
struct FromTurns {
    id: Id,
    /// What the clock is wrong by.
    ahead: i64,
    random: Rng,
    turns: Arc<Turns>,
}

impl Chance for FromTurns {
    fn now_unix_ms(&mut self) -> u64 {
        const START: u64 = 1_700_000_000_000;
        /// An hour and a day in both directions, 1970, the years 2100 and 12000.
        const WRONG: [i64; 7] = [
            3_600_000,
            -3_600_000,
            86_400_000,
            -86_400_000,
            i64::MIN,
            2_400_000_000_000,
            314_800_000_000_000,
        ];
        match self.random.u32(..16) {
            0 => self.ahead = 0,
            1 => self.ahead = WRONG[self.random.usize(..WRONG.len())],
            _ => {}
        }
        START.saturating_add_signed(self.ahead) + self.turns.now(self.id)
    }

    fn random(&mut self) -> u64 {
        self.random.u64(..)
    }
}
