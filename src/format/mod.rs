//! The format of the bytes on disk: dtypes, the shard's header, the manifest, the names of files. No I/O.
//! `docs/format.md` specifies it.

pub mod content_hash;
pub mod cover;
pub mod dtype;
pub(crate) mod file_sums;
pub mod header;
pub(crate) mod lists;
pub mod manifest;
pub(crate) mod metrics;
pub mod model_files;
pub mod model_index;
pub mod names;
pub mod object;
pub mod outline;
pub(crate) mod part;
pub mod receipt;
pub mod safetensors_header;
pub mod select;
pub mod step;
mod trailer;
pub mod value;

pub use content_hash::ChunkHash;
pub use dtype::{Dtype, Element};
pub use manifest::{Chunk, FileEntry, Manifest, Node, RankShare, TensorEntry};
pub(crate) use manifest::{RANKS_MAX, SaveId, TRAILER_LEN};
pub use metrics::Metrics;
pub use receipt::Receipt;
pub use step::StepPattern;
pub(crate) use step::{NoStep, Stem, StepName};
pub use value::Value;

use crate::error::{Error, Result};
use smallvec::SmallVec;

/// Elements per dimension, in a manifest's entry. The entry itself has space for two, since an allocation would take
/// more memory than such a list.
pub type Shape = SmallVec<[u64; 2]>;

/// The text of an object or list, unless it was cut. Does not parse it, since what other programs write need not be JSON
/// by the book: Python writes NaN, and browsers take comments.
pub(crate) fn whole_text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (text.trim_end().ends_with(['}', ']']) && !text.contains('\0')).then_some(text)
}

/// A tensor's name, element type and shape: all that a layout depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Unique in its checkpoint; any Unicode.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per dimension; empty for a 0-dim tensor.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes of the dense data.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the size overflows or is not a whole number of bytes.
    pub fn nbytes(&self) -> Result<u64> {
        self.dtype.nbytes(&self.shape).ok_or_else(|| {
            Error::invalid(format!(
                "tensor {:?}: shape {:?} of {} is not a whole number of bytes below 2^63",
                self.name, self.shape, self.dtype
            ))
        })
    }

    /// Checks that `got` bytes are the dense data's.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are more or fewer.
    pub(crate) fn check_bytes(&self, got: u64) -> Result<()> {
        let expected = self.nbytes()?;
        if expected == got {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor {:?}: {} of shape {:?} is {expected} bytes, its data is {got}",
            self.name, self.dtype, self.shape
        )))
    }
}

/// What is saved as one piece: a tensor, a region of a tensor that several pieces make up, or an opaque
/// byte string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Name and type of the tensor, and the shape of this piece of it.
    pub info: TensorInfo,
    /// Where this piece lies in its tensor; `None` if it is the whole tensor.
    pub region: Option<Region>,
    /// Whether it is an opaque byte string rather than a tensor: U8, one dimension.
    pub object: bool,
}

/// Where a region lies in its tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// Elements per dimension, of the whole tensor.
    pub shape: Vec<u64>,
    /// Where the region starts, one number per dimension.
    pub offsets: Vec<u64>,
}

impl From<TensorInfo> for Item {
    /// A whole tensor.
    fn from(info: TensorInfo) -> Self {
        Self { info, region: None, object: false }
    }
}

impl Item {
    /// Shape of the whole tensor.
    pub fn tensor_shape(&self) -> &[u64] {
        self.region.as_ref().map_or(&self.info.shape, |region| &region.shape)
    }

    /// Checks that a region lies in its tensor, and that an object is bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the tensor, the region and the shape.
    pub fn check(&self) -> Result<()> {
        let TensorInfo { name, dtype, shape: sizes } = &self.info;
        if self.object && (*dtype != Dtype::U8 || sizes.len() != 1 || self.region.is_some()) {
            return Err(Error::invalid(format!("object {name:?} is not a string of bytes")));
        }
        let Some(Region { shape, offsets }) = &self.region else { return Ok(()) };
        if cover::within(shape, (offsets, sizes)) && dtype.nbytes(shape).is_some() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor {name:?}: a region of {sizes:?} at {offsets:?} is outside {dtype} {shape:?}"
        )))
    }
}
