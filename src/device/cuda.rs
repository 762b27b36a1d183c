//! Tensors on NVIDIA GPUs, copied by the GPU itself between its memory and staging buffers.
//!
//! The driver is loaded when the first GPU tensor comes, and never otherwise. Copies run on streams of
//! our own, after an event that we record on the stream that produces the tensor: so they take what
//! the tensor holds at that point, and computing goes on meanwhile. We poll whether they have ended and
//! never wait inside the driver; no other stream and no context is synchronized.

mod copies;
mod device;
mod driver;
mod memory;
mod pieces;
mod pin;
mod source;

pub(crate) use copies::Copies;
pub(crate) use device::ReadyEvent;
pub use device::{Device, Direction, Gpu, Ready, StreamHandle};
pub use driver::version;
pub use memory::{DeviceMemory, LargeCopy, Rates, measure};
pub use pin::Pin;
pub(crate) use pin::pin;
pub use source::CudaSource;
pub(crate) use source::primary_ordinal;
