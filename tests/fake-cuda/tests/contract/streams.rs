//! Streams, events, the default stream, host functions: what runs when.

use super::*;

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
        assert_eq!(host.byte(0), 0);
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
