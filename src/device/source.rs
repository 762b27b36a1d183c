//! Where a tensor's bytes come from.

use crate::error::Result;
use std::ops::Range;

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

    /// The dense bytes of a range where they are, if they are there in one piece: a save that compares them with an
    /// earlier checkpoint then needs no copy. `None`, the default, is always right.
    fn lend(&self, range: Range<usize>) -> Option<&[u8]> {
        let _ = range;
        None
    }
}
