//! What is in the files comes to be on a GPU.

use super::*;
use ringstow::{Checkpoint, LoadReport, Slice, StridedTarget};

/// Loads a tensor into device memory, ready on its device's stream.
pub fn load_into(path: &Path, tensor: &Tensor, streams: &[Stream]) -> LoadReport {
    let mut ready = Ready::default();
    let target = tensor.target(streams, &mut ready);
    let checkpoint = Checkpoint::open(path).unwrap();
    checkpoint.load_into(&[(&tensor.name, target)], on(&runtime())).unwrap()
}

#[test]
fn a_checkpoint_is_loaded_into_memory_of_both_devices() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let saved: Vec<Tensor> = (0..40u32)
        .map(|i| Tensor::dense(&format!("t{i}"), i % 2, noise(i.into(), 1 + 7919 * i as usize)))
        .collect();
    super::saved(dir.path(), &saved, &config());
    let streams = streams();
    let to: Vec<Tensor> = saved
        .iter()
        .map(|t| Tensor::dense(&t.name, 1 - t.ordinal, vec![0; t.bytes.len()]))
        .collect();
    let mut ready = Ready::default();
    let targets: Vec<(&str, Target)> =
        to.iter().map(|to| (&*to.name, to.target(&streams, &mut ready))).collect();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let report = checkpoint.load_into(&targets, on(&runtime())).unwrap();
    for (to, from) in to.iter().zip(&saved) {
        assert!(to.memory.read() == from.bytes, "{} came back changed", to.name);
    }
    assert_eq!((report.moved.device_bytes, report.moved.pinned), (report.tensor_bytes, Some(true)));
    assert_eq!(fake.calls("default-stream-copies"), 0);
    assert_eq!(fake.calls("cuCtxSynchronize") + fake.calls("cuStreamSynchronize"), 0);
}

#[test]
fn load_waits_for_the_targets_stream() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(1, 200_000);
    super::saved(dir.path(), &[Tensor::dense("weight", 0, bytes.clone())], &config());
    let streams = streams();
    let to = Tensor::dense("weight", 0, vec![0; bytes.len()]);
    let busy = streams[0].gate();
    streams[0].memset(to.memory.ptr(), 9, bytes.len());
    let before = fake.calls("cuMemcpyHtoDAsync_v2");
    std::thread::scope(|scope| {
        scope.spawn(|| load_into(dir.path(), &to, &streams));
        while fake.calls("cuMemcpyHtoDAsync_v2") == before {
            std::thread::yield_now();
        }
        busy.open();
    });
    assert!(to.memory.read() == bytes);
}

#[test]
fn boxes_go_into_strided_device_memory() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(1, 4 * 200 * 100);
    let whole = Tensor::strided("matrix", 0, bytes.clone(), 4, &[200, 100], None);
    super::saved(dir.path(), &[whole], &config());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let streams = streams();
    // Columns 10 to 59 of rows 20 to 119: into wider rows, turned round, and with rows backwards.
    for (strides, first) in [([400, 4], 8), ([4, 400], 8), ([-400, 4], 99 * 400 + 8)] {
        let to = Tensor::dense("to", 0, vec![0xaa; 100 * 400 + 400]);
        let mut ready = Ready::default();
        let base = (0, to.memory.ptr() + first as u64);
        // SAFETY: the box lies in the memory at these strides.
        let target =
            unsafe { StridedTarget::cuda(base, strides.to_vec(), streams[0].handle(), &mut ready) };
        let to_here = target.unwrap();
        let (name, offsets, lengths) = ("matrix", &[20, 10][..], &[100, 50][..]);
        let slice = Slice { name, chunk: 0, offsets, lengths, to: to_here };
        checkpoint.read(&[slice], on(&runtime())).unwrap();
        let mut expected = vec![0xaa; to.memory.len()];
        for row in 0..100usize {
            for column in 0..50usize {
                let at = first as isize + row as isize * strides[0] + column as isize * strides[1];
                let from = 4 * ((20 + row) * 100 + 10 + column);
                expected[at as usize..at as usize + 4].copy_from_slice(&bytes[from..from + 4]);
            }
        }
        assert!(to.memory.read() == expected, "strides {strides:?}");
    }
}
