//! Memory of a GPU's, to save from and to load into, and how fast it can be copied at most.

use super::Spread;
use super::measure::{TENSOR_BYTES, spread};
use crate::config::Config;
use crate::device::Target;
use crate::device::cuda::{Device, DeviceMemory, LargeCopy, Rates, Ready, measure};
use crate::engine::null::Null;
use crate::error::Result;
use crate::format::{Dtype, TensorInfo};
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::state::StateDict;
use crate::store::save;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// One large copy's bytes.
const COPIED_BYTES: usize = 256 << 20;

/// What a GPU's copies reach, whatever the disk does.
#[derive(Debug, Serialize)]
pub(super) struct GpuFigures {
    pub ordinal: u32,
    pub name: String,
    /// One large copy at a time.
    pub copies_gb_per_s: Rates,
    /// A save whose writes go nowhere: GB/s from its first byte copied to its last one "written".
    pub to_nowhere_gb_per_s: Spread,
    /// That, of one large copy into pinned memory within the same round. `None` if nothing is pinned.
    pub to_nowhere_of_large_copy: Option<Spread>,
}

/// Tensors in a GPU's memory.
pub(super) struct GpuTensors {
    device: Arc<Device>,
    /// Shared with the sources of a save only while it runs.
    tensors: Vec<Arc<DeviceMemory>>,
}

impl GpuTensors {
    /// None yet, of a GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) without a driver, [`Error::Gpu`](crate::Error::Gpu)
    /// without this GPU.
    pub fn on(ordinal: u32) -> Result<Self> {
        Ok(Self { device: Device::get(ordinal)?, tensors: Vec::new() })
    }

    /// Takes the GPU's memory for tensors of this data.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if it has not so much.
    pub fn fill(&mut self, data: &[u8]) -> Result<()> {
        for bytes in data.chunks(TENSOR_BYTES) {
            let mut memory = DeviceMemory::new(&self.device, bytes.len())?;
            memory.fill(bytes)?;
            self.tensors.push(Arc::new(memory));
        }
        Ok(())
    }

    /// As a state to be saved, of as many bytes at most.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn state(&self, bytes_max: usize) -> Result<StateDict<'static>> {
        let (mut state, mut ready) = (StateDict::new(), Ready::default());
        let count = bytes_max.div_ceil(TENSOR_BYTES).min(self.tensors.len());
        for (number, memory) in self.tensors[..count].iter().enumerate() {
            let shape = vec![memory.nbytes() as u64];
            let info = TensorInfo { name: format!("tensor.{number}"), dtype: Dtype::U8, shape };
            state.source(info, Box::new(memory.source(&mut ready)?));
        }
        Ok(state)
    }

    /// As memory to load into.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn targets(&mut self) -> Result<Vec<(String, Target<'_>)>> {
        let mut ready = Ready::default();
        let targets = self.tensors.iter_mut().enumerate().map(|(number, memory)| {
            let memory = Arc::get_mut(memory).expect("no save is under way");
            Ok((format!("tensor.{number}"), memory.target(&mut ready)?))
        });
        targets.collect()
    }

    /// Measures large copies, and saves to nowhere beside them, with files in `path`.
    ///
    /// # Errors
    /// When the driver or the directory refuses.
    pub fn figures(&self, config: &Config, path: &Path, rounds: u16) -> Result<GpuFigures> {
        let copies_gb_per_s = measure(&self.device, COPIED_BYTES)?;
        let mut large = LargeCopy::new(&self.device, COPIED_BYTES)?;
        let is_pinned = copies_gb_per_s.to_host_pinned.is_some();
        if is_pinned {
            large.pin()?;
        }
        let depth = config.queue_depth as usize;
        let nowhere =
            Runtime::with_engine(config.clone(), Arc::new(move || Ok(Box::new(Null::new(depth)))))?;
        self.save_to(&nowhere, path)?; // takes and pins the pool
        let (mut rates, mut ratios) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let rate = self.save_to(&nowhere, path)?;
            rates.push(rate);
            ratios.push(rate / large.to_host()?);
        }
        Ok(GpuFigures {
            ordinal: self.device.ordinal(),
            name: self.device.name().into(),
            copies_gb_per_s,
            to_nowhere_gb_per_s: spread(rates.into_iter()).expect("one round at least"),
            to_nowhere_of_large_copy: spread(ratios.into_iter().filter(|_| is_pinned)),
        })
    }

    /// GB/s of a save through an engine that writes nothing.
    fn save_to(&self, nowhere: &Runtime, path: &Path) -> Result<f64> {
        let report = save(nowhere, &self.state(usize::MAX)?, path, &Arc::<Job>::default())?;
        super::measure::clear(path, nowhere.config())?;
        Ok(report.moved.device_bytes as f64 / 1e9 / report.seconds.write.max(1e-9))
    }
}
