//! What the fake driver promises to the tests that stand on it.
#![allow(unsafe_code)] // the driver is a C library

#[macro_use]
#[path = "../../common/fake_cuda.rs"]
mod fake_cuda;

use fake_cuda::{Context, DeviceBuffer, Fake, Stream, symbol};
use std::ffi::{c_int, c_uint, c_void};
use std::process::{Command, ExitStatus};
use std::sync::mpsc;
use std::{env, ptr, thread};

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

#[test]
fn a_copy_from_a_device_writes_host_memory_when_the_stream_comes_to_it_and_not_before() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[7; PAGE]), Stream::new(0));
        let (host, done) = (Host::registered(PAGE), event(0));
        fake.hold();
        assert_eq!(to_host(host.address(), device.ptr(), PAGE, stream.handle()), OK);
        assert_eq!(record(done, stream.handle()), OK);
        assert_eq!((query(done), host.byte(0)), (NOT_READY, 0));
        fake.release();
        assert_eq!(cuda!(cuEventSynchronize(done => usize) -> c_int), OK);
        assert_eq!((query(done), host.byte(0), host.byte(PAGE - 1)), (OK, 7, 7));
        destroy(done);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn a_copy_to_a_device_reads_host_memory_when_the_stream_comes_to_it_and_not_before() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[7; PAGE]), Stream::new(0));
        let mut host = Host::registered(PAGE);
        fake.hold();
        assert_eq!(to_device(device.ptr(), host.address(), PAGE, stream.handle()), OK);
        host.0.fill(9);
        fake.release();
        assert_eq!(synchronize(stream.handle()), OK);
        assert_eq!(device.read(), [9; PAGE]);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn operations_of_a_stream_run_in_their_order() {
    let _fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[0; PAGE]), Stream::new(0));
        let host = Host::registered(256);
        for i in 0..=255 {
            stream.memset(device.ptr(), i as u8, 1);
            assert_eq!(to_host(host.address() + i, device.ptr(), 1, stream.handle()), OK);
        }
        assert_eq!(synchronize(stream.handle()), OK);
        assert!((0..256).all(|i| host.byte(i) == i as u8));
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn a_stream_waits_for_what_was_recorded_at_the_time_of_the_call() {
    let _fake = Fake::load();
    in_context(|| {
        let device = DeviceBuffer::new(0, &[0; PAGE]);
        let (producer, consumer) = (Stream::new(0), Stream::new(0));
        let (ready, host) = (event(0), Host::registered(2));
        let wait = || {
            assert_eq!(
                cuda!(cuStreamWaitEvent(
                    consumer.handle() => usize, ready => usize, 0 => c_uint) -> c_int),
                OK
            );
        };
        wait(); // never recorded: no wait
        assert_eq!(synchronize(consumer.handle()), OK);
        let first = producer.gate();
        producer.memset(device.ptr(), 1, PAGE);
        assert_eq!(record(ready, producer.handle()), OK);
        wait();
        let second = producer.gate();
        producer.memset(device.ptr(), 2, PAGE);
        assert_eq!(record(ready, producer.handle()), OK);
        assert_eq!(to_host(host.address(), device.ptr(), 1, consumer.handle()), OK);
        assert_eq!(cuda!(cuStreamQuery(consumer.handle() => usize) -> c_int), NOT_READY);
        first.open();
        // The second record is not waited for: its gate is still closed.
        assert_eq!(synchronize(consumer.handle()), OK);
        assert_eq!(host.byte(0), 1);
        assert_eq!(query(ready), NOT_READY);
        second.open();
        assert_eq!(synchronize(producer.handle()), OK);
        assert_eq!(query(ready), OK);
        destroy(ready);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn the_default_stream_is_in_order_with_blocking_streams_only() {
    let fake = Fake::load();
    in_context(|| {
        let (device, host) = (DeviceBuffer::new(0, &[5; 8]), Host::registered(8));
        let mut blocking = 0;
        assert_eq!(cuda!(cuStreamCreate(&mut blocking => *mut usize, 0 => c_uint) -> c_int), OK);
        let independent = Stream::new(0);
        let gate = independent.gate();
        assert_eq!(to_host(host.address(), device.ptr(), 1, 0), OK); // not behind the gate
        assert_eq!(synchronize(0), OK);
        fake.hold();
        assert_eq!(to_host(host.address() + 1, device.ptr(), 1, blocking), OK);
        assert_eq!(to_host(host.address() + 2, device.ptr(), 1, 1), OK);
        fake.release();
        assert_eq!(synchronize(0), OK);
        assert_eq!([0, 1, 2].map(|i| host.byte(i)), [5; 3]);
        assert_eq!(fake.calls("default-stream-copies"), 2);
        drop(gate);
        assert_eq!(cuda!(cuStreamDestroy_v2(blocking => usize) -> c_int), OK);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn a_copy_of_pageable_memory_is_done_when_the_call_returns() {
    let fake = Fake::load();
    let (device, stream) = (DeviceBuffer::new(0, &[3; PAGE]), Stream::new(0));
    fake.hold();
    let (sender, returned) = mpsc::channel();
    thread::scope(|scope| {
        let (device, stream) = (device.ptr(), stream.handle());
        scope.spawn(move || {
            in_context(|| {
                let host = Host::pageable(PAGE);
                sender.send(None).unwrap();
                assert_eq!(to_host(host.address(), device, PAGE, stream), OK);
                sender.send(Some(host.byte(PAGE - 1))).unwrap();
            });
        });
        assert_eq!(returned.recv(), Ok(None));
        assert!(returned.try_recv().is_err());
        fake.release();
        assert_eq!(returned.recv(), Ok(Some(3)));
    });
}

#[test]
fn a_copy_over_the_edge_of_a_registration_is_refused() {
    let _fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[1; PAGE]), Stream::new(0));
        let host = Host::pageable(4 * PAGE);
        let copy = |from, len| to_host(host.address() + from, device.ptr(), len, stream.handle());
        assert_eq!(host.register(0, PAGE), OK);
        assert_eq!(host.register(PAGE, PAGE), OK);
        assert_eq!(copy(PAGE - 16, 16), OK);
        assert_eq!(copy(PAGE - 16, 32), INVALID_VALUE); // two registrations
        assert_eq!(copy(2 * PAGE - 16, 32), INVALID_VALUE); // one, and pageable memory
        assert_eq!(copy(2 * PAGE, PAGE), OK);
        assert_eq!(synchronize(stream.handle()), OK);
        for start in [0, PAGE] {
            let start = host.address() + start;
            assert_eq!(cuda!(cuMemHostUnregister(start => usize) -> c_int), OK);
        }
    });
}

#[test]
fn a_copy_outside_of_an_allocation_is_refused_and_noted() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[1; PAGE]), Stream::new(0));
        let host = Host::pageable(2 * PAGE);
        let copy = |from, len| to_host(host.address(), from, len, stream.handle());
        assert_eq!(copy(device.ptr() + 1, PAGE), INVALID_VALUE);
        assert_eq!(take_violations(&fake).len(), 1);
        assert_eq!(copy(device.ptr() + PAGE as u64, 1), INVALID_VALUE);
        assert_eq!(take_violations(&fake).len(), 1);
        let freed = device.ptr();
        drop(device);
        assert_eq!(copy(freed, 1), INVALID_VALUE);
        let noted = take_violations(&fake);
        assert!(noted[0].contains("cuMemcpyDtoHAsync_v2"), "{noted:?}");
        assert_eq!(cuda!(cuMemFree_v2(freed => u64) -> c_int), INVALID_VALUE);
        assert_eq!(take_violations(&fake).len(), 1);
    });
}

#[test]
fn memory_is_registered_once_and_unregistered_by_its_start() {
    let fake = Fake::load();
    in_context(|| {
        let host = Host::registered(2 * PAGE);
        assert_eq!(host.register(0, 2 * PAGE), ALREADY_REGISTERED);
        assert_eq!(host.register(PAGE, 8), ALREADY_REGISTERED);
        assert_eq!(host.register(0, 0), INVALID_VALUE);
        assert_eq!(fake.live("registered_bytes"), 2 * PAGE as i64);
        let inner = host.address() + PAGE;
        assert_eq!(cuda!(cuMemHostUnregister(inner => usize) -> c_int), NOT_REGISTERED);
        let mut flags = 0;
        assert_eq!(
            cuda!(cuMemHostGetFlags(&mut flags => *mut c_uint, inner => usize) -> c_int),
            OK
        );
        assert_eq!(flags, PORTABLE);
        assert_eq!((host.unregister(), host.unregister()), (OK, NOT_REGISTERED));
        assert_eq!((fake.live("registrations"), fake.peak("registered_bytes")), (0, 8192));
        let unmapped = 16 * PAGE;
        assert_eq!(
            cuda!(cuMemHostRegister_v2(unmapped => usize, PAGE => usize, 0 => c_uint) -> c_int),
            INVALID_VALUE
        );
    });
}

#[test]
fn memory_unregistered_or_freed_while_a_copy_uses_it_is_noted_and_the_copy_given_up() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[1; PAGE]), Stream::new(0));
        let host = Host::registered(PAGE);
        fake.hold();
        assert_eq!(to_host(host.address(), device.ptr(), PAGE, stream.handle()), OK);
        assert_eq!(host.unregister(), OK);
        let noted = take_violations(&fake);
        assert!(noted[0].contains("unregistered while 1 copies use it"), "{noted:?}");
        assert_eq!((synchronize(stream.handle()), host.byte(0)), (OK, 0));

        fake.hold();
        stream.memset(device.ptr(), 1, PAGE);
        drop(device);
        let noted = take_violations(&fake);
        assert!(noted[0].contains("freed while 1 copies use it"), "{noted:?}");
        assert_eq!(synchronize(stream.handle()), OK);
    });
}

#[test]
fn memory_freed_in_the_order_of_a_stream_is_freed_when_the_stream_comes_to_it() {
    let fake = Fake::load();
    in_context(|| {
        let (stream, mut device) = (Stream::new(0), 0);
        let handle = stream.handle();
        let code = cuda!(cuMemAllocAsync(
            &mut device => *mut u64, PAGE => usize, handle => usize) -> c_int);
        assert_eq!(code, OK);
        fake.hold();
        stream.memset(device, 1, PAGE);
        assert_eq!(cuda!(cuMemFreeAsync(device => u64, handle => usize) -> c_int), OK);
        assert_eq!(fake.live("allocations"), 1);
        fake.release();
        assert_eq!(synchronize(handle), OK);
        assert_eq!(fake.live("allocations"), 0);
    });
}

#[test]
fn an_injected_failure_fails_one_call_after_so_many() {
    let fake = Fake::load();
    in_context(|| {
        fake.fail("cuMemHostRegister_v2", 1, OUT_OF_MEMORY);
        let (one, two) = (Host::registered(PAGE), Host::pageable(PAGE));
        assert_eq!(two.register(0, PAGE), OUT_OF_MEMORY);
        assert_eq!(two.register(0, PAGE), OK);
        assert_eq!(fake.calls("cuMemHostRegister_v2"), 3);
        assert_eq!((one.unregister(), two.unregister()), (OK, OK));
    });
}

#[test]
fn a_misspelt_function_is_noted() {
    let fake = Fake::load();
    fake.fail("cuMemcpyDtoHAsync", 0, 1);
    assert_eq!(fake.calls("cuMemAlloc"), 0);
    assert_eq!(take_violations(&fake).len(), 2);
}

#[test]
fn a_copy_that_fails_when_executed_loses_the_context_until_the_reset() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[1; PAGE]), Stream::new(0));
        let host = Host::registered(PAGE);
        fake.fail("execute", 1, ILLEGAL_ADDRESS);
        fake.hold(); // no call here is to see the failure yet
        for i in 0..3 {
            assert_eq!(to_host(host.address() + i, device.ptr(), 1, stream.handle()), OK);
        }
        fake.release();
        assert_eq!(synchronize(stream.handle()), ILLEGAL_ADDRESS);
        assert_eq!([0, 1, 2].map(|i| host.byte(i)), [1, 0, 0]);
        assert_eq!(to_host(host.address(), device.ptr(), 1, stream.handle()), ILLEGAL_ADDRESS);
        // It says so, and does give the memory back.
        assert_eq!(host.unregister(), ILLEGAL_ADDRESS);
        assert_eq!(fake.live("registrations"), 0);
        fake.reset();
        assert_eq!(synchronize(stream.handle()), OK);
    });
}

#[test]
fn no_call_goes_without_a_context_or_with_one_that_is_gone() {
    let _fake = Fake::load();
    let mut event = 0;
    let mut create = || cuda!(cuEventCreate(&mut event => *mut usize, 0 => c_uint) -> c_int);
    assert_eq!(create(), INVALID_CONTEXT);
    let context = Context::retain(0);
    context.enter(|| assert_eq!(create(), OK));
    drop(context); // the last one: what lived in it is gone
    let context = Context::retain(0);
    let mut handle = 0;
    context.enter(|| {
        assert_eq!(cuda!(cuCtxGetCurrent(&mut handle => *mut usize) -> c_int), OK);
        assert_eq!(query(event), INVALID_HANDLE);
    });
    // A thread that has a context as its current one after its end.
    assert_eq!(cuda!(cuCtxSetCurrent(handle => usize) -> c_int), OK);
    drop(context);
    assert_eq!(cuda!(cuCtxSynchronize() -> c_int), CONTEXT_IS_DESTROYED);
    assert_eq!(cuda!(cuCtxSetCurrent(0 => usize) -> c_int), OK);
}

#[test]
fn a_destroyed_stream_still_does_its_work() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[0; PAGE]), Stream::new(0));
        let handle = stream.handle();
        let gate = stream.gate();
        stream.memset(device.ptr(), 4, PAGE);
        drop(stream);
        assert_eq!(synchronize(handle), INVALID_HANDLE);
        assert_eq!(fake.live("streams"), 0);
        gate.open();
        assert_eq!(cuda!(cuCtxSynchronize() -> c_int), OK);
        assert_eq!(device.read(), [4; PAGE]);
    });
}

#[test]
fn a_capture_forbids_unsafe_calls_to_threads_that_are_not_relaxed() {
    let fake = Fake::load();
    let stream = Stream::new(0);
    let register = |mode: Option<c_uint>| {
        let mut mode = mode;
        let mut code = OK;
        in_context(|| {
            if let Some(mode) = &mut mode {
                assert_eq!(
                    cuda!(cuThreadExchangeStreamCaptureMode(mode => *mut c_uint) -> c_int),
                    OK
                );
            }
            let host = Host::pageable(PAGE);
            code = host.register(0, PAGE);
            if code == OK {
                assert_eq!(host.unregister(), OK);
            }
        });
        code
    };
    let elsewhere = |mode| thread::scope(|scope| scope.spawn(|| register(mode)).join().unwrap());
    const THREAD_LOCAL: c_uint = 1;
    const RELAXED: c_uint = 2;
    stream.begin_capture();
    assert_eq!(elsewhere(Some(RELAXED)), OK);
    assert_eq!(elsewhere(Some(THREAD_LOCAL)), OK);
    assert_eq!(stream.end_capture(), OK);
    assert_eq!(fake.violations(), Vec::<String>::new());

    stream.begin_capture();
    assert_eq!(elsewhere(None), CAPTURE_UNSUPPORTED);
    assert_eq!(stream.end_capture(), CAPTURE_INVALIDATED);
    assert_eq!(take_violations(&fake).len(), 1);
}

#[test]
fn what_is_captured_is_not_executed_and_an_event_recorded_there_is_noted() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[0; PAGE]), Stream::new(0));
        let (captured, mut status) = (event(0), 0);
        stream.begin_capture();
        let handle = stream.handle();
        assert_eq!(
            cuda!(cuStreamIsCapturing(handle => usize, &mut status => *mut c_uint) -> c_int),
            OK
        );
        assert_eq!(status, 1);
        stream.memset(device.ptr(), 1, PAGE);
        assert_eq!(record(captured, handle), OK);
        assert_eq!(stream.end_capture(), OK);
        assert_eq!(take_violations(&fake), ["event recorded on a stream being captured"]);
        assert_eq!(query(captured), 907);
        assert_eq!((synchronize(handle), device.read()), (OK, vec![0; PAGE]));
        destroy(captured);
    });
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    extern "C" fn calls_back(code: *mut c_int) {
        let mut count = 0;
        let got = cuda!(cuDeviceGetCount(&mut count => *mut c_int) -> c_int);
        // SAFETY: the test waits for this before it looks.
        unsafe { *code = got };
    }
    let fake = Fake::load();
    in_context(|| {
        let (stream, mut code) = (Stream::new(0), OK);
        assert_eq!(
            cuda!(cuLaunchHostFunc(
                stream.handle() => usize,
                calls_back => extern "C" fn(*mut c_int),
                &raw mut code => *mut c_int,
            ) -> c_int),
            OK
        );
        assert_eq!(synchronize(stream.handle()), OK);
        assert_eq!(code, 800);
        assert_eq!(take_violations(&fake).len(), 1);
    });
}

#[test]
fn an_event_tells_the_time_between_two_places() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[0; PAGE]), Stream::new(0));
        let (start, end) = (event(0), event(0));
        let elapsed = || {
            let mut ms = 0f32;
            let code = cuda!(cuEventElapsedTime(
                &mut ms => *mut f32, start => usize, end => usize) -> c_int);
            (code, ms)
        };
        assert_eq!(elapsed().0, INVALID_HANDLE); // never recorded
        fake.slow(2_000_000, 0);
        fake.hold();
        assert_eq!(record(start, stream.handle()), OK);
        stream.memset(device.ptr(), 1, PAGE);
        assert_eq!(record(end, stream.handle()), OK);
        assert_eq!(elapsed().0, NOT_READY);
        fake.release();
        assert_eq!(synchronize(stream.handle()), OK);
        let (code, ms) = elapsed();
        assert!(code == OK && ms >= 2.0, "{code} {ms}");
        destroy(start);
        destroy(end);
    });
}

#[test]
fn a_device_has_only_so_much_memory() {
    let fake = Fake::load();
    in_context(|| {
        let (mut free, mut total, mut device) = (0, 0, 0);
        let code =
            cuda!(cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize) -> c_int);
        assert_eq!((code, free), (OK, total));
        let mut allocate =
            |len| cuda!(cuMemAlloc_v2(&mut device => *mut u64, len => usize) -> c_int);
        assert_eq!(allocate(total + 1), OUT_OF_MEMORY);
        assert_eq!(allocate(total), OK);
        assert_eq!(allocate(1), OUT_OF_MEMORY);
        assert_eq!(cuda!(cuMemFree_v2(device => u64) -> c_int), OK);
        assert_eq!(fake.peak("allocated_bytes"), total as u64);
    });
}

/// `CUDA_MEMCPY2D` of `cuda.h`.
#[repr(C)]
struct Memcpy2d {
    src: End,
    dst: End,
    width: usize,
    height: usize,
}

#[repr(C)]
struct End {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

impl End {
    fn host(address: usize, x: usize, y: usize, pitch: usize) -> Self {
        Self { x, y, memory_type: 1, host: address, device: 0, array: 0, pitch }
    }

    fn device(address: u64, x: usize, y: usize, pitch: usize) -> Self {
        Self { x, y, memory_type: 2, host: 0, device: address, array: 0, pitch }
    }
}

fn copy_2d(src: End, dst: End, width: usize, height: usize, stream: usize) -> c_int {
    let copy = Memcpy2d { src, dst, width, height };
    cuda!(cuMemcpy2DAsync_v2(&copy => *const Memcpy2d, stream => usize) -> c_int)
}

#[test]
fn rows_are_copied_with_their_pitches_and_offsets_in_every_direction() {
    let _fake = Fake::load();
    in_context(|| {
        let bytes: Vec<u8> = (0..100).collect();
        let device = DeviceBuffer::new(0, &bytes); // 10 rows of 10
        let other = DeviceBuffer::new(0, &[0; 64]); // 8 rows of 8
        let (stream, host) = (Stream::new(0), Host::registered(64));
        let handle = stream.handle();
        // 3 rows of 4 from row 2, column 5, to the start; from there to row 1, column 3; to the host.
        let from = End::device(device.ptr(), 5, 2, 10);
        assert_eq!(copy_2d(from, End::device(other.ptr(), 0, 0, 8), 4, 3, handle), OK);
        let from = End::device(other.ptr(), 0, 0, 8);
        assert_eq!(copy_2d(from, End::host(host.address(), 3, 1, 12), 4, 3, handle), OK);
        assert_eq!(synchronize(handle), OK);
        let row = |row: usize| [0, 1, 2, 3].map(|i| host.byte((row + 1) * 12 + 3 + i));
        assert_eq!(
            [row(0), row(1), row(2)],
            [[25, 26, 27, 28], [35, 36, 37, 38], [45, 46, 47, 48]]
        );
        assert_eq!((host.byte(14), host.byte(19)), (0, 0));
        // And back, to row 7, column 6.
        let from = End::host(host.address(), 3, 1, 12);
        assert_eq!(copy_2d(from, End::device(device.ptr(), 6, 7, 10), 4, 3, handle), OK);
        assert_eq!(synchronize(handle), OK);
        assert_eq!(device.read()[96..], [45, 46, 47, 48]);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn rows_wider_than_a_pitch_are_refused_and_rows_outside_of_an_allocation_noted() {
    let fake = Fake::load();
    in_context(|| {
        let (device, stream) = (DeviceBuffer::new(0, &[1; 100]), Stream::new(0));
        let host = Host::registered(200);
        let copy = |x, pitch, width, height| {
            let from = End::device(device.ptr(), x, 0, pitch);
            copy_2d(from, End::host(host.address(), 0, 0, 20), width, height, stream.handle())
        };
        assert_eq!(copy(0, 10, 11, 1), INVALID_VALUE);
        assert_eq!(copy(5, 10, 6, 1), INVALID_VALUE);
        assert_eq!(copy(0, 1 << 31, 6, 1), INVALID_VALUE);
        assert_eq!(copy(0, 10, 0, 5), OK); // nothing
        assert_eq!(fake.violations().len(), 0);
        assert_eq!(copy(0, 12, 4, 9), OK); // the last row ends at its width
        assert_eq!(copy(0, 12, 5, 9), INVALID_VALUE);
        assert_eq!(take_violations(&fake).len(), 1);
        assert_eq!(synchronize(stream.handle()), OK);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn a_pointer_tells_whose_it_is() {
    let _fake = Fake::load();
    in_context(|| {
        let (device, host) = (DeviceBuffer::new(0, &[1; 100]), Host::registered(PAGE));
        let attribute = |which: c_uint, address: u64| {
            let mut value = 0u32;
            let code = cuda!(cuPointerGetAttribute(
                &mut value => *mut u32, which => c_uint, address => u64) -> c_int);
            (code, value)
        };
        const MEMORY_TYPE: c_uint = 2;
        const DEVICE_ORDINAL: c_uint = 9;
        assert_eq!(attribute(MEMORY_TYPE, device.ptr() + 99), (OK, 2));
        assert_eq!(attribute(DEVICE_ORDINAL, device.ptr()), (OK, 0));
        assert_eq!(attribute(MEMORY_TYPE, host.address() as u64), (OK, 1));
        assert_eq!(attribute(MEMORY_TYPE, &raw const device as u64).0, INVALID_VALUE);
        assert_eq!(host.unregister(), OK);
    });
}

/// Runs a test of this binary, one that is ignored otherwise, in a process of its own.
fn in_a_process(test: &str, environment: &[(&str, &str)]) -> ExitStatus {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.envs(environment.iter().copied()).output().unwrap().status
}

#[test]
fn ordinary_code_that_touches_device_memory_crashes_unless_it_is_open() {
    use std::os::unix::process::ExitStatusExt;
    let touched = in_a_process("touch", &[]);
    assert_eq!(touched.signal(), Some(nix::libc::SIGSEGV));
    assert!(in_a_process("touch", &[("FAKE_CUDA_OPEN", "1")]).success());
}

#[test]
#[ignore = "crashes: in_a_process runs it"]
fn touch() {
    let _fake = Fake::load();
    let device = DeviceBuffer::new(0, &[6; 8]);
    let byte: *const u8 = ptr::with_exposed_provenance(device.ptr() as usize);
    // SAFETY: it is mapped; without access it is a signal that ends the process.
    assert_eq!(unsafe { byte.read_volatile() }, 6);
}

#[test]
fn the_child_of_a_fork_has_no_driver() {
    assert!(in_a_process("fork", &[]).success());
}

#[test]
#[ignore = "forks: in_a_process runs it"]
fn fork() {
    let _fake = Fake::load();
    let mut count = 0;
    let count = &raw mut count;
    // SAFETY: the child only calls the driver and exits.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let again = cuda!(cuInit(0 => c_uint) -> c_int);
            let code = cuda!(cuDeviceGetCount(count => *mut c_int) -> c_int);
            // SAFETY: ends the child at once.
            unsafe {
                nix::libc::_exit((again != NOT_INITIALIZED || code != NOT_INITIALIZED).into())
            }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
}

#[test]
fn the_environment_sets_devices_memory_failures_and_the_report() {
    let report = env::temp_dir().join(format!("fake-cuda-{}.json", std::process::id()));
    let environment = [
        ("FAKE_CUDA_DEVICES", "3"),
        ("FAKE_CUDA_DRIVER_VERSION", "13000"),
        ("FAKE_CUDA_MEMORY", "4096"),
        ("FAKE_CUDA_FAIL", "cuDeviceGetCount:1:999,cuMemAlloc_v2:0:2"),
        ("FAKE_CUDA_REPORT", report.to_str().unwrap()),
    ];
    assert!(in_a_process("environment", &environment).success());
    let line = std::fs::read_to_string(&report).unwrap();
    std::fs::remove_file(&report).unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["violations"][0], "event recorded on a stream being captured");
    assert_eq!((&line["live"]["contexts"], &line["live"]["events"]), (&2.into(), &1.into()));
    assert_eq!(line["calls"]["cuDeviceGetCount"], 3);
}

#[test]
#[ignore = "needs an environment: in_a_process sets it"]
fn environment() {
    assert!(!symbol(c"cuInit").is_null()); // loads the library, and no `Fake`: nothing is reset
    let (mut count, mut version, mut device) = (0, 0, 0u64);
    let mut devices = || cuda!(cuDeviceGetCount(&mut count => *mut c_int) -> c_int);
    assert_eq!(devices(), NOT_INITIALIZED);
    assert_eq!(cuda!(cuInit(0 => c_uint) -> c_int), OK);
    assert_eq!((devices(), devices()), (999, OK));
    assert_eq!(count, 3);
    assert_eq!(cuda!(cuDriverGetVersion(&mut version => *mut c_int) -> c_int), OK);
    assert_eq!(version, 13000);
    std::mem::forget(Context::retain(2));
    in_context(|| {
        let mut allocate =
            |len: usize| cuda!(cuMemAlloc_v2(&mut device => *mut u64, len => usize) -> c_int);
        assert_eq!([allocate(1), allocate(4096), allocate(1)], [OUT_OF_MEMORY, OK, OUT_OF_MEMORY]);
        let stream = std::mem::ManuallyDrop::new(Stream::new(0)); // keeps the context
        stream.begin_capture();
        assert_eq!(record(event(0), stream.handle()), OK);
    });
}

#[test]
fn every_function_is_there_by_its_name() {
    let _fake = Fake::load();
    for line in include_str!("../src/api/mod.rs").lines() {
        if let Some(name) = line.trim().strip_prefix("\"cu").and_then(|l| l.strip_suffix("\",")) {
            let name = std::ffi::CString::new(format!("cu{name}")).unwrap();
            assert_ne!(symbol(&name), ptr::null_mut::<c_void>());
        }
    }
}
