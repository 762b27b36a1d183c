//! Failures: injected ones, and those for want of a context.

use super::*;
use std::ffi::c_void;
use std::ptr;

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
fn every_function_is_there_by_its_name() {
    let _fake = Fake::load();
    for line in include_str!("../../src/api/mod.rs").lines() {
        if let Some(name) = line.trim().strip_prefix("\"cu").and_then(|l| l.strip_suffix("\",")) {
            let name = std::ffi::CString::new(format!("cu{name}")).unwrap();
            assert_ne!(symbol(&name), ptr::null_mut::<c_void>());
        }
    }
}
