//! Copies: when host memory is touched, and what is refused.

use super::*;
use std::sync::mpsc;
use std::thread;

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
        assert_eq!(synchronize(stream.handle()), OK);
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
