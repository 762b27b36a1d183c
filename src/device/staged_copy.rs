//! A staging buffer while bytes are copied into it or out of it.

#[cfg(feature = "cuda")]
use super::cuda::Copies;
#[cfg(not(feature = "cuda"))]
use super::no_cuda::Copies;
use super::target::Target;
use super::tensor_source::TensorSource;
use crate::error::Result;
use crate::plan::slab::Runs;
use crate::pool::{Buffer, Pool};
use std::ops::Range;

/// A staging buffer, and the copies that GPUs are making into it or out of it meanwhile.
///
/// Host memory is copied at once. Copies of GPUs' memory are ordered one by one, and started together.
/// Nobody gets the buffer before they have ended. The holder keeps the sources and targets as long.
#[derive(Debug)]
pub(crate) struct StagedCopy {
    // Dropped, and so ended, before the buffer.
    copies: Copies,
    buffer: Buffer,
}

/// A [`StagedCopy`] that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The buffer, which nobody else uses any more.
    pub buffer: Buffer,
    /// Bytes that GPUs copied.
    pub device_bytes: u64,
    /// Seconds that these copies took, as the GPUs measured them.
    pub device_seconds: f64,
}

impl StagedCopy {
    /// A buffer that nothing is copied to or from yet.
    pub fn new(buffer: Buffer) -> Self {
        Self { copies: Copies::default(), buffer }
    }

    /// The bytes. Do not look at those that a GPU is copying to.
    pub fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.buffer[range]
    }

    /// Whether GPUs copy anything.
    pub fn is_gpu_copying(&self) -> bool {
        self.copies.bytes() > 0
    }

    /// Copies `range.len()` bytes of a source, from `offset` on, to a range of the buffer, or orders
    /// the GPU's copy of them.
    ///
    /// # Errors
    /// The source's.
    pub fn gather(
        &mut self,
        source: &TensorSource,
        offset: usize,
        range: Range<usize>,
    ) -> Result<()> {
        let to = &mut self.buffer[range];
        match source {
            TensorSource::Host(source) => source.read(offset, to),
            #[cfg(feature = "cuda")]
            TensorSource::Cuda(tensor) => {
                // SAFETY: a range of our buffer, which nobody gets before the copies have ended.
                unsafe { tensor.order(offset, to.as_mut_ptr(), to.len(), &mut self.copies) };
                Ok(())
            }
        }
    }

    /// Copies runs of the buffer's first `filled` bytes into a target, or orders the GPU's
    /// copy of them.
    pub fn deliver(&mut self, target: &Target, filled: usize, runs: Runs) {
        #[cfg(feature = "cuda")]
        if let Some(ready_event) = target.ready_event() {
            let host = self.buffer.as_mut_ptr();
            if let Some(to) = target.place_of(&self.buffer[..filled], runs) {
                // SAFETY: both sides have been checked to have the runs; the buffer is ours until the
                // copies have ended, and the target's memory is there until then.
                unsafe { self.copies.order_runs(ready_event, to as u64, host, runs) };
            }
            return;
        }
        target.write(&self.buffer[..filled], runs);
    }

    /// Starts the GPUs' copies, if there are any.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) when a driver refuses.
    pub fn start(&mut self) -> Result<()> {
        self.copies.start()
    }

    /// Whether they have ended.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if one failed.
    pub fn has_ended(&mut self) -> Result<bool> {
        self.copies.have_ended()
    }

    /// Waits until they have ended.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if one failed.
    pub fn finish(mut self) -> Result<Finished> {
        self.copies.wait()?;
        let device_seconds = self.copies.finish();
        let device_bytes = self.copies.bytes();
        Ok(Finished { buffer: self.buffer, device_bytes, device_seconds })
    }
}

/// Whether the staging memory is pinned for GPUs, or why not. `None` where no GPU is involved.
pub(crate) type Pinning = Option<std::result::Result<(), String>>;

/// Pins the pool if one of the sources is on a GPU.
pub(crate) fn pin_for_sources(pool: &Pool, sources: &[TensorSource]) -> Pinning {
    #[cfg(feature = "cuda")]
    if let Some(tensor) = sources.iter().find_map(|source| source.cuda()) {
        return Some(super::cuda::pin(pool, tensor.device()));
    }
    let _ = (pool, sources);
    None
}

/// Pins the pool if one of the targets is on a GPU.
pub(crate) fn pin_for_targets(pool: &Pool, targets: &[&Target]) -> Pinning {
    #[cfg(feature = "cuda")]
    if let Some(ready_event) = targets.iter().find_map(|target| target.ready_event()) {
        return Some(super::cuda::pin(pool, ready_event.device()));
    }
    let _ = (pool, targets);
    None
}
