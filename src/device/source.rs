//! Where a tensor's bytes come from.

#[cfg(feature = "cuda")]
use super::cuda::CudaSource;
use crate::error::Result;

/// A tensor's bytes, read in pieces by several threads at once.
///
/// Data is dense and in row-major order, whatever the tensor's own strides.
///
/// The save holds staging buffers meanwhile, perhaps all of them. A source that itself waits for a save
/// or load must give that one a [`Runtime`](crate::Runtime) of its own: within one runtime, each would
/// wait for the other.
pub trait Source: Send + Sync {
    /// Bytes of the dense data.
    fn nbytes(&self) -> u64;

    /// Copies the dense bytes from `offset` on into `to`, and fills all of `to`.
    ///
    /// Offset and length are multiples of the element's size.
    ///
    /// # Errors
    /// Why the bytes are unavailable. The save fails with this error and commits nothing.
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()>;
}

/// The memory of a tensor to save.
pub enum TensorSource<'a> {
    /// The CPU copies the bytes, or makes them.
    Host(Box<dyn Source + 'a>),
    /// The GPU copies the bytes.
    #[cfg(feature = "cuda")]
    Cuda(Box<CudaSource<'a>>),
}

impl<'a> TensorSource<'a> {
    /// Bytes of the dense data.
    pub fn nbytes(&self) -> u64 {
        match self {
            Self::Host(source) => source.nbytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(source) => source.nbytes(),
        }
    }

    /// The tensor on a GPU, if it is one.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self) -> Option<&CudaSource<'a>> {
        match self {
            Self::Host(_) => None,
            Self::Cuda(source) => Some(source),
        }
    }

    /// Whether the GPU copies the bytes.
    pub(crate) fn is_on_gpu(&self) -> bool {
        !matches!(self, Self::Host(_))
    }
}

impl<'a, S: Source + 'a> From<Box<S>> for TensorSource<'a> {
    fn from(source: Box<S>) -> Self {
        Self::Host(source)
    }
}

impl<'a> From<Box<dyn Source + 'a>> for TensorSource<'a> {
    fn from(source: Box<dyn Source + 'a>) -> Self {
        Self::Host(source)
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<CudaSource<'a>> for TensorSource<'a> {
    fn from(source: CudaSource<'a>) -> Self {
        Self::Cuda(Box::new(source))
    }
}

impl std::fmt::Debug for TensorSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_on_gpu() { "Cuda" } else { "Host" };
        write!(f, "TensorSource::{kind}({} bytes)", self.nbytes())
    }
}
