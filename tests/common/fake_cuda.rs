//! The fake CUDA driver (`tests/fake-cuda`) for tests: loads it in the place of `libcuda.so`, controls
//! it, and makes device memory and streams as a training program has them.
//!
//! All that is made here leaves the calling thread's current context as it was.
#![allow(dead_code)] // every test binary uses a part of it
#![allow(unsafe_code)] // the driver is a C library

use nix::libc;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};
use std::{env, ptr, thread};

/// The tests of one binary share the driver: one runs after another.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What `dlopen` returned, as an address. The library is never closed.
static LIBRARY: LazyLock<usize> = LazyLock::new(open);

/// `target/<profile>/deps/libfake_cuda.so`, where cargo puts the library of a dev-dependency.
pub fn library_path() -> PathBuf {
    let executable = env::current_exe().expect("the path of this test");
    executable.with_file_name("libfake_cuda.so")
}

fn open() -> usize {
    let path = library_path();
    let name = CString::new(path.to_str().expect("a path in UTF-8")).expect("no zero");
    // SAFETY: the library's initialization does nothing.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: after a failure there is a message.
        let reason = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy();
        panic!("cannot load the fake driver {}: {reason}", path.display());
    }
    library.expose_provenance()
}

/// The address of a function of the driver.
pub fn symbol(name: &CStr) -> *mut c_void {
    let library = ptr::with_exposed_provenance_mut(*LIBRARY);
    // SAFETY: the library is open.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "the fake driver has no {name:?}");
    found
}

/// Calls a function of the driver by its name, with the types of its arguments and result.
macro_rules! cuda {
    ($name:ident($($value:expr => $type:ty),* $(,)?) $(-> $result:ty)?) => {{
        const NAME: &std::ffi::CStr =
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            };
        type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
        // SAFETY: the types are those of the function with this name.
        let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Function>(symbol(NAME)) };
        // SAFETY: addresses point to what the function reads and writes.
        unsafe { function($($value),*) }
    }};
}

/// As `cuda`, of a function that returns a `CUresult`, which must be 0.
macro_rules! must {
    ($name:ident($($value:expr => $type:ty),* $(,)?)) => {{
        let code = cuda!($name($($value => $type),*) -> c_int);
        assert_eq!(code, 0, "{} in a test's own use of the driver", stringify!($name));
    }};
}

/// The fake driver, for one test. Whatever the test before left behind in it is forgotten; when the
/// test ends, it must have seen no violations.
pub struct Fake {
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    /// Loads it before anything else looks for `libcuda.so`.
    pub fn load() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        cuda!(fake_cuda_reset());
        must!(cuInit(0 => c_uint));
        Self { _turn: turn }
    }

    /// Streams stop before their next operation.
    pub fn hold(&self) {
        cuda!(fake_cuda_hold());
    }

    /// Streams go on.
    pub fn release(&self) {
        cuda!(fake_cuda_release());
    }

    /// Every copy takes longer: nanoseconds each, and a MiB.
    pub fn slow(&self, ns_per_op: u64, ns_per_mib: u64) {
        cuda!(fake_cuda_slow(ns_per_op => u64, ns_per_mib => u64));
    }

    /// There are `count` devices as long as this test runs (1 otherwise).
    pub fn devices(&self, count: u32) {
        cuda!(fake_cuda_devices(count => u32));
    }

    /// The (`after` + 1)-th call of `function` from now returns `code`, once. `"execute"`: so many
    /// copies are still executed, then the context is lost.
    pub fn fail(&self, function: &str, after: u32, code: i32) {
        let function = CString::new(function).expect("no zero");
        cuda!(fake_cuda_fail(function.as_ptr() => *const c_char, after => u32, code => c_int));
    }

    /// How often `function` was called; `"default-stream-copies"`: asynchronous copies on stream 0 or 1.
    pub fn calls(&self, function: &str) -> u64 {
        let function = CString::new(function).expect("no zero");
        cuda!(fake_cuda_calls(function.as_ptr() => *const c_char) -> u64)
    }

    /// How many there are of `"contexts"`, `"streams"`, `"events"`, `"allocations"`,
    /// `"allocated_bytes"`, `"registrations"` or `"registered_bytes"`, those of the test included.
    pub fn live(&self, what: &str) -> i64 {
        let name = CString::new(what).expect("no zero");
        let count = cuda!(fake_cuda_live(name.as_ptr() => *const c_char) -> i64);
        assert!(count >= 0, "the fake driver does not count {what:?}");
        count
    }

    /// The most of `"allocated_bytes"` or `"registered_bytes"` since the test began.
    pub fn peak(&self, what: &str) -> u64 {
        let name = CString::new(what).expect("no zero");
        let most = cuda!(fake_cuda_peak(name.as_ptr() => *const c_char) -> u64);
        assert_ne!(most, u64::MAX, "the fake driver keeps no peak of {what:?}");
        most
    }

    /// What no program may do to a driver, and was done.
    pub fn violations(&self) -> Vec<String> {
        let len = cuda!(fake_cuda_violations(ptr::null_mut() => *mut u8, 0 => usize) -> usize);
        let mut text = vec![0u8; len];
        cuda!(fake_cuda_violations(text.as_mut_ptr() => *mut u8, len => usize) -> usize);
        String::from_utf8_lossy(&text).lines().map(String::from).collect()
    }

    /// Forgets what it has seen and was told: for a test that has provoked a violation or lost a
    /// context.
    pub fn reset(&self) {
        cuda!(fake_cuda_reset());
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let violations = self.violations();
        cuda!(fake_cuda_reset());
        if !thread::panicking() {
            assert!(violations.is_empty(), "the driver saw violations: {violations:#?}");
        }
    }
}

/// A device's primary context, retained, and the current one as long as [`Context::enter`] says.
pub struct Context {
    ordinal: c_int,
    handle: usize,
}

impl Context {
    pub fn retain(ordinal: usize) -> Self {
        let ordinal = ordinal as c_int;
        let mut handle = 0;
        must!(cuDevicePrimaryCtxRetain(&mut handle => *mut usize, ordinal => c_int));
        Self { ordinal, handle }
    }

    /// Runs `body` with the context as the calling thread's current one.
    pub fn enter<T>(&self, body: impl FnOnce() -> T) -> T {
        must!(cuCtxPushCurrent_v2(self.handle => usize));
        let result = body();
        must!(cuCtxPopCurrent_v2(ptr::null_mut() => *mut usize));
        result
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        cuda!(cuDevicePrimaryCtxRelease_v2(self.ordinal => c_int) -> c_int);
    }
}

/// The calling thread's current context.
pub fn current_context() -> usize {
    let mut handle = 0;
    must!(cuCtxGetCurrent(&mut handle => *mut usize));
    handle
}

/// Device memory with something in it.
pub struct DeviceBuffer {
    context: Context,
    ptr: u64,
    len: usize,
}

impl DeviceBuffer {
    /// Memory of device `ordinal` that holds `bytes` (at least one).
    pub fn new(ordinal: usize, bytes: &[u8]) -> Self {
        let context = Context::retain(ordinal);
        let (mut ptr, len) = (0, bytes.len());
        context.enter(|| {
            must!(cuMemAlloc_v2(&mut ptr => *mut u64, len => usize));
            must!(cuMemcpyHtoD_v2(ptr => u64, bytes.as_ptr() => *const u8, len => usize));
        });
        Self { context, ptr, len }
    }

    /// The device pointer.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// What it holds now. Waits for no stream that was created as non-blocking.
    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.len];
        self.context.enter(|| {
            must!(cuMemcpyDtoH_v2(
                bytes.as_mut_ptr() => *mut u8,
                self.ptr => u64,
                self.len => usize,
            ));
        });
        bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.context.enter(|| cuda!(cuMemFree_v2(self.ptr => u64) -> c_int));
    }
}

/// A stream of a training program: non-blocking, destroyed on drop.
pub struct Stream {
    context: Context,
    handle: usize,
}

impl Stream {
    pub fn new(ordinal: usize) -> Self {
        let context = Context::retain(ordinal);
        let mut handle = 0;
        const NON_BLOCKING: c_uint = 1;
        context.enter(|| must!(cuStreamCreate(&mut handle => *mut usize, NON_BLOCKING => c_uint)));
        Self { context, handle }
    }

    /// The `CUstream`.
    pub fn handle(&self) -> usize {
        self.handle
    }

    /// Has the stream set `len` bytes of device memory to `value`, later.
    pub fn memset(&self, ptr: u64, value: u8, len: usize) {
        self.context.enter(|| {
            must!(cuMemsetD8Async(ptr => u64, value => u8, len => usize, self.handle => usize));
        });
    }

    /// Has the stream wait, when it comes there, until the gate is opened.
    pub fn gate(&self) -> Gate {
        let gate = Gate(Arc::new((Mutex::new(false), Condvar::new())));
        let waiting = Arc::into_raw(Arc::clone(&gate.0));
        self.context.enter(|| {
            must!(cuLaunchHostFunc(
                self.handle => usize,
                wait_at_gate => extern "C" fn(*mut c_void),
                waiting.cast_mut().cast() => *mut c_void,
            ));
        });
        gate
    }

    /// Waits until the stream has done all that it was given.
    pub fn synchronize(&self) {
        self.context.enter(|| must!(cuStreamSynchronize(self.handle => usize)));
    }

    /// Begins a capture of the stream by this thread, in the mode GLOBAL, as graphs are recorded.
    pub fn begin_capture(&self) {
        const GLOBAL: c_uint = 0;
        self.context.enter(|| {
            must!(cuStreamBeginCapture_v2(self.handle => usize, GLOBAL => c_uint));
        });
    }

    /// Ends the capture. The driver's code: 0 unless something broke it.
    pub fn end_capture(&self) -> i32 {
        let mut graph = 0;
        self.context.enter(
            || cuda!(cuStreamEndCapture(self.handle => usize, &mut graph => *mut usize) -> c_int),
        )
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.context.enter(|| cuda!(cuStreamDestroy_v2(self.handle => usize) -> c_int));
    }
}

type Shutter = (Mutex<bool>, Condvar);

/// Keeps a stream from going on, until it is opened or dropped.
pub struct Gate(Arc<Shutter>);

impl Gate {
    /// Lets the stream go on.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        let (is_open, opened) = &*self.0;
        *is_open.lock().unwrap() = true;
        opened.notify_all();
    }
}

extern "C" fn wait_at_gate(shutter: *mut c_void) {
    // SAFETY: from `Arc::into_raw` in `Stream::gate`, and called once.
    let shutter = unsafe { Arc::from_raw(shutter.cast_const().cast::<Shutter>()) };
    let (is_open, opened) = &*shutter;
    drop(opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
}
