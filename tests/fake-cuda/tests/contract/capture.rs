//! Captures, and what they forbid.

use super::*;
use std::thread;

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
