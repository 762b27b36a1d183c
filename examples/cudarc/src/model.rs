//! Weights and Adam's moments in a GPU's memory.
#![allow(unsafe_code)] // writing to memory that a save holds a share of

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError, result};
use ringstow::Target;
use ringstow::{Checkpoint, Dtype, LoadOptions, SaveHandle, StateDict, Value};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

/// Numbers of a layer.
const SIDE: usize = 512;
const NUMBERS: usize = SIDE * SIDE;
/// Numbers that a step changes of each tensor.
const STRIDE: usize = NUMBERS / 8;

/// A tensor by its name. A save has a share of it while it runs.
struct Tensor {
    name: String,
    slice: Arc<CudaSlice<f32>>,
}

/// The trainer's state, all on one stream.
pub struct Model {
    /// Steps trained.
    pub step: u64,
    stream: Arc<CudaStream>,
    tensors: Vec<Tensor>,
    gradient: CudaSlice<f32>,
}

impl Model {
    /// All zeros, at step 0.
    pub fn new(stream: Arc<CudaStream>, layers: usize) -> Result<Self, DriverError> {
        let kinds = ["weight", "exp_avg", "exp_avg_sq"];
        let names = (0..layers).flat_map(|n| kinds.map(|kind| format!("layer.{n}.{kind}")));
        let zeros = |name| Ok(Tensor { name, slice: Arc::new(stream.alloc_zeros(NUMBERS)?) });
        let tensors = names.map(zeros).collect::<Result<_, DriverError>>()?;
        let gradient = stream.alloc_zeros(NUMBERS)?;
        Ok(Self { step: 0, stream, tensors, gradient })
    }

    /// One step: a gradient comes in, moves the moments, which move the weights. Only copies, each
    /// depending on those before, where a trainer would launch kernels.
    ///
    /// Not to be called between the start of a save and the end of its staging.
    pub fn train(&mut self) -> Result<(), DriverError> {
        self.stream.memcpy_htod(&gradient(self.step), &mut self.gradient)?;
        let at = |turns: u64| (turns as usize % 8) * STRIDE;
        for layer in self.tensors.chunks(3) {
            let [weight, mean, square] = [0, 1, 2].map(|i| &*layer[i].slice);
            self.copy((&self.gradient, at(self.step)), (mean, at(3 * self.step)))?;
            self.copy((mean, at(self.step / 2)), (square, at(5 * self.step)))?;
            self.copy((square, at(self.step / 3)), (weight, at(self.step)))?;
        }
        self.step += 1;
        Ok(())
    }

    /// Has the stream copy a run of numbers from one slice to another, as a kernel would write.
    fn copy(
        &self,
        (from, first): (&CudaSlice<f32>, usize),
        (to, start): (&CudaSlice<f32>, usize),
    ) -> Result<(), DriverError> {
        const BYTES: usize = size_of::<f32>();
        let base = |slice: &CudaSlice<f32>| slice.device_ptr(&self.stream).0;
        let (from, to) = (base(from) + (first * BYTES) as u64, base(to) + (start * BYTES) as u64);
        // SAFETY: both runs lie within their slices, which are this model's and used on this stream
        // alone; a save that has a share of them has been staged by now.
        unsafe { result::memcpy_dtod_async(to, from, STRIDE * BYTES, self.stream.cu_stream()) }
    }

    /// Starts saving into a directory of checkpoints. Returns at once: what is saved is what the
    /// tensors hold when all that is on the stream now has ended.
    pub fn save(&self, dir: &Path) -> ringstow::Result<SaveHandle> {
        let mut state = StateDict::new();
        let shape = [SIDE as u64, SIDE as u64];
        for Tensor { name, slice } in &self.tensors {
            state.cuda(name, Dtype::F32, &shape, slice.clone())?;
        }
        state.value("step", self.step as i64);
        ringstow::save_async(state, dir.join(format!("step-{:08}", self.step)))
    }

    /// Loads a checkpoint into the tensors' memory, and makes sure that it is there bit for bit.
    pub fn resume(&mut self, path: &Path) -> Result<(), Box<dyn Error>> {
        let checkpoint = Checkpoint::open(path)?;
        let targets = self.tensors.iter_mut().map(|Tensor { name, slice }| {
            let slice = Arc::get_mut(slice).expect("no save is in progress");
            Ok((&*name, Target::of_slice(slice)?))
        });
        let targets = targets.collect::<ringstow::Result<Vec<_>>>()?;
        checkpoint.load_into(&targets, LoadOptions::default())?;
        drop(targets);
        self.step = match checkpoint.state()?.get("step") {
            Some(Value::Int(step)) => u64::try_from(*step)?,
            other => return Err(format!("the checkpoint's step is {other:?}").into()),
        };
        self.compare(&ringstow::load(path)?)
    }

    /// The tensors' bits beside those of the checkpoint in host memory.
    fn compare(&self, loaded: &ringstow::Loaded) -> Result<(), Box<dyn Error>> {
        for Tensor { name, slice } in &self.tensors {
            let view = loaded.tensor(name).ok_or_else(|| format!("{name} was not saved"))?;
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            if bits(view.as_slice()?) != bits(&self.stream.clone_dtoh(&**slice)?) {
                return Err(format!("{name} on the GPU is not what was saved").into());
            }
        }
        Ok(())
    }

    /// A checksum of all tensors' bits.
    pub fn crc32(&self) -> Result<u32, DriverError> {
        let mut hasher = crc32fast::Hasher::new();
        for Tensor { slice, .. } in &self.tensors {
            for number in self.stream.clone_dtoh(&**slice)? {
                hasher.update(&number.to_bits().to_le_bytes());
            }
        }
        Ok(hasher.finalize())
    }
}

/// The gradient of a step, the same in every run (xorshift).
fn gradient(step: u64) -> Vec<f32> {
    let mut x = (step + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(NUMBERS).collect()
}
