//! Memory of a GPU's, and how fast it is copied: for benches, the doctor and tests.

use super::copies::{Copies, RowCopy};
use super::device::{Device, Direction, Ready, StreamHandle};
use super::driver::{checked, failed};
use super::pin::Pin;
use super::source::CudaSource;
use crate::device::Target;
use crate::error::{Error, Result};
use crate::pool::Mapping;
use cudarc::driver::result;
use std::sync::Arc;
use std::time::Instant;

/// Dense memory of a GPU's, zeroed. Freed when this is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    base: u64,
    nbytes: usize,
}

/// The legacy default stream, on which this memory is made ready.
const DEFAULT_STREAM: StreamHandle = 1;

impl DeviceMemory {
    /// Takes `nbytes` of a GPU's memory.
    ///
    /// # Errors
    /// [`Error::Gpu`], when it has not so much.
    pub fn new(device: &Arc<Device>, nbytes: usize) -> Result<Self> {
        const DOING: &str = "taking memory of";
        let _current = device.enter(DOING)?;
        let gpu = |error| failed(error, DOING, device.ordinal());
        // SAFETY: plain allocation; freed by `drop`.
        let base = unsafe { result::malloc_sync(nbytes.max(1)) }.map_err(gpu)?;
        let memory = Self { device: device.clone(), base, nbytes };
        // SAFETY: just allocated.
        unsafe { result::memset_d8_sync(base, 0, nbytes) }.map_err(gpu)?;
        Ok(memory)
    }

    /// How many bytes it has.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Its bytes as a tensor's, to be saved.
    ///
    /// # Errors
    /// As for [`CudaSource::new`].
    pub fn source(self: &Arc<Self>, ready: &mut Ready) -> Result<CudaSource<'static>> {
        let shape = [self.nbytes];
        let layout = (1, shape.as_slice(), None);
        // SAFETY: the memory is kept by the source, and there is no safe way to write to it but
        // `target`, which borrows it alone.
        let source = unsafe {
            CudaSource::new((self.device.ordinal(), self.base), layout, DEFAULT_STREAM, ready)
        }?;
        Ok(source.keeping(self.clone()))
    }

    /// Its bytes as a tensor's, to be loaded into.
    ///
    /// # Errors
    /// As for [`Target::cuda`].
    pub fn target(&mut self, ready: &mut Ready) -> Result<Target<'_>> {
        // SAFETY: borrowed alone for as long as the target lives.
        unsafe {
            Target::cuda((self.device.ordinal(), self.base), self.nbytes, DEFAULT_STREAM, ready)
        }
    }

    /// A copy in host memory.
    ///
    /// # Errors
    /// [`Error::Gpu`] when the driver refuses.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let _current = self.device.enter(Direction::ToHost.doing())?;
        let mut bytes = vec![0u8; self.nbytes];
        // SAFETY: as many bytes on either side.
        let copied = unsafe { result::memcpy_dtoh_sync(&mut bytes, self.base) };
        checked(copied, Direction::ToHost.doing(), self.device.ordinal()).map(|()| bytes)
    }

    /// Overwrites it with bytes of the host's, as many.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more or fewer; [`Error::Gpu`] when the driver refuses.
    pub fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.nbytes {
            let (got, room) = (bytes.len(), self.nbytes);
            return Err(Error::invalid(format!("{got} bytes do not fill {room} of a GPU's")));
        }
        let _current = self.device.enter(Direction::ToDevice.doing())?;
        // SAFETY: as many bytes on either side.
        let copied = unsafe { result::memcpy_htod_sync(self.base, bytes) };
        checked(copied, Direction::ToDevice.doing(), self.device.ordinal())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter("freeing memory of") {
            // SAFETY: allocated by `new`; who copies keeps this.
            let _ = unsafe { result::free_sync(self.base) };
        }
    }
}

/// How fast a GPU copies, in GB/s (10^9): one large copy at a time, the best of a few.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Rates {
    /// From the GPU into pinned memory; `None` if the driver pins none.
    pub to_host_pinned: Option<f64>,
    /// From the GPU into ordinary memory.
    pub to_host_pageable: f64,
    /// From pinned memory to the GPU.
    pub to_device_pinned: Option<f64>,
    /// From ordinary memory to the GPU.
    pub to_device_pageable: f64,
}

/// Measures a GPU's copies of `nbytes`, for about a second.
///
/// # Errors
/// [`Error::Gpu`] or [`Error::Io`] where there is not so much memory.
pub fn measure(device: &Arc<Device>, nbytes: usize) -> Result<Rates> {
    let mut copy = LargeCopy::new(device, nbytes)?;
    let to_host_pageable = copy.best_rate(Direction::ToHost)?;
    let to_device_pageable = copy.best_rate(Direction::ToDevice)?;
    let pinned = copy.pin().is_ok();
    let to_host_pinned = pinned.then(|| copy.best_rate(Direction::ToHost)).transpose()?;
    let to_device_pinned = pinned.then(|| copy.best_rate(Direction::ToDevice)).transpose()?;
    Ok(Rates { to_host_pinned, to_host_pageable, to_device_pinned, to_device_pageable })
}

/// One large copy between a GPU and the host: the most that anything that copies can reach.
#[derive(Debug)]
pub struct LargeCopy {
    memory: DeviceMemory,
    // Dropped before what it pins.
    pin: Option<Pin>,
    host: Mapping,
}

impl LargeCopy {
    /// Takes `nbytes` on either side, the host's ordinary memory at first.
    ///
    /// # Errors
    /// [`Error::Gpu`] or [`Error::Io`] where there is not so much memory.
    pub fn new(device: &Arc<Device>, nbytes: usize) -> Result<Self> {
        let memory = DeviceMemory::new(device, nbytes)?;
        let mut host =
            Mapping::new(nbytes).map_err(|e| Error::io("taking", "memory to measure with", e))?;
        host.prefault_all();
        Ok(Self { memory, pin: None, host })
    }

    /// Pins the host's memory.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses.
    pub fn pin(&mut self) -> Result<()> {
        let (host, nbytes) = (self.host.as_ptr(), self.memory.nbytes);
        // SAFETY: the mapping goes after the pin.
        self.pin = Some(unsafe { Pin::new(&self.memory.device, host, nbytes, nbytes) }?);
        Ok(())
    }

    /// GB/s (10^9) of copies in one direction: the best of a few.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver fails.
    pub fn best_rate(&self, direction: Direction) -> Result<f64> {
        const ROUNDS: usize = 4;
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            best = best.min(self.seconds(direction)?);
        }
        Ok(self.memory.nbytes as f64 / 1e9 / best.max(1e-9))
    }

    fn seconds(&self, direction: Direction) -> Result<f64> {
        let mut ready = Ready::default();
        // SAFETY: the default stream is every context's.
        let ready_event = unsafe { ready.event(self.memory.device.ordinal(), DEFAULT_STREAM) }?;
        let (width, height) = (self.memory.nbytes, 1);
        let (device, host) = (self.memory.base, self.host.as_ptr());
        let copy = RowCopy { device, device_pitch: width, host, host_pitch: width, width, height };
        let mut copies = Copies::default();
        // SAFETY: as many bytes on either side, both of this, the host's known to nobody else.
        unsafe { copies.order(&ready_event, direction, copy) };
        let started = Instant::now();
        copies.start()?;
        copies.wait()?;
        Ok(started.elapsed().as_secs_f64())
    }
}
