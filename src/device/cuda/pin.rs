//! Host memory that is pinned, so that GPUs copy to and from it by themselves.

use super::device::Device;
use super::driver::{DriverResult, failed};
use crate::error::{Error, Result};
use crate::pool::Pool;
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes registered at once. The driver blocks all other threads meanwhile; for this many bytes that takes some
/// ten milliseconds.
const PIECE_BYTES: usize = 64 << 20;

/// Host memory that is registered with the driver, in pieces, until this is dropped.
#[derive(Debug)]
pub struct Pin {
    device: Arc<Device>,
    /// First byte and length of each piece.
    pieces: Vec<(usize, usize)>,
}

impl Pin {
    /// Registers memory for every GPU of the process. A copy must lie within one piece: pieces are
    /// multiples of `unit` bytes.
    ///
    /// # Safety
    /// The memory is mapped for longer than this lives.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses; nothing is registered then.
    pub unsafe fn new(
        device: &Arc<Device>,
        base: *mut u8,
        nbytes: usize,
        unit: usize,
    ) -> Result<Self> {
        const DOING: &str = "pinning host memory for";
        let _current = device.enter(DOING)?;
        let mut pin = Self { device: device.clone(), pieces: Vec::new() };
        let piece = (PIECE_BYTES / unit.max(1)).max(1) * unit.max(1);
        for start in (0..nbytes).step_by(piece) {
            let (at, len) = (base.wrapping_add(start), piece.min(nbytes - start));
            // SAFETY: mapped memory, by the contract.
            let registered = unsafe {
                sys::cuMemHostRegister_v2(at.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE)
            };
            registered.result().map_err(|error| failed(error, DOING, device.ordinal()))?;
            pin.pieces.push((at as usize, len));
        }
        Ok(pin)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter("unpinning") else { return };
        for &(at, _) in self.pieces.iter().rev() {
            // SAFETY: registered by us, and no copy uses it any more: who copies holds the memory,
            // which goes after this. Fails only where the driver is going away, and all pins with it.
            let _: DriverResult<()> = unsafe { sys::cuMemHostUnregister(at as *mut _) }.result();
        }
    }
}

/// Pins a pool on the first call; returns the result of that call.
///
/// # Errors
/// Why it is not pinned: the driver copies through memory of its own then, at a fraction of the rate.
pub(crate) fn pin(pool: &Pool, device: &Arc<Device>) -> std::result::Result<(), String> {
    let pinned: &Result<Pin> = pool.attachment(|| {
        // SAFETY: the pool's mapping drops its attachment before it is unmapped.
        unsafe { Pin::new(device, pool.base(), pool.bytes(), pool.block_bytes()) }
    });
    let (device, unit) = (device.clone(), pool.block_bytes());
    pool.prepare_further(move |mapping| {
        // SAFETY: as above.
        let pin = unsafe { Pin::new(&device, mapping.as_ptr(), mapping.len(), unit) };
        let pin = pin.map_err(|error| format!("no more memory could be pinned: {error}"))?;
        mapping.attachment(|| pin);
        Ok(())
    });
    pinned.as_ref().map(drop).map_err(Error::to_string)
}
