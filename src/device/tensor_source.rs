//! The memory of a tensor to save, on the host or on a GPU.

#[cfg(feature = "cuda")]
use super::cuda::CudaSource;
use super::source::Source;

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
