//! The one state of the driver, behind one lock, and what wakes those who wait for it to change.

use crate::abi::{Code, Handle};
use crate::capture::Captures;
use crate::context::Contexts;
use crate::control::Control;
use crate::event::Event;
use crate::memory::Memory;
use crate::stream::Stream;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once};
use std::{env, process};

/// All there is. Streams and events are by handle; handles are never used again.
#[derive(Default)]
pub struct State {
    pub options: Options,
    pub control: Control,
    pub memory: Memory,
    pub contexts: Contexts,
    pub streams: BTreeMap<Handle, Stream>,
    pub events: BTreeMap<Handle, Event>,
    pub captures: Captures,
    handles: usize,
}

/// The environment of the process.
#[derive(Clone)]
pub struct Options {
    pub devices: usize,
    pub driver_version: i32,
    pub memory_bytes: usize,
    pub open: bool,
    pub report: Option<String>,
}

pub type Guard = MutexGuard<'static, State>;

pub struct Driver {
    state: Mutex<State>,
    changed: Condvar,
    /// The process that called `cuInit`; 0 before.
    pid: AtomicU32,
    configured: Once,
}

static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
    state: Mutex::default(),
    changed: Condvar::new(),
    pid: AtomicU32::new(0),
    configured: Once::new(),
});

pub fn driver() -> &'static Driver {
    &DRIVER
}

impl Driver {
    pub fn lock(&'static self) -> Guard {
        self.state.lock().expect("a panic in this library aborts the process")
    }

    /// Sleeps until `done`.
    pub fn wait_until(&self, guard: Guard, mut done: impl FnMut(&mut State) -> bool) -> Guard {
        self.changed.wait_while(guard, |state| !done(state)).expect("as in lock")
    }

    /// Wakes all that wait: something that they look at has changed.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Reads the environment, once.
    pub fn configure(&'static self) {
        self.configured.call_once(|| {
            let mut state = self.lock();
            state.options = Options::from_env();
            if let Ok(failures) = env::var("FAKE_CUDA_FAIL") {
                state.control.fail_all(&failures);
            }
            if state.options.report.is_some() {
                crate::control::report_at_exit();
            }
        });
    }

    pub fn initialize(&self) {
        self.pid.store(process::id(), Ordering::Release);
    }

    /// Whether this process called `cuInit`: CUDA is of no use in the child of a fork.
    pub fn is_initialized(&self) -> bool {
        self.pid.load(Ordering::Acquire) == process::id()
    }

    /// Whether this is the child of a fork, where even the lock is of no use.
    pub fn is_forked(&self) -> bool {
        !matches!(self.pid.load(Ordering::Acquire), 0) && !self.is_initialized()
    }
}

impl State {
    /// A handle that nothing else has; far from what is mapped, so that nobody can look behind it.
    pub fn new_handle(&mut self) -> Handle {
        self.handles += 1;
        0x7ffe_0000_0000_0000 + (self.handles << 4)
    }

    /// The error that the context is lost to, if it is.
    ///
    /// # Errors
    /// That one.
    pub fn healthy(&self, context: Handle) -> Result<(), Code> {
        self.contexts.lost(context).map_or(Ok(()), Err)
    }
}

impl Options {
    fn from_env() -> Self {
        let base = Self::default();
        Self {
            devices: number("FAKE_CUDA_DEVICES").unwrap_or(base.devices),
            driver_version: number("FAKE_CUDA_DRIVER_VERSION").unwrap_or(base.driver_version),
            memory_bytes: number("FAKE_CUDA_MEMORY").unwrap_or(base.memory_bytes),
            open: env::var("FAKE_CUDA_OPEN").is_ok_and(|value| value == "1"),
            report: env::var("FAKE_CUDA_REPORT").ok().filter(|path| !path.is_empty()),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self { devices: 1, driver_version: 12080, memory_bytes: 8 << 30, open: false, report: None }
    }
}

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    let parsed = text.parse().ok();
    assert!(parsed.is_some(), "{name}={text}: not a number that fits");
    parsed
}
