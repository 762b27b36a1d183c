//! Device memory and registrations of host memory: how long they live, whose they are.

use super::*;

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
fn a_device_has_only_so_much_memory() {
    let fake = Fake::load();
    in_context(|| {
        let (total, mut device) = (8 << 30, 0);
        let mut allocate =
            |len| cuda!(cuMemAlloc_v2(&mut device => *mut u64, len => usize) -> c_int);
        assert_eq!(allocate(total + 1), OUT_OF_MEMORY);
        assert_eq!(allocate(total), OK);
        assert_eq!(allocate(1), OUT_OF_MEMORY);
        assert_eq!(cuda!(cuMemFree_v2(device => u64) -> c_int), OK);
        assert_eq!(fake.peak("allocated_bytes"), total as u64);
    });
}

#[test]
fn a_pointer_tells_whose_it_is() {
    let _fake = Fake::load();
    in_context(|| {
        let (device, host) = (DeviceBuffer::new(0, &[1; 100]), Host::registered(PAGE));
        let ordinal_at = |address: u64| {
            let mut value = 9u32;
            let code = cuda!(cuPointerGetAttribute(
                &mut value => *mut u32, 9 => c_uint, address => u64) -> c_int);
            (code, value)
        };
        assert_eq!(ordinal_at(device.ptr() + 99), (OK, 0));
        assert_eq!(ordinal_at(host.address() as u64), (OK, 0));
        assert_eq!(ordinal_at(&raw const device as u64).0, INVALID_VALUE);
        assert_eq!(host.unregister(), OK);
    });
}

#[test]
fn devices_are_as_many_as_a_test_wants_and_have_memory_of_their_own() {
    let fake = Fake::load();
    fake.devices(2);
    let (one, other) = (DeviceBuffer::new(0, &[1; PAGE]), DeviceBuffer::new(1, &[2; PAGE]));
    assert_eq!((one.read(), other.read()), (vec![1; PAGE], vec![2; PAGE]));
    let (foreign, mut ordinal) = (Stream::new(1), 9);
    in_context(|| {
        let host = Host::pageable(PAGE);
        assert_eq!(to_host(host.address(), one.ptr(), PAGE, foreign.handle()), INVALID_HANDLE);
        let mine = event(0);
        assert_eq!(record(mine, foreign.handle()), INVALID_HANDLE);
        destroy(mine);
    });
    fake.reset();
    let code = cuda!(cuDeviceGet(&mut ordinal => *mut c_int, 1 => c_int) -> c_int);
    assert_eq!((code, ordinal), (101, 9));
    fake.devices(2); // for what is dropped now
}
