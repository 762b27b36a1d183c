//! How bytes get from a tensor into a buffer, and back. One module per kind of memory.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
mod layout;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod runs;
mod source;
mod staged_copy;
mod target;
mod tensor_source;

pub(crate) use staged_copy::{Finished, Pinning, StagedCopy, pin_for_sources, pin_for_targets};

pub use source::Source;
pub use target::{StridedTarget, Target};
pub use tensor_source::TensorSource;
