//! How bytes get from a tensor into a buffer, and back. One module a kind of memory.
#![allow(unsafe_code)]

pub mod host;
mod layout;
mod target;

pub use target::{StridedTarget, Target};

use crate::error::Result;

/// Where a tensor's bytes come from. Asked for in pieces, by several threads at once.
///
/// Data is dense and in row-major order, whatever the tensor's own strides.
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
}

/// Runs of bytes that lie evenly apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs<'a> {
    /// From the first byte of the first on, to the last of the last at least.
    pub bytes: &'a [u8],
    /// Bytes from one to the next.
    pub step: usize,
    /// Bytes of each.
    pub len: usize,
    /// How many.
    pub count: usize,
}
