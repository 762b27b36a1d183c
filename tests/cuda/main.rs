//! GPU tensors over the fake driver (`tests/fake-cuda`): the code that runs on a real one, unchanged.
#![cfg(all(target_os = "linux", feature = "cuda"))]
#![allow(unsafe_code)] // device memory is addresses

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod failures;
#[path = "../common/fake_cuda.rs"]
mod fake_cuda;
#[allow(dead_code)] // its `main` and what that prints
#[path = "../../benches/gpu.rs"]
mod gpu_bench;
mod loads;
mod ordering;
mod saves;

use common::warnings::Warnings;
use common::{noise, on};
use fake_cuda::{DeviceBuffer, Fake, Stream};
use ringstow::internals::device::cuda::{CudaSource, Ready};
use ringstow::{Config, Dtype, Loaded, Runtime, SaveReport, StateDict, Store, Target, TensorInfo};
use std::path::Path;
use std::sync::Arc;

/// The fake driver with two devices, for one test.
fn fake() -> Fake {
    let fake = Fake::load();
    Runtime::release_shared(); // what a test before has pinned
    fake.devices(2);
    fake
}

/// Mends what was to fail, and forgets violations.
fn mend(fake: &Fake) {
    fake.reset();
    fake.devices(2);
}

/// A tensor in a device's memory, of which there is a copy here.
struct Tensor {
    name: String,
    ordinal: u32,
    memory: DeviceBuffer,
    item: usize,
    shape: Vec<usize>,
    /// In bytes; none: dense.
    strides: Option<Vec<isize>>,
    /// Bytes from the memory's first to the first element's.
    first: usize,
    bytes: Vec<u8>,
}

impl Tensor {
    /// Dense bytes.
    fn dense(name: &str, ordinal: u32, bytes: Vec<u8>) -> Self {
        Self::strided(name, ordinal, bytes.clone(), 1, &[bytes.len()], None)
    }

    /// Some of the memory's elements.
    fn strided(
        name: &str,
        ordinal: u32,
        bytes: Vec<u8>,
        item: usize,
        shape: &[usize],
        strides: Option<&[isize]>,
    ) -> Self {
        Self {
            name: name.into(),
            ordinal,
            memory: DeviceBuffer::new(ordinal as usize, &bytes),
            item,
            shape: shape.to_vec(),
            strides: strides.map(<[isize]>::to_vec),
            first: 0,
            bytes,
        }
    }

    fn info(&self) -> TensorInfo {
        let dtype = [Dtype::U8, Dtype::F16, Dtype::F32, Dtype::F64][self.item.ilog2() as usize];
        let shape = self.shape.iter().map(|&dim| dim as u64).collect();
        TensorInfo { name: self.name.clone(), dtype, shape }
    }

    /// To be saved, ready when what is on the stream now has ended.
    fn source(&self, stream: usize, ready: &mut Ready) -> CudaSource<'static> {
        let base = self.memory.ptr() + self.first as u64;
        let layout = (self.item, self.shape.as_slice(), self.strides.as_deref());
        // SAFETY: the test keeps the memory, and writes to it only to see what becomes of that.
        unsafe { CudaSource::new((self.ordinal, base), layout, stream, ready) }.unwrap()
    }

    /// Its memory, to be loaded into; ready when what is on the stream now has ended.
    fn target(&self, streams: &[Stream], ready: &mut Ready) -> Target<'_> {
        let place = (self.ordinal, self.memory.ptr());
        let stream = streams[self.ordinal as usize].handle();
        // SAFETY: the tensor's own memory.
        unsafe { Target::cuda(place, self.memory.len(), stream, ready) }.unwrap()
    }

    /// Its elements in row-major order, one by one.
    fn expected(&self) -> Vec<u8> {
        let dense: Vec<isize> = (0..self.shape.len())
            .map(|dim| (self.shape[dim + 1..].iter().product::<usize>() * self.item) as isize)
            .collect();
        let strides = self.strides.as_ref().unwrap_or(&dense);
        let mut elements = Vec::new();
        for mut index in 0..self.shape.iter().product() {
            let mut at = self.first as isize;
            for dim in (0..self.shape.len()).rev() {
                at += (index % self.shape[dim]) as isize * strides[dim];
                index /= self.shape[dim];
            }
            elements.extend_from_slice(&self.bytes[at as usize..at as usize + self.item]);
        }
        elements
    }
}

/// A state of these tensors, each ready on a stream of its device's.
fn state_of(tensors: &[Tensor], streams: &[Stream]) -> StateDict<'static> {
    let (mut state, mut ready) = (StateDict::new(), Ready::default());
    for tensor in tensors {
        let stream = streams[tensor.ordinal as usize].handle();
        state.source(tensor.info(), tensor.source(stream, &mut ready));
    }
    state
}

fn streams() -> [Stream; 2] {
    [Stream::new(0), Stream::new(1)]
}

/// Small blocks, so that little data makes many copies.
fn config() -> Config {
    Config { block_bytes: 64 << 10, pool_bytes: 16 * (64 << 10), fillers: 3, ..Config::default() }
}

fn assert_holds(loaded: &Loaded, tensors: &[Tensor]) {
    for tensor in tensors {
        let got = loaded.tensor(&tensor.name).unwrap().data();
        assert!(got == tensor.expected(), "{} came back changed", tensor.name);
    }
}

/// Saves tensors that are ready, and checks what is in the files.
fn saved(path: &Path, tensors: &[Tensor], config: &Config) -> SaveReport {
    let store = Store::new(config.clone()).unwrap();
    let report = store.save(&state_of(tensors, &streams()), path).unwrap();
    assert_holds(&ringstow::load(path).unwrap(), tensors);
    report
}

fn store() -> Store {
    Store::new(config()).unwrap()
}

/// A runtime of the test's own, which goes with it.
fn runtime() -> Arc<Runtime> {
    Arc::new(Runtime::new(config()).unwrap())
}
