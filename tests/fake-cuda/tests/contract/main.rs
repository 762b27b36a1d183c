//! What the fake driver promises to the tests that stand on it.
#![allow(unsafe_code)] // the driver is a C library

#[macro_use]
#[path = "../../../common/fake_cuda.rs"]
mod fake_cuda;
mod capture;
mod copies;
mod failures;
mod memory;
mod processes;
mod rows;
mod streams;

use fake_cuda::{Context, DeviceBuffer, Fake, Stream, symbol};
use std::ffi::{c_int, c_uint};

const OK: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NOT_INITIALIZED: c_int = 3;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_READY: c_int = 600;
const ILLEGAL_ADDRESS: c_int = 700;
const CONTEXT_IS_DESTROYED: c_int = 709;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;
const CAPTURE_UNSUPPORTED: c_int = 900;
const CAPTURE_INVALIDATED: c_int = 901;

const PORTABLE: c_uint = 1;
const PAGE: usize = 4096;

/// Host memory, registered or not; a page, where nothing else lives.
struct Host(Vec<u8>);

impl Host {
    fn pageable(len: usize) -> Self {
        Self(vec![0; len])
    }

    fn registered(len: usize) -> Self {
        let host = Self::pageable(len);
        assert_eq!(host.register(0, len), OK);
        host
    }

    fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    fn register(&self, from: usize, len: usize) -> c_int {
        let start = self.address() + from;
        cuda!(cuMemHostRegister_v2(start => usize, len => usize, PORTABLE => c_uint) -> c_int)
    }

    fn unregister(&self) -> c_int {
        cuda!(cuMemHostUnregister(self.address() => usize) -> c_int)
    }

    /// What it holds now: a worker may have written it behind the compiler's back.
    fn byte(&self, i: usize) -> u8 {
        // SAFETY: inside of the vector.
        unsafe { self.0.as_ptr().add(i).read_volatile() }
    }
}

fn to_host(host: usize, device: u64, len: usize, stream: usize) -> c_int {
    cuda!(cuMemcpyDtoHAsync_v2(
        host => usize, device => u64, len => usize, stream => usize) -> c_int)
}

fn to_device(device: u64, host: usize, len: usize, stream: usize) -> c_int {
    cuda!(cuMemcpyHtoDAsync_v2(
        device => u64, host => usize, len => usize, stream => usize) -> c_int)
}

fn event(flags: c_uint) -> usize {
    let mut event = 0;
    assert_eq!(cuda!(cuEventCreate(&mut event => *mut usize, flags => c_uint) -> c_int), OK);
    event
}

fn record(event: usize, stream: usize) -> c_int {
    cuda!(cuEventRecord(event => usize, stream => usize) -> c_int)
}

fn query(event: usize) -> c_int {
    cuda!(cuEventQuery(event => usize) -> c_int)
}

fn destroy(event: usize) {
    assert_eq!(cuda!(cuEventDestroy_v2(event => usize) -> c_int), OK);
}

fn synchronize(stream: usize) -> c_int {
    cuda!(cuStreamSynchronize(stream => usize) -> c_int)
}

/// Runs `body` in the context of device 0.
fn in_context(body: impl FnOnce()) {
    Context::retain(0).enter(body);
}

/// The violations so far, forgotten.
fn take_violations(fake: &Fake) -> Vec<String> {
    let violations = fake.violations();
    fake.reset();
    violations
}
