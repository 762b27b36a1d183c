//! Copies of rows with a pitch.

use super::*;

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
