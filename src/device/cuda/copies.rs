//! Copies between GPUs' memory and one staging buffer: ordered, started together, and polled until they
//! have ended.

use super::device::{Device, Direction, Event, ReadyEvent};
use super::driver::{DriverResult, checked, failed};
use super::pieces::Reorder;
use crate::device::host::Strided;
use crate::error::Result;
use crate::plan::slab::Runs;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUmemorytype, CUstream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

/// Rows of bytes, evenly apart on either side.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowCopy {
    pub device: u64,
    pub device_pitch: usize,
    pub host: *mut u8,
    pub host_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// The copies of one GPU in one direction.
#[derive(Debug)]
struct Order {
    /// Events of that GPU to wait for before copying; never empty.
    events: Vec<Arc<ReadyEvent>>,
    direction: Direction,
    copies: Vec<RowCopy>,
}

/// All copies of one buffer. They have ended when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    orders: Vec<Order>,
    running: Vec<RunningCopies>,
    /// Bytes to reorder once they have arrived, with their address.
    reorders: Vec<(*mut u8, Reorder)>,
    bytes: u64,
}

// SAFETY: addresses within a buffer that this is kept with, and used only by who has this.
unsafe impl Send for Copies {}

impl Copies {
    /// Orders a copy; it begins with [`Copies::start`]. Rows too far apart for a GPU to copy them in one go
    /// (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`, 2^31 - 1 of all GPUs so far) are copied one by one.
    ///
    /// # Safety
    /// Both sides are memory of the copy's size that is there, and used by nobody else, until this is
    /// dropped: the host's, and that of the device of `ready_event`.
    pub(super) unsafe fn order(
        &mut self,
        ready_event: &Arc<ReadyEvent>,
        direction: Direction,
        copy: RowCopy,
    ) {
        self.bytes += (copy.width * copy.height) as u64;
        let is_in_one_go =
            copy.height == 1 || copy.device_pitch.max(copy.host_pitch) <= i32::MAX as usize;
        let (rows, height) = if is_in_one_go { (1, copy.height) } else { (copy.height, 1) };
        let copies = (0..rows).map(|row| RowCopy {
            device: copy.device + (row * copy.device_pitch) as u64,
            host: copy.host.wrapping_add(row * copy.host_pitch),
            height,
            ..copy
        });
        let same = |order: &&mut Order| {
            Arc::ptr_eq(order.events[0].device(), ready_event.device())
                && order.direction == direction
        };
        let Some(order) = self.orders.iter_mut().find(same) else {
            let events = vec![ready_event.clone()];
            return self.orders.push(Order { events, direction, copies: copies.collect() });
        };
        order.copies.extend(copies);
        if order.events.last().is_none_or(|last| !Arc::ptr_eq(last, ready_event)) {
            order.events.push(ready_event.clone());
        }
    }

    /// Orders copies of runs of a buffer at `host` into a GPU's memory at `device`.
    ///
    /// # Safety
    /// As for [`Copies::order`], of all of the runs.
    pub unsafe fn order_runs(
        &mut self,
        ready_event: &Arc<ReadyEvent>,
        device: u64,
        host: *mut u8,
        runs: Runs,
    ) {
        let Runs { from, from_step, to_step, len: width, count, .. } = runs;
        let host = host.wrapping_add(from);
        // SAFETY: the caller's promise.
        let mut order = |copy| unsafe { self.order(ready_event, Direction::ToDevice, copy) };
        // A GPU takes rows that neither overlap nor run backwards.
        if to_step >= width as isize || count == 1 {
            let (device_pitch, host_pitch) = (to_step.unsigned_abs(), from_step);
            return order(RowCopy { device, device_pitch, host, host_pitch, width, height: count });
        }
        for run in 0..count {
            order(RowCopy {
                device: device.wrapping_add_signed((run as isize * to_step) as i64),
                device_pitch: width,
                host: host.wrapping_add(run * from_step),
                host_pitch: width,
                width,
                height: 1,
            });
        }
    }

    /// Orders that bytes be reordered once they have arrived.
    ///
    /// # Safety
    /// The bytes at `at` are host memory as in [`Copies::order`].
    pub(super) unsafe fn reorder(&mut self, at: *mut u8, reorder: Reorder) {
        self.reorders.push((at, reorder));
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
            RunningCopies::start(&order, &mut self.running)?;
        }
        Ok(())
    }

    /// Whether all that was started has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`], when there is nothing more to wait for.
    pub fn have_ended(&mut self) -> Result<bool> {
        for copies in &mut self.running {
            if !copies.has_ended()? {
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
        self.running.iter_mut().try_for_each(RunningCopies::wait)
    }

    /// Reorders what must be, and returns the seconds that the GPUs took. Call this when all copies have
    /// ended.
    pub fn finish(&mut self) -> f64 {
        for (at, Reorder { layout, .. }) in std::mem::take(&mut self.reorders) {
            // SAFETY: the bytes are ours, by the contract of `reorder`, and nobody writes to them now.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, layout.nbytes()) };
            let landed = bytes.to_vec();
            // SAFETY: the layout is one of just these bytes.
            unsafe { Strided::of_layout(landed.as_ptr(), layout) }.copy(0, bytes);
        }
        self.running.drain(..).map(|copies| copies.seconds()).sum()
    }
}

/// Copies in flight on one of our streams.
#[derive(Debug)]
struct RunningCopies {
    device: Arc<Device>,
    direction: Direction,
    began: Arc<Event>,
    /// Recorded after the last copy; `None` if recording failed.
    ended: Option<Arc<Event>>,
    over: bool,
}

impl RunningCopies {
    /// Puts an order's copies on the stream, between two events. They are in `running` as soon as one
    /// may have started, whatever fails then.
    fn start(order: &Order, running: &mut Vec<RunningCopies>) -> Result<()> {
        let (device, direction) = (order.events[0].device().clone(), order.direction);
        let (doing, ordinal) = (direction.doing(), device.ordinal());
        let _current = device.enter(doing)?;
        let gpu = |error| failed(error, doing, ordinal);
        // Locked throughout: copies of another buffer in between would count as ours.
        let mut ours = device.copy_stream(direction);
        let began = ours.begin_after(&device, &order.events, direction).map_err(gpu)?;
        let put = order.copies.iter().try_for_each(|copy| {
            // SAFETY: the memory is there until the copies have ended: the contract of `order`.
            unsafe { put(copy, direction, ours.stream) }
        });
        // SAFETY: the stream is the device's, and live.
        let ended = unsafe { Event::record(&device, ours.stream) }.map(Arc::new);
        let failure = ended.as_ref().err().copied();
        let ended = ended.ok();
        ours.last = ended.as_ref().map(Arc::downgrade).unwrap_or_default();
        running.push(RunningCopies {
            device: device.clone(),
            direction,
            began,
            ended,
            over: false,
        });
        checked(put, doing, ordinal)?;
        failure.map_or(Ok(()), |error| Err(gpu(error)))
    }

    fn has_ended(&mut self) -> Result<bool> {
        if !self.over {
            let doing = self.direction.doing();
            let _current = self.device.enter(doing)?;
            let asked = self.ended.as_ref().map_or(Ok(true), |ended| ended.has_completed());
            self.over = asked.map_err(|error| failed(error, doing, self.device.ordinal()))?;
        }
        Ok(self.over)
    }

    /// Polls until they have ended: yields at first, then sleeps for about as long as copying a block takes.
    fn wait(&mut self) -> Result<()> {
        self.wait_while(|| ())
    }

    /// As [`RunningCopies::wait`]; calls `waiting` before each poll but the first.
    fn wait_while(&mut self, mut waiting: impl FnMut()) -> Result<()> {
        const YIELDS: u32 = 20;
        const SLEEP: Duration = Duration::from_micros(50);
        let mut polls = 0;
        while !self.has_ended()? {
            polls += 1;
            match polls {
                0..YIELDS => thread::yield_now(),
                _ => thread::sleep(SLEEP),
            }
            waiting();
        }
        Ok(())
    }

    /// [`RunningCopies::wait`] of a save or load that has failed or was cancelled. Warns if a GPU hangs, once until it
    /// goes on: the copies have the memory of the tensors and of the pool, however long they take.
    fn wait_to_let_go(&mut self) -> Result<()> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let (device, direction, began) = (self.device.clone(), self.direction, Instant::now());
        let mut has_warned = false;
        let done = self.wait_while(|| {
            if began.elapsed() >= PATIENCE && !device.is_stuck.swap(true, Relaxed) {
                has_warned = true;
                tracing::warn!(
                    "a save or load has failed, and waits for GPU {0} to end {1} it: until then, neither the tensors' \
                     memory nor the staging buffers may be freed. If this goes on, GPU {0} hangs or is held up by \
                     other work: see nvidia-smi and the kernel's log (dmesg)",
                    device.ordinal(),
                    direction.doing()
                );
            }
        });
        if has_warned {
            device.is_stuck.store(false, Relaxed);
        }
        done
    }

    fn seconds(&self) -> f64 {
        let Ok(_current) = self.device.enter("timing") else { return 0.0 };
        self.ended.as_ref().map_or(0.0, |ended| ended.seconds_since(&self.began))
    }

    /// Waits for copies that no event follows. In a lost context this returns at once: nothing is copied
    /// there any more.
    fn synchronize(&self) -> Result<()> {
        let doing = self.direction.doing();
        let _current = self.device.enter(doing)?;
        let ours = self.device.copy_stream(self.direction);
        // SAFETY: our own stream.
        checked(unsafe { result::stream::synchronize(ours.stream) }, doing, self.device.ordinal())
    }
}

impl Drop for RunningCopies {
    /// After this, the memory on both sides may be freed.
    fn drop(&mut self) {
        if self.ended.is_none() || self.wait_to_let_go().is_err() {
            let _ = self.synchronize();
        }
    }
}

/// Puts one copy on a stream.
///
/// # Safety
/// As for [`Copies::order`]; the device's context is current.
unsafe fn put(copy: &RowCopy, direction: Direction, stream: CUstream) -> DriverResult<()> {
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

fn rows(copy: &RowCopy, direction: Direction) -> sys::CUDA_MEMCPY2D {
    use CUmemorytype::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
    let (host, device) = ((HOST, copy.host_pitch), (DEVICE, copy.device_pitch));
    let ((from, from_pitch), (to, to_pitch)) = match direction {
        Direction::ToHost => (device, host),
        Direction::ToDevice => (host, device),
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
