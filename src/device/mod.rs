//! How bytes get from a tensor into a buffer, and back. One module a kind of memory.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
mod layout;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod target;
mod transit;

#[cfg(not(feature = "cuda"))]
use no_cuda as cuda;

/// Whether a source's bytes are copied by a GPU.
pub(crate) fn on_gpu(source: &dyn Source) -> bool {
    #[cfg(feature = "cuda")]
    return source.cuda().is_some();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = source;
        false
    }
}

pub(crate) use transit::{Landed, Pinning, Transit};

pub use target::{StridedTarget, Target};

use crate::error::Result;

/// Where a tensor's bytes come from. Asked for in pieces, by several threads at once.
///
/// Data is dense and in row-major order, whatever the tensor's own strides.
///
/// The save that asks holds staging buffers meanwhile, all of them maybe. A source that waits for a
/// save or load in turn gives it a [`Runtime`](crate::Runtime) of its own: within one, each would wait
/// for the other.
pub trait Source: Send + Sync {
    /// Bytes of the dense data.
    fn nbytes(&self) -> u64;

    /// Copies the dense bytes from `offset` on into `to`, all of it.
    ///
    /// Offset and length are multiples of the element's size.
    fn read(&self, offset: usize, to: &mut [u8]);

    /// [`Source::read`] of a source that can fail, as one does that loads its bytes when they are
    /// asked for. This is what a save calls; it fails with the error, and commits nothing.
    ///
    /// # Errors
    /// Why the bytes cannot be had.
    fn try_read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.read(offset, to);
        Ok(())
    }

    /// The tensor on a GPU that this is, if it is one: the GPU then copies the bytes, and nothing
    /// else of this is called but [`Source::nbytes`].
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&cuda::CudaSource<'_>> {
        None
    }
}

/// Runs of bytes that lie evenly apart, in a buffer and where they go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs {
    /// Bytes from the buffer's first to the first run.
    pub from: usize,
    /// Bytes from one run to the next in the buffer.
    pub from_step: usize,
    /// Bytes from the target's origin to where the first run goes.
    pub to: isize,
    /// Bytes from there to where the next one goes.
    pub to_step: isize,
    /// Bytes of each.
    pub len: usize,
    /// How many.
    pub count: usize,
}
