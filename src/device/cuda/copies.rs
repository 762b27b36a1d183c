//! Copies between GPUs' memory and one staging buffer: ordered, then started together, then asked
//! after until they have ended.

use super::device::{Device, Event, Moment};
use super::driver::{checked, failed};
use super::pieces::Turn;
use crate::device::host::Strided;
use crate::error::Result;
use crate::plan::slab::Runs;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUmemorytype, CUstream};
use std::sync::Arc;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToHost = 0,
    ToDevice = 1,
}

impl Direction {
    pub(super) fn doing(self) -> &'static str {
        match self {
            Self::ToHost => "copying to the host from",
            Self::ToDevice => "copying from the host to",
        }
    }
}

/// Rows of bytes, evenly apart on either side.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    pub device: u64,
    pub device_pitch: usize,
    pub host: *mut u8,
    pub host_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// Copies of one GPU's, one way.
struct Order {
    /// From when on all of the memory may be copied: one moment at least, all of that GPU.
    moments: Vec<Arc<Moment>>,
    direction: Direction,
    copies: Vec<Copy>,
}

/// All copies of one buffer. They have ended when this is dropped.
#[derive(Default)]
pub(crate) struct Copies {
    orders: Vec<Order>,
    flights: Vec<Flight>,
    /// Bytes that are turned round once they are there, by their address.
    turns: Vec<(*mut u8, Turn)>,
    bytes: u64,
}

// SAFETY: addresses within a buffer that this is kept with, and used only by who has this.
unsafe impl Send for Copies {}

impl Copies {
    /// Orders a copy; it begins with [`Copies::start`].
    ///
    /// # Safety
    /// Both sides are memory of the copy's size that is there, and used by nobody else, until this is
    /// dropped: the host's, and that of the device of `moment`.
    pub(super) unsafe fn order(&mut self, moment: &Arc<Moment>, direction: Direction, copy: Copy) {
        self.bytes += (copy.width * copy.height) as u64;
        let same = |order: &&mut Order| {
            Arc::ptr_eq(order.moments[0].device(), moment.device()) && order.direction == direction
        };
        let Some(order) = self.orders.iter_mut().find(same) else {
            let moments = vec![moment.clone()];
            return self.orders.push(Order { moments, direction, copies: vec![copy] });
        };
        order.copies.push(copy);
        if order.moments.last().is_none_or(|last| !Arc::ptr_eq(last, moment)) {
            order.moments.push(moment.clone());
        }
    }

    /// Orders copies of runs of a buffer at `host` into a GPU's memory at `device`.
    ///
    /// # Safety
    /// As for [`Copies::order`], of all of the runs.
    pub unsafe fn order_runs(
        &mut self,
        moment: &Arc<Moment>,
        device: u64,
        host: *mut u8,
        runs: Runs,
    ) {
        let Runs { from, from_step, to_step, len: width, count, .. } = runs;
        let host = host.wrapping_add(from);
        // SAFETY: the caller's promise.
        let mut order = |copy| unsafe { self.order(moment, Direction::ToDevice, copy) };
        // A GPU takes rows that neither overlap nor run backwards.
        if to_step >= width as isize || count == 1 {
            let (device_pitch, host_pitch) = (to_step.unsigned_abs(), from_step);
            let rows = Copy { device, device_pitch, host, host_pitch, width, height: count };
            return split(rows, order);
        }
        for run in 0..count {
            order(Copy {
                device: device.wrapping_add_signed((run as isize * to_step) as i64),
                device_pitch: width,
                host: host.wrapping_add(run * from_step),
                host_pitch: width,
                width,
                height: 1,
            });
        }
    }

    /// Orders that bytes be turned round when they are there.
    ///
    /// # Safety
    /// The bytes at `at` are host memory as in [`Copies::order`].
    pub(super) unsafe fn turn(&mut self, at: *mut u8, turn: Turn) {
        self.turns.push((at, turn));
    }

    /// Bytes that GPUs copy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Starts all that was ordered.
    ///
    /// # Errors
    /// [`Error::Gpu`]; what was started by then goes on.
    pub fn start(&mut self) -> Result<()> {
        for order in std::mem::take(&mut self.orders) {
            Flight::start(&order, &mut self.flights)?;
        }
        Ok(())
    }

    /// Whether all that was started has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`], when there is nothing more to wait for.
    pub fn have_ended(&mut self) -> Result<bool> {
        for flight in &mut self.flights {
            if !flight.has_ended()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all that was started has ended.
    ///
    /// # Errors
    /// As for [`Copies::have_ended`].
    pub fn wait(&mut self) -> Result<()> {
        let mut pause = Pause::default();
        while !self.have_ended()? {
            pause.rest();
        }
        Ok(())
    }

    /// Turns round what has to be, and returns the seconds that the GPUs took. To be called when all
    /// has ended.
    pub fn finish(&mut self) -> f64 {
        for (at, Turn { layout, .. }) in std::mem::take(&mut self.turns) {
            // SAFETY: the bytes are ours, by the contract of `turn`, and nobody writes to them now.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, layout.nbytes()) };
            let landed = bytes.to_vec();
            // SAFETY: the layout is one of just these bytes.
            unsafe { Strided::of_layout(landed.as_ptr(), layout) }.copy(0, bytes);
        }
        self.flights.drain(..).map(|flight| flight.seconds()).sum()
    }
}

/// Copies on their way on one of our streams.
struct Flight {
    device: Arc<Device>,
    direction: Direction,
    began: Arc<Event>,
    /// Recorded after the last; none if that failed.
    ended: Option<Arc<Event>>,
    over: bool,
}

impl Flight {
    /// Puts an order's copies on the stream, between two events. The flight is among `flights` as
    /// soon as there is one, whatever fails then.
    fn start(order: &Order, flights: &mut Vec<Flight>) -> Result<()> {
        let (device, direction) = (order.moments[0].device().clone(), order.direction);
        let (doing, ordinal) = (direction.doing(), device.ordinal());
        let _current = device.enter(doing)?;
        let gpu = |error| failed(error, doing, ordinal);
        // Held over all of it: another's copies in between would count as ours.
        let mut lane = device.lane(direction);
        let began = lane.ready(&device, &order.moments, direction).map_err(gpu)?;
        let put = order.copies.iter().try_for_each(|copy| {
            // SAFETY: the memory is there until the copies have ended: the contract of `order`.
            unsafe { put(copy, direction, lane.stream) }
        });
        // SAFETY: the stream is the device's, and live.
        let ended = unsafe { Event::record(&device, lane.stream) }.map(Arc::new);
        let failure = ended.as_ref().err().copied();
        let ended = ended.ok();
        lane.last = ended.as_ref().map(Arc::downgrade).unwrap_or_default();
        flights.push(Flight { device: device.clone(), direction, began, ended, over: false });
        checked(put, doing, ordinal)?;
        failure.map_or(Ok(()), |error| Err(gpu(error)))
    }

    fn has_ended(&mut self) -> Result<bool> {
        if !self.over {
            let doing = self.direction.doing();
            let _current = self.device.enter(doing)?;
            let asked = self.ended.as_ref().map_or(Ok(true), |ended| ended.has_come());
            self.over = asked.map_err(|error| failed(error, doing, self.device.ordinal()))?;
        }
        Ok(self.over)
    }

    fn seconds(&self) -> f64 {
        let Ok(_current) = self.device.enter("timing") else { return 0.0 };
        self.ended.as_ref().map_or(0.0, |ended| ended.seconds_since(&self.began))
    }

    /// Waits for copies of which no event tells. In a context that is lost this does not wait:
    /// nothing is copied in it any more.
    fn synchronize(&self) -> Result<()> {
        let doing = self.direction.doing();
        let _current = self.device.enter(doing)?;
        let lane = self.device.lane(self.direction);
        // SAFETY: our own stream.
        checked(unsafe { result::stream::synchronize(lane.stream) }, doing, self.device.ordinal())
    }
}

impl Drop for Flight {
    /// The memory on both sides may go when this has gone.
    fn drop(&mut self) {
        let mut pause = Pause::default();
        while self.ended.is_some() {
            match self.has_ended() {
                Ok(true) => return,
                Ok(false) => pause.rest(),
                Err(_) => break,
            }
        }
        let _ = self.synchronize();
    }
}

/// Puts one copy on a stream.
///
/// # Safety
/// As for [`Copies::order`]; the device's context is current.
unsafe fn put(
    copy: &Copy,
    direction: Direction,
    stream: CUstream,
) -> std::result::Result<(), cudarc::driver::DriverError> {
    let (host, device) = (copy.host.cast(), copy.device);
    // SAFETY: the caller's promise.
    unsafe {
        match (copy.height, direction) {
            (1, Direction::ToHost) => sys::cuMemcpyDtoHAsync_v2(host, device, copy.width, stream),
            (1, Direction::ToDevice) => sys::cuMemcpyHtoDAsync_v2(device, host, copy.width, stream),
            _ => sys::cuMemcpy2DAsync_v2(&rows(copy, direction), stream),
        }
    }
    .result()
}

fn rows(copy: &Copy, direction: Direction) -> sys::CUDA_MEMCPY2D {
    use CUmemorytype::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
    let (from, to) = match direction {
        Direction::ToHost => (DEVICE, HOST),
        Direction::ToDevice => (HOST, DEVICE),
    };
    let (from_pitch, to_pitch) = match direction {
        Direction::ToHost => (copy.device_pitch, copy.host_pitch),
        Direction::ToDevice => (copy.host_pitch, copy.device_pitch),
    };
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: from,
        srcHost: copy.host.cast_const().cast(),
        srcDevice: copy.device,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to,
        dstHost: copy.host.cast(),
        dstDevice: copy.device,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: copy.width,
        Height: copy.height,
    }
}

/// Rests between two questions: at first hardly, then for about as long as the copy of a block takes.
#[derive(Default)]
struct Pause {
    asked: u32,
}

impl Pause {
    /// Rests once.
    pub fn rest(&mut self) {
        const EAGER: u32 = 20;
        const BLOCK: std::time::Duration = std::time::Duration::from_micros(50);
        self.asked += 1;
        match self.asked {
            0..EAGER => std::thread::yield_now(),
            _ => std::thread::sleep(BLOCK),
        }
    }
}

impl std::fmt::Debug for Copies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copies").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Rows too far apart for a GPU to copy them in one go (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`, 2^31 - 1 of
/// all GPUs so far) are copied one by one.
pub(super) fn split(copy: Copy, mut each: impl FnMut(Copy)) {
    if copy.height == 1 || copy.device_pitch.max(copy.host_pitch) <= i32::MAX as usize {
        return each(copy);
    }
    for row in 0..copy.height {
        each(Copy {
            device: copy.device + (row * copy.device_pitch) as u64,
            host: copy.host.wrapping_add(row * copy.host_pitch),
            height: 1,
            ..copy
        });
    }
}
