//! A GPU as this process uses it, and events on its streams.

use super::driver::{self, Current, DriverResult, checked, failed};
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::driver::{DriverError, result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The driver's handle of a stream: `torch.cuda.Stream.cuda_stream`, or cudarc's
/// `CudaStream::cu_stream`. 0 and 1 are the legacy default stream, 2 is the thread's.
pub type StreamHandle = usize;

/// A GPU, by number and name.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Gpu {
    /// Its number, as CUDA_VISIBLE_DEVICES counts.
    pub ordinal: u32,
    /// As the driver calls it: `"NVIDIA H200"`.
    pub name: String,
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the GPU to the host.
    ToHost = 0,
    /// From the host to the GPU.
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

/// A GPU's primary context, which every CUDA library shares, and two streams of our own in it.
///
/// Made when first needed, and released with the last tensor and the last pinned pool.
pub struct Device {
    ordinal: u32,
    name: String,
    raw: sys::CUdevice,
    context: CUcontext,
    /// One stream per [`Direction`]: neither waits for the other.
    streams: [Mutex<CopyStream>; 2],
    /// Unused events.
    events: Mutex<Vec<CUevent>>,
    process: u32,
    /// Whether a thread waits, and has said so, for copies that do not end.
    pub(super) is_stuck: AtomicBool,
}

/// One of our streams.
pub(super) struct CopyStream {
    pub stream: CUstream,
    /// The event after the last copies that were put on it.
    pub last: Weak<Event>,
}

// SAFETY: handles of the driver, which may be used from any thread; what is recorded on a stream
// together is so under its lock.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The GPU of this number, as CUDA_VISIBLE_DEVICES counts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver that can be used, [`Error::Gpu`] without such a GPU
    /// or if it fails.
    pub fn get(ordinal: u32) -> Result<Arc<Self>> {
        static KNOWN: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());
        driver::load()?;
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|device| device.strong_count() > 0);
        let found = known.iter().filter_map(Weak::upgrade).find(|device| device.ordinal == ordinal);
        if let Some(device) = found {
            device.check_process()?;
            return Ok(device);
        }
        let made = Self::new(ordinal).map_err(|error| failed(error, "opening", ordinal))?;
        let device = Arc::new(made);
        known.push(Arc::downgrade(&device));
        Ok(device)
    }

    /// How many GPUs there are.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver that can be used.
    pub fn count() -> Result<u32> {
        driver::load()?;
        let count = result::device::get_count().map_err(|e| failed(e, "counting", 0))?;
        Ok(count.try_into().unwrap_or(0))
    }

    /// All GPUs, by number. No context is made on them, which would take time and memory on each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver that can be used, [`Error::Gpu`] if it fails.
    pub fn list() -> Result<Vec<Gpu>> {
        let named = |ordinal| {
            let name = result::device::get(ordinal as i32).and_then(result::device::get_name);
            let name = name.map_err(|error| failed(error, "naming", ordinal))?;
            Ok(Gpu { ordinal, name })
        };
        (0..Self::count()?).map(named).collect()
    }

    fn new(ordinal: u32) -> DriverResult<Self> {
        let number = ordinal.try_into().unwrap_or(i32::MAX);
        let raw = result::device::get(number)?;
        let name = result::device::get_name(raw)?;
        // SAFETY: a device that the driver has just named.
        let context = unsafe { result::primary_ctx::retain(raw) }?;
        let mut device = Self {
            ordinal,
            name,
            raw,
            context,
            streams: [CopyStream::new(std::ptr::null_mut()), CopyStream::new(std::ptr::null_mut())],
            events: Mutex::default(),
            process: std::process::id(),
            is_stuck: AtomicBool::new(false),
        };
        // From here on, a failure drops the device, and so releases what it has.
        // SAFETY: the context was retained, and `device` releases it after this.
        let _current = unsafe { Current::enter(context) }?;
        for ours in &mut device.streams {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            ours.get_mut().unwrap_or_else(PoisonError::into_inner).stream = stream;
        }
        Ok(device)
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// As the driver calls it: `"NVIDIA H200"`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes its context this thread's.
    pub(super) fn enter(&self, doing: &'static str) -> Result<Current> {
        self.check_process()?;
        // SAFETY: `self` has retained the context.
        unsafe { Current::enter(self.context) }.map_err(|e| failed(e, doing, self.ordinal))
    }

    /// One of our streams, to put a row of copies on.
    pub(super) fn copy_stream(&self, direction: Direction) -> MutexGuard<'_, CopyStream> {
        self.streams[direction as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(failed(DriverError(sys::CUresult::CUDA_ERROR_NOT_INITIALIZED), "using", self.ordinal))
    }

    /// An event, new or used before. In the device's context.
    fn take_event(&self) -> DriverResult<CUevent> {
        let known = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        known.map_or_else(|| result::event::create(CUevent_flags::CU_EVENT_DEFAULT), Ok)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}: {})", self.ordinal, self.name)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return; // a forked child: all this is the parent's
        }
        // SAFETY: all are this device's own, and every copy that was put on the streams has ended:
        // who started one holds the device until then. Fails only where the driver is going away.
        unsafe {
            if let Ok(_current) = Current::enter(self.context) {
                for event in self.events.get_mut().unwrap_or_else(PoisonError::into_inner) {
                    let _ = result::event::destroy(*event);
                }
                for stream in &mut self.streams {
                    let stream = stream.get_mut().unwrap_or_else(PoisonError::into_inner).stream;
                    if !stream.is_null() {
                        let _ = result::stream::destroy(stream);
                    }
                }
            }
            let _ = result::primary_ctx::release(self.raw);
        }
    }
}

impl CopyStream {
    fn new(stream: CUstream) -> Mutex<Self> {
        Mutex::new(Self { stream, last: Weak::new() })
    }

    /// Makes all later work on the stream wait for `events`, unless it does already, and returns an
    /// event after which the next copy can begin: the one after the copies before it while they run, a
    /// new one otherwise. Call this with the device's context current.
    pub fn begin_after(
        &self,
        device: &Arc<Device>,
        events: &[Arc<ReadyEvent>],
        to: Direction,
    ) -> DriverResult<Arc<Event>> {
        let mut waits = false;
        for ready_event in events {
            let awaited = &ready_event.awaited[to as usize];
            if !awaited.load(Relaxed) {
                let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                // SAFETY: our own live stream; a live event.
                unsafe { result::stream::wait_event(self.stream, ready_event.event.raw, flags) }?;
                awaited.store(true, Relaxed);
                waits = true;
            }
        }
        if !waits
            && let Some(last) = self.last.upgrade()
            && !last.has_completed()?
        {
            return Ok(last);
        }
        // SAFETY: as above.
        unsafe { Event::record(device, self.stream) }.map(Arc::new)
    }
}

/// An event of a device's, which gets it back.
#[derive(Debug)]
pub(super) struct Event {
    device: Arc<Device>,
    raw: CUevent,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is recorded on a stream now. Called with the device's context current.
    ///
    /// # Safety
    /// The stream is one of the device's.
    pub unsafe fn record(device: &Arc<Device>, stream: CUstream) -> DriverResult<Self> {
        let event = Self { device: device.clone(), raw: device.take_event()? };
        // SAFETY: a live event; the stream is the same context's, by the contract.
        unsafe { result::event::record(event.raw, stream) }?;
        Ok(event)
    }

    /// Whether the work before it on its stream has ended.
    pub fn has_completed(&self) -> DriverResult<bool> {
        // SAFETY: a live event.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Seconds from an earlier event to this one, as the GPU measured them. Both have completed.
    pub fn seconds_since(&self, earlier: &Self) -> f64 {
        // SAFETY: live events with timing, both recorded.
        let elapsed = unsafe { result::event::elapsed(earlier.raw, self.raw) };
        elapsed.map_or(0.0, |milliseconds| f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.events.lock().unwrap_or_else(PoisonError::into_inner).push(self.raw);
    }
}

/// An event on the stream that produces tensors: once it has completed, their memory may be copied.
#[derive(Debug)]
pub(crate) struct ReadyEvent {
    device: Arc<Device>,
    event: Event,
    /// Whether each of our streams waits for it already. Used under that stream's lock.
    awaited: [AtomicBool; 2],
}

impl ReadyEvent {
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

/// The ready events of one save or load: one on each stream that produces its tensors, recorded when
/// the first tensor of that stream is named.
///
/// Copies of the tensors named with it wait for these events, and for nothing that is put on the
/// streams later. So make one for each save or load, and queue no work between its tensors.
#[derive(Debug, Default)]
pub struct Ready {
    events: HashMap<(u32, StreamHandle), Arc<ReadyEvent>>,
}

impl Ready {
    /// The ready event on a stream of the GPU of this number.
    ///
    /// # Safety
    /// The stream is one of that GPU's primary context, and not destroyed yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a stream that is being captured into a CUDA graph, and without a
    /// driver; [`Error::Gpu`] when the driver refuses.
    pub(crate) unsafe fn event(
        &mut self,
        ordinal: u32,
        stream: StreamHandle,
    ) -> Result<Arc<ReadyEvent>> {
        if let Some(ready_event) = self.events.get(&(ordinal, stream)) {
            return Ok(ready_event.clone());
        }
        let device = Device::get(ordinal)?;
        // SAFETY: the same contract.
        let event = unsafe { record(&device, stream as CUstream) }?;
        let ready_event = Arc::new(ReadyEvent { device, event, awaited: Default::default() });
        self.events.insert((ordinal, stream), ready_event.clone());
        Ok(ready_event)
    }
}

/// Records an event on a producer's stream.
///
/// # Safety
/// The stream is one of the device's.
unsafe fn record(device: &Arc<Device>, stream: CUstream) -> Result<Event> {
    const DOING: &str = "recording an event on a stream of";
    let _current = device.enter(DOING)?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a live stream by the contract; `status` is written to.
    let asked = unsafe { sys::cuStreamIsCapturing(stream, &mut status) }.result();
    // The legacy default stream waits for others: an event on it would spoil what they capture.
    let implicit = asked == Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    if implicit || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Err(Error::Unsupported {
            what: "the stream that the tensors are ready on is being captured into a CUDA graph"
                .into(),
            remedy: "save or load before the capture begins or after it has ended".into(),
        });
    }
    checked(asked, DOING, device.ordinal)?;
    // SAFETY: the same contract.
    unsafe { Event::record(device, stream) }.map_err(|e| failed(e, DOING, device.ordinal))
}
