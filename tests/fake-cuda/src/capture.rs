//! Captures: which streams are being captured into a graph, by whom, and what that forbids to others.
//! The graph itself is not kept.

use crate::abi::{
    Code, Handle, ILLEGAL_STATE, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_WRONG_THREAD,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

/// `CUstreamCaptureMode`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

/// Calls that may do things behind the program's back which a capture cannot contain.
const UNSAFE: &[&str] = &[
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8_v2",
    "cuStreamSynchronize",
];

thread_local! {
    /// What a thread says about its own unsafe calls.
    static OWN_MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

#[derive(Default)]
pub struct Captures(BTreeMap<Handle, Capture>);

struct Capture {
    mode: Mode,
    thread: ThreadId,
    is_invalid: bool,
}

impl Mode {
    pub fn from_raw(mode: u32) -> Option<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed].into_iter().find(|&m| m as u32 == mode)
    }
}

/// Sets the calling thread's mode and returns the one before.
pub fn exchange_mode(mode: Mode) -> Mode {
    OWN_MODE.replace(mode)
}

impl Captures {
    /// # Errors
    /// `ILLEGAL_STATE` if the stream is being captured already.
    pub fn begin(&mut self, stream: Handle, mode: Mode) -> Result<(), Code> {
        if self.is_capturing(stream) {
            return Err(ILLEGAL_STATE);
        }
        let capture = Capture { mode, thread: thread::current().id(), is_invalid: false };
        self.0.insert(stream, capture);
        Ok(())
    }

    /// # Errors
    /// `ILLEGAL_STATE` without a capture, `STREAM_CAPTURE_WRONG_THREAD`,
    /// `STREAM_CAPTURE_INVALIDATED` for one that something has broken.
    pub fn end(&mut self, stream: Handle) -> Result<(), Code> {
        let capture = self.0.get(&stream).ok_or(ILLEGAL_STATE)?;
        if capture.mode != Mode::Relaxed && !capture.is_own() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        let is_invalid = capture.is_invalid;
        self.forget(stream);
        if is_invalid { Err(STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    pub fn is_capturing(&self, stream: Handle) -> bool {
        self.0.contains_key(&stream)
    }

    /// `CUstreamCaptureStatus`: none, active, invalidated.
    pub fn status(&self, stream: Handle) -> u32 {
        self.0.get(&stream).map_or(0, |capture| 1 + u32::from(capture.is_invalid))
    }

    pub fn invalidate(&mut self, stream: Handle) {
        if let Some(capture) = self.0.get_mut(&stream) {
            capture.is_invalid = true;
        }
    }

    /// Whether a capture forbids this call to this thread. The captures that do are broken by it.
    pub fn is_broken_by(&mut self, function: &str) -> bool {
        if self.0.is_empty() || !UNSAFE.contains(&function) {
            return false;
        }
        let own_mode = OWN_MODE.get();
        let forbidding = self.0.values_mut().filter(|capture| capture.forbids(own_mode));
        forbidding.map(|capture| capture.is_invalid = true).count() > 0
    }

    pub fn forget(&mut self, stream: Handle) {
        self.0.remove(&stream);
    }

    pub fn forget_all(&mut self) {
        self.0.clear();
    }
}

impl Capture {
    fn is_own(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Whether it forbids unsafe calls to the calling thread, which is in `own_mode`.
    fn forbids(&self, own_mode: Mode) -> bool {
        match own_mode {
            Mode::Relaxed => false,
            Mode::ThreadLocal => self.is_own() && self.mode != Mode::Relaxed,
            Mode::Global if self.is_own() => self.mode != Mode::Relaxed,
            Mode::Global => self.mode == Mode::Global,
        }
    }
}
