//! A manifest's entry of a tensor: what it is, and where its bytes are.

use super::Chunk;
use crate::format::cover::{self, Extent};
use crate::format::lists::{self, Entry, LongDims};
use crate::format::{Dtype, Shape, TensorInfo};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Unique in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per dimension, of the whole tensor.
    #[serde(deserialize_with = "lists::shape")]
    pub shape: Shape,
    /// Where its bytes are. The entry itself has space for one chunk, as most tensors have.
    #[serde(deserialize_with = "lists::entries")]
    pub chunks: SmallVec<[Chunk; 1]>,
    /// Whether it is an opaque byte string rather than a tensor: U8, one dimension.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub object: bool,
}

impl Entry for TensorEntry {
    fn count_dims(&self, long: &mut LongDims) -> Result<(), String> {
        long.add(self.shape.len())?;
        self.chunks.iter().try_for_each(|chunk| chunk.count_dims(long))
    }
}

impl TensorEntry {
    /// Name, type and shape.
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape.to_vec() }
    }

    /// Whether chunks, all within the shape, hold no element twice. `is_whole`: they are as large as the tensor, so
    /// they then hold all of it.
    pub(super) fn is_disjoint(&self, is_whole: bool) -> std::result::Result<bool, String> {
        if self.chunks.len() == 1 {
            return Ok(true);
        }
        if is_whole {
            return Ok(self.is_tiled());
        }
        self.with_regions(|regions| cover::overlap(&self.shape, regions)).map(|overlap| !overlap)
    }

    /// Whether chunks, all within the shape, hold each element exactly once.
    pub(crate) fn is_tiled(&self) -> bool {
        self.with_regions(|regions| cover::tiles(&self.shape, regions))
    }

    fn with_regions<T>(&self, look: impl FnOnce(&[Extent]) -> T) -> T {
        let zeros = vec![0; self.shape.len()];
        let regions =
            self.chunks.iter().map(|chunk| chunk.extent().unwrap_or((&zeros, &self.shape)));
        look(&regions.collect::<Vec<Extent>>())
    }

    /// Bytes of the whole tensor. A manifest that was read has only sizes that fit.
    pub fn nbytes(&self) -> u64 {
        self.dtype.nbytes(&self.shape).unwrap_or(0)
    }

    /// Bytes of it that the checkpoint holds: all, except in a [rank's share](super::RankShare).
    pub fn held_bytes(&self) -> u64 {
        let bytes =
            |chunk: &Chunk| self.dtype.nbytes(chunk.sizes().unwrap_or(&self.shape)).unwrap_or(0);
        self.chunks.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Regions of it, offsets and sizes, that fill what the checkpoint does not hold. Empty, except in a
    /// [rank's share](super::RankShare).
    pub fn holes(&self) -> Vec<(Vec<u64>, Vec<u64>)> {
        if self.held_bytes() == self.nbytes() {
            return Vec::new();
        }
        // Reading a manifest refuses what cannot be surveyed.
        self.with_regions(|regions| cover::survey(&self.shape, regions)).unwrap_or_default().holes
    }

    /// Bytes of one of its chunks; `None` if that does not lie within its shape.
    pub(crate) fn chunk_bytes(&self, chunk: &Chunk) -> Option<u64> {
        match chunk.extent() {
            None => self.dtype.nbytes(&self.shape),
            Some(extent) if cover::within(&self.shape, extent) => self.dtype.nbytes(extent.1),
            Some(_) => None,
        }
    }
}
