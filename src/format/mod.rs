//! Bytes on disk, without any I/O: dtypes, the shard's header, the manifest, the names of files.
//! `docs/format.md` says the same in prose.

pub mod cover;
pub mod dtype;
pub mod header;
pub mod manifest;
pub mod names;
pub mod value;

pub use dtype::Dtype;
pub use manifest::{Chunk, FileEntry, Manifest, TensorEntry};
pub use value::Value;

use crate::error::{Error, Result};

/// A tensor's name, element type and shape: all that a layout depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Unique in its checkpoint; any Unicode.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements a dimension; empty for a 0-dim tensor.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes of the dense data.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the size overflows or is no whole number of bytes.
    pub fn nbytes(&self) -> Result<u64> {
        self.dtype.nbytes(&self.shape).ok_or_else(|| {
            Error::invalid(format!(
                "tensor {:?}: shape {:?} of {} is no size in whole bytes below 2^63",
                self.name, self.shape, self.dtype
            ))
        })
    }
}
