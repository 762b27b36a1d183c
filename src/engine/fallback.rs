//! What ringstow wanted, what it used instead, why, and what to do about it.

use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::io;

/// What a [`Fallback`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FallbackKind {
    /// An engine, O_DIRECT or fixed buffers.
    IoMode,
    /// Lower priorities for ringstow's threads.
    Priority,
    /// Memory for all that a background save copies, so that training does not wait for the disk.
    StagingMemory,
    /// Staging memory that is pinned for GPUs.
    PinnedMemory,
    /// Room on the disk that is taken before the files are written.
    Preallocation,
    /// Files of the base that need not be written again.
    Base,
    /// Files of removed or replaced checkpoints to write over.
    Recycling,
    /// Stripes on disks of their own.
    Stripes,
    /// A file that was read from its copy on another tier.
    Copy,
}

/// Something that was unavailable, though the work went on without it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// What it is about.
    pub kind: FallbackKind,
    /// What was tried: `"uring, fixed buffers, O_DIRECT"`.
    pub wanted: String,
    /// What was used instead.
    pub got: String,
    /// Why the wanted thing was unavailable.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

/// Why something is unavailable, and what to do about it. Travels inside an [`io::Error`] where an
/// engine knows better than the system's error number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// Why it is unavailable.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

impl Refusal {
    pub(super) fn new(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: remedy.into() }
    }

    /// The refusal that an error carries, if an engine put one there.
    pub fn in_error(error: &io::Error) -> Option<&Self> {
        error.get_ref().and_then(|inner| inner.downcast_ref())
    }

    /// The report's entry for using `got`, an I/O mode or a part of one, instead of `wanted`.
    pub fn fallback(self, wanted: impl Display, got: impl Display) -> Fallback {
        let Self { reason, remedy } = self;
        let (wanted, got) = (wanted.to_string(), got.to_string());
        Fallback { kind: FallbackKind::IoMode, wanted, got, reason, remedy }
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        io::Error::new(io::ErrorKind::Unsupported, refusal)
    }
}
