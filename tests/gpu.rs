//! Tensors on a real GPU. Where there is none these tests say so and pass; with `RINGSTOW_REAL_GPU`
//! set they fail instead. They never load the fake driver: `tests/cuda.rs` shows what order, errors and
//! lifetimes are like over that.

#![cfg(feature = "cuda")]
#![allow(unsafe_code)] // addresses of a GPU's memory

mod common;

use common::noise;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use ringstow::internals::{
    device::cuda::{CudaSource, Device, DeviceMemory, Pin, Ready, measure},
    pool::Pool,
    store::save,
};
use ringstow::{
    Checkpoint, Config, Dtype, Error, LoadOptions, Runtime, SaveReport, Slice, StateDict,
    StridedTarget, Target, TensorInfo,
};
use std::path::Path;
use std::sync::Arc;

/// The GPUs' numbers; none, with a message, where there are none.
fn gpus() -> std::ops::Range<u32> {
    let why = match Device::count() {
        Ok(count) if count > 0 => return 0..count,
        Ok(_) => "no GPU".to_owned(),
        Err(error) => error.to_string(),
    };
    assert!(std::env::var_os("RINGSTOW_REAL_GPU").is_none(), "there should be a GPU: {why}");
    eprintln!("skipped: {why}");
    0..0
}

fn stream(gpu: u32) -> Arc<CudaStream> {
    CudaContext::new(gpu as usize).unwrap().new_stream().unwrap()
}

/// Blocks and a pool small enough that a few megabytes go round it many times.
fn runtime() -> Runtime {
    let config = Config { block_bytes: 256 << 10, pool_bytes: 2 << 20, ..Config::default() };
    Runtime::new(config).unwrap()
}

fn save_slices(tensors: &[(&str, &CudaSlice<u8>)], path: &Path) -> SaveReport {
    let mut state = StateDict::new();
    for (name, slice) in tensors {
        state.cuda(*name, Dtype::U8, &[slice.len() as u64], *slice).unwrap();
    }
    save(&runtime(), &state, path, &Arc::default()).unwrap()
}

fn loaded(path: &Path, name: &str) -> Vec<u8> {
    ringstow::load(path).unwrap().tensor(name).unwrap().data().to_vec()
}

#[test]
fn what_a_gpu_has_is_saved_and_loaded_bit_for_bit() {
    for gpu in gpus() {
        let (root, stream) = (tempfile::tempdir().unwrap(), stream(gpu));
        let path = root.path().join("ckpt");
        // A byte, packed with others, split over many blocks.
        let data = [1, 4097, 9 << 20].map(|len| noise(u64::from(gpu), len));
        let slices = data.each_ref().map(|bytes| stream.clone_htod(bytes).unwrap());
        let names = ["one", "packed", "split"];
        let tensors: Vec<_> = names.iter().copied().zip(&slices).collect();
        let report = save_slices(&tensors, &path);
        assert_eq!(report.moved.device_bytes, report.tensor_bytes);
        assert_eq!(report.moved.pinned, Some(true), "{:?}", report.moved.fallbacks);
        assert!(report.seconds.device_copy > 0.0);
        for (name, bytes) in names.iter().zip(&data) {
            assert_eq!(&loaded(&path, name), bytes, "{name} from GPU {gpu}");
        }

        let mut back = stream.alloc_zeros::<u8>(9 << 20).unwrap();
        let targets = [("split", Target::of_slice(&mut back).unwrap())];
        let checkpoint = Checkpoint::open(&path).unwrap();
        let report = checkpoint
            .load_into(&targets, LoadOptions::default().on(&runtime(), &Arc::default()))
            .unwrap();
        drop(targets);
        assert_eq!(report.moved.device_bytes, 9 << 20);
        assert_eq!(stream.clone_dtoh(&back).unwrap(), data[2]);
    }
}

#[test]
fn strided_gpu_tensors_match_a_gather_on_the_host() {
    const ROWS: usize = 300;
    const COLUMNS: usize = 500;
    for gpu in gpus().take(1) {
        let (root, stream) = (tempfile::tempdir().unwrap(), stream(gpu));
        let path = root.path().join("ckpt");
        let bytes = noise(3, ROWS * COLUMNS * 4);
        let slice = stream.clone_htod(&bytes).unwrap();
        let base = slice.device_ptr(&stream).0;
        // Transposed, every other column, rows backwards: strides in bytes, from a first element.
        let row = (COLUMNS * 4) as isize;
        let layouts: [(&str, usize, [usize; 2], [isize; 2]); 3] = [
            ("transposed", 0, [COLUMNS, ROWS], [4, row]),
            ("columns", 4, [ROWS, COLUMNS / 2], [row, 8]),
            ("backwards", (ROWS - 1) * COLUMNS * 4, [ROWS, COLUMNS], [-row, 4]),
        ];
        let (mut state, mut ready) = (StateDict::new(), Ready::default());
        for (name, first, shape, strides) in &layouts {
            let layout = (4, &shape[..], Some(&strides[..]));
            let place = (gpu, base + *first as u64);
            // SAFETY: all elements lie in the slice, which nobody writes to; its own stream.
            let source =
                unsafe { CudaSource::new(place, layout, stream.cu_stream() as usize, &mut ready) };
            let shape = shape.iter().map(|&dim| dim as u64).collect();
            let info = TensorInfo { name: (*name).into(), dtype: Dtype::F32, shape };
            state.source(info, source.unwrap());
        }
        save(&runtime(), &state, &path, &Arc::default()).unwrap();

        for (name, first, shape, strides) in &layouts {
            assert_eq!(loaded(&path, name), gather(&bytes, *first, shape, strides), "{name}");
        }
        let back = stream.alloc_zeros::<u8>(bytes.len()).unwrap();
        let base = back.device_ptr(&stream).0;
        let handle = stream.cu_stream() as usize;
        // SAFETY: a slice as large, which nobody else uses; its own stream.
        let target = unsafe {
            StridedTarget::cuda((gpu, base), vec![4, row], handle, &mut Ready::default()).unwrap()
        };
        let (offsets, lengths) = (&[0, 0], &[COLUMNS as u64, ROWS as u64]);
        let boxed = Slice { name: "transposed", chunk: 0, offsets, lengths, to: target };
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.read(&[boxed], LoadOptions::default().on(&runtime(), &Arc::default())).unwrap();
        assert_eq!(stream.clone_dtoh(&back).unwrap(), bytes, "transposed twice");
    }
}

/// The dense bytes of a tensor of 4-byte elements.
fn gather(bytes: &[u8], first: usize, shape: &[usize; 2], strides: &[isize; 2]) -> Vec<u8> {
    let mut dense = Vec::with_capacity(shape[0] * shape[1] * 4);
    for i in 0..shape[0] as isize {
        for j in 0..shape[1] as isize {
            let at = (first as isize + i * strides[0] + j * strides[1]) as usize;
            dense.extend_from_slice(&bytes[at..at + 4]);
        }
    }
    dense
}

#[test]
fn save_holds_the_streams_work_up_to_the_call() {
    for gpu in gpus().take(1) {
        let (root, stream) = (tempfile::tempdir().unwrap(), stream(gpu));
        let path = root.path().join("ckpt");
        let mut busy = stream.alloc_zeros::<u8>(256 << 20).unwrap();
        let slice = Arc::new(stream.clone_htod(&noise(1, 8 << 20)).unwrap());
        let set = |value: u8| {
            let base = slice.device_ptr(&stream).0;
            // SAFETY: within the slice, on its own stream; a save of it has been staged.
            unsafe {
                cudarc::driver::result::memset_d8_async(
                    base,
                    value,
                    slice.len(),
                    stream.cu_stream(),
                )
            }
            .unwrap();
        };
        // Work that takes a while, and what is to be saved behind it.
        for _ in 0..100 {
            stream.memset_zeros(&mut busy).unwrap();
        }
        set(7);
        let mut state = StateDict::new();
        state.cuda("weight", Dtype::U8, &[8 << 20], slice.clone()).unwrap();
        let config = Config { pool_bytes: 16 << 20, ..Config::default() };
        let saving =
            ringstow::Store::new(config.clone()).unwrap().save_async(state, &path).unwrap();
        assert!(saving.wait_staged(None));
        set(9);
        saving.result().unwrap();
        assert!(loaded(&path, "weight").iter().all(|&byte| byte == 7));
        assert!(stream.clone_dtoh(&*slice).unwrap().iter().all(|&byte| byte == 9));
    }
}

#[test]
fn host_memory_is_pinned_once_and_then_released() {
    for gpu in gpus().take(1) {
        let device = Device::get(gpu).unwrap();
        let pool = Pool::new(160, 1 << 20).unwrap();
        // SAFETY: the pool outlives the pins.
        let pin = || unsafe { Pin::new(&device, pool.base(), pool.bytes(), 1 << 20) };
        let first = pin().unwrap();
        let error = pin().unwrap_err();
        assert!(matches!(error, Error::Gpu { .. }), "{error}");
        drop(first);
        drop(pin().unwrap());
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named_with_a_remedy() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let error = Device::get(gpus.end).unwrap_err();
    let named = matches!(error, Error::Gpu { device, .. } if device == gpus.end);
    assert!(named && error.to_string().contains("nvidia-smi"), "{error}");
    assert_eq!(Device::list().unwrap().len(), gpus.len());
}

#[test]
fn memory_and_copies_of_each_gpu_can_be_had() {
    for gpu in gpus() {
        let device = Device::get(gpu).unwrap();
        let bytes = noise(5, 3 << 20);
        let mut memory = DeviceMemory::new(&device, bytes.len()).unwrap();
        memory.fill(&bytes).unwrap();
        assert_eq!(memory.to_vec().unwrap(), bytes);
        let rates = measure(&device, 32 << 20).unwrap();
        assert!(rates.to_host_pinned.is_some_and(|rate| rate > 0.0), "{rates:?}");
        assert!(rates.to_device_pinned.is_some_and(|rate| rate > 0.0), "{rates:?}");
    }
}
