//! Tensors on NVIDIA GPUs, copied by the GPU itself between its memory and staging buffers.
//!
//! The driver is loaded when the first GPU tensor is met, and never otherwise. Copies go over
//! streams of our own: after an event that is recorded on the stream which the tensor is ready on,
//! so that they take what it holds at that moment, and computing goes on meanwhile. That they have
//! ended is asked, never waited for in the driver; no other stream and no context is synchronized.

mod copies;
mod device;
mod driver;
mod memory;
mod pieces;
mod pin;
mod source;

pub(crate) use copies::{Copies, Direction};
pub(crate) use device::Moment;
pub use device::{Device, Gpu, Ready, StreamHandle};
pub use driver::version;
pub use memory::{DeviceMemory, LargeCopy, Rates, measure};
pub use pin::Pin;
pub(crate) use pin::pin;
pub use source::CudaSource;
pub(crate) use source::primary_ordinal;
