//! What tests do with the driver behind the back of the code under test: hold it, slow it down, make
//! it fail, and ask what it has seen.
//!
//! `FAKE_CUDA_REPORT=path` has a process append one line at its exit (not after `_exit`, nor in the
//! child of a fork): `{"pid": 1, "violations": ["..."], "live": {"streams": 0, ...},
//! "peak": {...}, "calls": {"cuInit": 1, ...}}`.
//!
//! Names of functions are those of the library's symbols. A name that it does not know is noted as
//! a violation, lest a misspelt one makes a test pass.

use crate::abi::Code;
use crate::api::FUNCTIONS;
use crate::driver::{State, driver};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs::OpenOptions;
use std::io::Write;
use std::process;
use std::time::Duration;

/// What `fake_cuda_live` knows.
const LIVE: &[&str] = &[
    "contexts",
    "streams",
    "events",
    "allocations",
    "allocated_bytes",
    "registrations",
    "registered_bytes",
];

/// What `fake_cuda_peak` knows.
const PEAKS: &[&str] = &["allocated_bytes", "registered_bytes"];

/// The failure of an operation while it is executed, and the count of copies on stream 0 or 1.
const NOT_CALLS: &[&str] = &["execute", "default-stream-copies"];

/// Settings and counts, all of which `fake_cuda_reset` forgets.
#[derive(Default)]
pub(crate) struct Control {
    is_held: bool,
    /// Instead of what the environment says.
    devices: Option<usize>,
    ns_per_op: u64,
    ns_per_mib: u64,
    failures: Vec<Failure>,
    calls: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

struct Failure {
    function: String,
    /// Calls that still succeed.
    after: u32,
    code: Code,
}

impl Control {
    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }

    /// How long the execution of an operation on so many bytes takes longer than it would.
    pub(crate) fn delay(&self, bytes: usize) -> Duration {
        let per_bytes = (u128::from(self.ns_per_mib) * bytes as u128) >> 20;
        Duration::from_nanos(self.ns_per_op.saturating_add(per_bytes as u64))
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.calls.entry(what).or_default() += 1;
    }

    pub(crate) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    fn fail(&mut self, function: &str, after: u32, code: Code) {
        if !is_known(function) {
            self.violation(format!("asked to fail an unknown function {function:?}"));
        }
        self.failures.push(Failure { function: function.into(), after, code });
    }

    /// `function:after:code[,...]`
    pub(crate) fn fail_all(&mut self, list: &str) {
        for entry in list.split(',').filter(|entry| !entry.is_empty()) {
            let mut parts = entry.split(':');
            let parsed = (|| {
                let function = parts.next()?;
                Some((function, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
            })();
            let (function, after, code) = parsed
                .unwrap_or_else(|| panic!("FAKE_CUDA_FAIL: {entry:?} is not function:after:code"));
            self.fail(function, after, code);
        }
    }

    /// The code that this call is to fail with.
    pub(crate) fn take_failure(&mut self, function: &str) -> Option<Code> {
        let mut due = None;
        for (i, failure) in self.failures.iter_mut().enumerate() {
            if failure.function != function {
                continue;
            }
            if failure.after == 0 {
                due.get_or_insert(i);
            } else {
                failure.after -= 1;
            }
        }
        due.map(|i| self.failures.remove(i).code)
    }
}

impl State {
    /// The number of devices.
    pub(crate) fn devices(&self) -> usize {
        self.control.devices.unwrap_or(self.options.devices)
    }

    fn live(&self, what: &str) -> Option<usize> {
        Some(match what {
            "contexts" => self.contexts.live(),
            "streams" => self.live_streams(),
            "events" => self.events.len(),
            "allocations" => self.memory.allocations.len(),
            "allocated_bytes" => self.memory.allocated(),
            "registrations" => self.memory.registrations(),
            "registered_bytes" => self.memory.registered(),
            _ => return None,
        })
    }

    fn peak(&self, what: &str) -> Option<usize> {
        Some(match what {
            "allocated_bytes" => self.memory.allocated_peak,
            "registered_bytes" => self.memory.registered_peak,
            _ => return None,
        })
    }

    fn report(&self) -> serde_json::Value {
        let live = LIVE.iter().map(|&what| (what, self.live(what)));
        let peak = PEAKS.iter().map(|&what| (what, self.peak(what)));
        serde_json::json!({
            "pid": process::id(),
            "violations": self.control.violations,
            "live": live.collect::<BTreeMap<_, _>>(),
            "peak": peak.collect::<BTreeMap<_, _>>(),
            "calls": self.control.calls,
        })
    }
}

/// Has the report written when the process exits.
pub(crate) fn report_at_exit() {
    // SAFETY: the function is there until the end, as this library is never unloaded.
    unsafe { nix::libc::atexit(write_report) };
}

extern "C" fn write_report() {
    if driver().is_forked() {
        return;
    }
    let state = driver().lock();
    let Some(path) = &state.options.report else { return };
    let line = format!("{}\n", state.report());
    let file = OpenOptions::new().create(true).append(true).open(path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("fake-cuda: cannot write the report {path}: {error}");
    }
}

fn is_known(function: &str) -> bool {
    FUNCTIONS.contains(&function) || NOT_CALLS.contains(&function)
}

/// # Safety
/// A string that ends with 0.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// Workers stop before their next operation, until `fake_cuda_release`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_hold() {
    driver().lock().control.is_held = true;
}

/// Workers go on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_release() {
    driver().lock().control.is_held = false;
    driver().notify();
}

/// Every copy and memset takes longer, by so many nanoseconds each and a MiB.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_slow(ns_per_op: u64, ns_per_mib: u64) {
    let mut state = driver().lock();
    state.control.ns_per_op = ns_per_op;
    state.control.ns_per_mib = ns_per_mib;
}

/// There are `count` devices, until the reset: for tests that share a process with others.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_devices(count: u32) {
    driver().lock().control.devices = Some(count as usize);
}

/// The (`after` + 1)-th call of `function` from now returns `code`, once, and does nothing.
///
/// `"execute"` stands for the execution of a copy or memset: its context is lost, and all later
/// calls there return `code`, until `fake_cuda_reset`. (Calls that give something back still do.)
///
/// # Safety
/// `function` is a string that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_fail(function: *const c_char, after: u32, code: c_int) {
    // SAFETY: the caller's promise.
    let function = unsafe { text(function) };
    driver().lock().control.fail(&function, after, code);
}

/// How often `function` was called since the reset, failed calls too. `"default-stream-copies"`:
/// how many asynchronous copies were submitted to stream 0 or 1.
///
/// # Safety
/// `function` is a string that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let function = unsafe { text(function) };
    let mut state = driver().lock();
    if !is_known(&function) {
        state.control.violation(format!("asked for calls of an unknown function {function:?}"));
    }
    state.control.calls.get(function.as_str()).copied().unwrap_or(0)
}

/// How many there are of `"contexts"` (retains not yet released), `"streams"`, `"events"`,
/// `"allocations"`, `"allocated_bytes"`, `"registrations"`, `"registered_bytes"`; -1 for another word.
///
/// # Safety
/// `what` is a string that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_live(what: *const c_char) -> i64 {
    // SAFETY: the caller's promise.
    let what = unsafe { text(what) };
    driver().lock().live(&what).map_or(-1, |count| count as i64)
}

/// The most of `"allocated_bytes"` or `"registered_bytes"` since the reset; `u64::MAX` for another
/// word.
///
/// # Safety
/// `what` is a string that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_peak(what: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let what = unsafe { text(what) };
    driver().lock().peak(&what).map_or(u64::MAX, |bytes| bytes as u64)
}

/// The violations, a line each, without an end: writes what fits into `len` bytes and returns the
/// length of all (0: none).
///
/// # Safety
/// `out` has room for `len` bytes; it may be null if `len` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_violations(out: *mut u8, len: usize) -> usize {
    let text = driver().lock().control.violations.join("\n");
    let fitting = len.min(text.len());
    if fitting > 0 {
        // SAFETY: the caller's promise; the text has that many bytes.
        unsafe { out.copy_from_nonoverlapping(text.as_ptr(), fitting) };
    }
    text.len()
}

/// Forgets violations, failures, delays, the number of devices, the hold, counts, peaks, captures and lost contexts.
/// Whatever the program holds (memory, registrations, streams, events) it goes on holding.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_reset() {
    let mut state = driver().lock();
    state.control = Control::default();
    state.captures.forget_all();
    state.contexts.heal_all();
    state.memory.allocated_peak = state.memory.allocated();
    state.memory.registered_peak = state.memory.registered();
    driver().notify();
}
