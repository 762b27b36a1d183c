//! A rank's receipt of what it wrote, and how the receipts of all ranks make a checkpoint.

mod merge;
mod packed;

use super::lists;
use super::manifest::{FileEntry, TensorEntry};
use crate::error::{Error, Result};
use packed::Packed;
use serde::{Deserialize, Serialize};

pub use merge::{Merged, Write, merge, merge_packed};

/// What a rank wrote: some thirty bytes per tensor and four per checksum chunk. The trainer sends it to
/// the coordinator as bytes, by any means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Which process wrote it.
    pub rank: u32,
    /// The session that it wrote for: a text that no other session has.
    pub session: String,
    /// Identifies this write: another write of the same rank has another text, and other files.
    pub write: String,
    /// Bytes of a checksum chunk.
    pub block_bytes: u64,
    /// Its shards under their final names; they are durable under names that only this write uses.
    #[serde(deserialize_with = "lists::entries")]
    pub files: Vec<FileEntry>,
    /// The tensors in them; chunks number the files in the order of `files`.
    #[serde(deserialize_with = "lists::entries")]
    pub tensors: Vec<TensorEntry>,
    /// The parts whose tensors have files of their own: see [`StateDict::droppable`](crate::StateDict::droppable).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<String>,
}

impl Receipt {
    /// Distinguishes this write from any other: the CRC-32 of the names, lengths and checksums of its files,
    /// in hex, then session and write. The rank stores it beside the files.
    pub fn mark(&self) -> String {
        merge::mark(&self.files, &self.session, &self.write)
    }

    /// Encodes it, to be sent to the coordinator. Only the same version of this library decodes it.
    pub fn encode(&self) -> Vec<u8> {
        packed::pack(self)
    }

    /// Decodes what [`Receipt::encode`] returned.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the bytes are not a receipt, are damaged, or are of another version of this library.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Packed::open(bytes).and_then(|packed| packed.unpack()).map_err(|reason| {
            Error::invalid(format!(
                "these {} bytes are not a rank's receipt: {reason}",
                bytes.len()
            ))
        })
    }
}

#[cfg(test)]
mod tests;
