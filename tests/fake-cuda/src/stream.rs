//! Streams: a queue of operations each, in order with what of other streams they come after.

use crate::abi::{Code, DevicePtr, Handle, HostFn, INVALID_HANDLE, STREAM_CAPTURE_UNSUPPORTED};
use crate::driver::{State, driver};
use crate::worker;
use std::collections::VecDeque;
use std::ops::Range;
use std::thread::{self, ThreadId};

/// What comes before its end: the first `seq` operations of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub stream: Handle,
    pub seq: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The default stream of a context: in order with all but the non-blocking ones.
    Legacy,
    PerThread(ThreadId),
    Blocking,
    NonBlocking,
}

pub struct Stream {
    pub context: Handle,
    pub kind: Kind,
    pub queue: VecDeque<Operation>,
    pub running: Option<Work>,
    /// The running operation is past its delay: its memory is being read and written.
    pub is_copying: bool,
    submitted: u64,
    pub completed: u64,
    /// No call takes the handle any more; what is queued is still done.
    is_destroyed: bool,
}

pub struct Operation {
    pub after: Vec<Place>,
    pub work: Work,
}

/// Values only, so that it can be looked at while it runs.
#[derive(Clone, Copy)]
pub enum Work {
    Copy(Copy2d),
    Fill {
        to: DevicePtr,
        value: u8,
        len: usize,
    },
    Record(Handle),
    Call {
        function: HostFn,
        argument: usize,
    },
    Free(DevicePtr),
    /// Waits for what it comes after.
    Wait,
}

/// `height` rows of `width` bytes; addresses of the host or of a device, pitches in bytes.
#[derive(Clone, Copy)]
pub struct Copy2d {
    pub from: u64,
    pub from_pitch: usize,
    pub to: u64,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

impl Copy2d {
    /// All bytes between the first and the last that are read.
    pub fn source(&self) -> Range<u64> {
        self.from..self.from.wrapping_add(self.extent(self.from_pitch))
    }

    /// All bytes between the first and the last that are written.
    pub fn target(&self) -> Range<u64> {
        self.to..self.to.wrapping_add(self.extent(self.to_pitch))
    }

    fn extent(&self, pitch: usize) -> u64 {
        if self.width == 0 || self.height == 0 {
            return 0;
        }
        ((self.height - 1) * pitch + self.width) as u64
    }
}

impl Work {
    /// Bytes moved; `None` for what moves none.
    pub fn bytes(&self) -> Option<usize> {
        match self {
            Self::Copy(copy) => Some(copy.width * copy.height),
            Self::Fill { len, .. } => Some(*len),
            _ => None,
        }
    }

    fn uses(&self, range: &Range<u64>) -> bool {
        let overlaps = |used: Range<u64>| used.start < range.end && range.start < used.end;
        match self {
            Self::Copy(copy) => overlaps(copy.source()) || overlaps(copy.target()),
            Self::Fill { to, len, .. } => overlaps(*to..*to + *len as u64),
            _ => false,
        }
    }
}

impl State {
    pub fn create_stream(&mut self, context: Handle, kind: Kind) -> Handle {
        let handle = self.new_handle();
        let stream = Stream {
            context,
            kind,
            queue: VecDeque::new(),
            running: None,
            is_copying: false,
            submitted: 0,
            completed: 0,
            is_destroyed: false,
        };
        self.streams.insert(handle, stream);
        let worker =
            thread::Builder::new().name("fake-cuda".into()).spawn(move || worker::serve(handle));
        worker.expect("a thread for the stream");
        handle
    }

    /// The stream behind a handle, where 0 and 1 are the default stream of the current context and
    /// 2 is the calling thread's.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the error its context is lost to.
    pub fn stream(&mut self, current: Handle, handle: Handle) -> Result<Handle, Code> {
        match handle {
            0 | 1 => return Ok(self.implicit_stream(current, Kind::Legacy)),
            2 => return Ok(self.implicit_stream(current, Kind::PerThread(thread::current().id()))),
            _ => {}
        }
        let found = self.streams.get(&handle).filter(|stream| !stream.is_destroyed);
        let context = found.ok_or(INVALID_HANDLE)?.context;
        self.healthy(context)?;
        Ok(handle)
    }

    /// Whether a handle is that of a stream which the program created and has not destroyed.
    pub fn is_stream(&self, handle: Handle) -> bool {
        self.streams.get(&handle).is_some_and(|stream| !stream.is_destroyed)
    }

    /// A call that waits for a stream cannot be captured: it breaks the capture.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED`.
    pub fn refuse_captured(&mut self, stream: Handle) -> Result<(), Code> {
        if !self.captures.is_capturing(stream) {
            return Ok(());
        }
        self.captures.invalidate(stream);
        Err(STREAM_CAPTURE_UNSUPPORTED)
    }

    /// As `stream`, of the current context only.
    ///
    /// # Errors
    /// Those of `stream`; `INVALID_HANDLE` for a stream of another context.
    pub fn own_stream(&mut self, current: Handle, handle: Handle) -> Result<Handle, Code> {
        let stream = self.stream(current, handle)?;
        if self.streams[&stream].context != current {
            return Err(INVALID_HANDLE);
        }
        Ok(stream)
    }

    fn implicit_stream(&mut self, context: Handle, kind: Kind) -> Handle {
        let existing = self.alive(context).find(|(_, stream)| stream.kind == kind);
        let existing = existing.map(|(handle, _)| handle);
        existing.unwrap_or_else(|| self.create_stream(context, kind))
    }

    fn alive(&self, context: Handle) -> impl Iterator<Item = (Handle, &Stream)> {
        let streams = self.streams.iter().map(|(&handle, stream)| (handle, stream));
        streams.filter(move |(_, stream)| stream.context == context && !stream.is_destroyed)
    }

    /// Queues an operation, after `extra` too. Where it stands, or `None` for a stream that is
    /// being captured: there it is not executed.
    pub fn submit(&mut self, stream: Handle, extra: Option<Place>, work: Work) -> Option<Place> {
        if self.captures.is_capturing(stream) {
            return None;
        }
        let mut after = self.implied(stream);
        after.extend(extra);
        let found = self.streams.get_mut(&stream).expect("looked up by the caller");
        found.submitted += 1;
        found.queue.push_back(Operation { after, work });
        let seq = found.submitted;
        driver().notify();
        Some(Place { stream, seq })
    }

    /// What the default stream's ordering puts before the next operation of `stream`.
    fn implied(&self, stream: Handle) -> Vec<Place> {
        let Stream { context, kind, .. } = self.streams[&stream];
        let comes_before = |other: Kind| match kind {
            Kind::Legacy => other != Kind::NonBlocking && other != Kind::Legacy,
            Kind::NonBlocking => false,
            Kind::Blocking | Kind::PerThread(_) => other == Kind::Legacy,
        };
        let before = self.alive(context).filter(|(_, other)| comes_before(other.kind));
        before.map(|(stream, other)| Place { stream, seq: other.submitted }).collect()
    }

    /// All that has been submitted to the stream, and what that comes after.
    pub fn so_far(&self, stream: Handle) -> Vec<Place> {
        let mut places = self.implied(stream);
        places.push(Place { stream, seq: self.streams[&stream].submitted });
        places
    }

    /// All that has been submitted to the streams of a context, destroyed ones too.
    pub fn all_so_far(&self, context: Handle) -> Vec<Place> {
        let streams = self.streams.iter().filter(|(_, stream)| stream.context == context);
        streams.map(|(&stream, found)| Place { stream, seq: found.submitted }).collect()
    }

    pub fn is_done(&self, place: Place) -> bool {
        self.streams.get(&place.stream).is_none_or(|stream| stream.completed >= place.seq)
    }

    pub fn are_done(&self, places: &[Place]) -> bool {
        places.iter().all(|&place| self.is_done(place))
    }

    /// Its worker ends when the queue is empty.
    pub fn destroy_stream(&mut self, stream: Handle) {
        if let Some(found) = self.streams.get_mut(&stream) {
            found.is_destroyed = true;
        }
        self.captures.forget(stream);
        driver().notify();
    }

    pub fn destroy_streams_of(&mut self, context: Handle) {
        let streams: Vec<Handle> = self.alive(context).map(|(handle, _)| handle).collect();
        streams.into_iter().for_each(|stream| self.destroy_stream(stream));
    }

    /// Streams that the program created and has not destroyed.
    pub fn live_streams(&self) -> usize {
        let created = |kind| matches!(kind, Kind::Blocking | Kind::NonBlocking);
        self.streams.values().filter(|stream| !stream.is_destroyed && created(stream.kind)).count()
    }

    /// Takes a range out of all work that is not done, because its memory goes away; queued copies
    /// that use it will not be executed. How many there are.
    pub fn abandon(&mut self, range: &Range<u64>) -> usize {
        let mut count = 0;
        for stream in self.streams.values_mut() {
            let queued = stream.queue.iter_mut().map(|operation| &mut operation.work);
            // What is past its delay cannot be stopped.
            let running = stream.running.as_mut().filter(|_| !stream.is_copying);
            for work in queued.chain(running).filter(|work| work.uses(range)) {
                *work = Work::Wait;
                count += 1;
            }
            count += usize::from(stream.is_copying_in(range));
        }
        count
    }

    /// Whether a worker is reading or writing the range at this moment.
    pub fn is_in_use(&self, range: &Range<u64>) -> bool {
        self.streams.values().any(|stream| stream.is_copying_in(range))
    }

    /// Whether the worker of `stream` has something to do now.
    pub fn is_ready(&self, stream: Handle) -> bool {
        let found = &self.streams[&stream];
        match found.queue.front() {
            Some(next) => !self.control.is_held() && self.are_done(&next.after),
            None => found.is_destroyed,
        }
    }

    /// For its worker.
    pub fn running(&mut self, stream: Handle) -> &mut Stream {
        self.streams.get_mut(&stream).expect("removed by its worker only")
    }
}

impl Stream {
    fn is_copying_in(&self, range: &Range<u64>) -> bool {
        self.is_copying && self.running.is_some_and(|work| work.uses(range))
    }
}
