//! Events: a place in a stream, and when the stream came to it.

use crate::abi::{
    CAPTURED_EVENT, Code, EVENT_DISABLE_TIMING, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY,
};
use crate::driver::State;
use crate::stream::Place;
use std::time::Instant;

#[derive(Clone, Copy)]
pub struct Event {
    pub context: Handle,
    flags: u32,
    recorded: Recorded,
}

#[derive(Clone, Copy)]
enum Recorded {
    Never,
    In(Place, Option<Instant>),
    /// On a stream that was being captured: no work that runs stands behind it.
    Captured,
}

impl State {
    /// # Errors
    /// `INVALID_VALUE` for unknown flags.
    pub fn create_event(&mut self, context: Handle, flags: u32) -> Result<Handle, Code> {
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = self.new_handle();
        self.events.insert(handle, Event { context, flags, recorded: Recorded::Never });
        Ok(handle)
    }

    /// # Errors
    /// `INVALID_HANDLE`; the error its context is lost to.
    pub fn event(&self, handle: Handle) -> Result<Event, Code> {
        let event = *self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        self.healthy(event.context)?;
        Ok(event)
    }

    /// What the event waits for, `None` when that is nothing.
    ///
    /// # Errors
    /// `CAPTURED_EVENT`, and those of `event`.
    pub fn recorded(&self, handle: Handle) -> Result<Option<Place>, Code> {
        match self.event(handle)?.recorded {
            Recorded::Never => Ok(None),
            Recorded::In(place, _) => Ok(Some(place)),
            Recorded::Captured => Err(CAPTURED_EVENT),
        }
    }

    /// The event now stands for `place`; for a capture where there is none.
    pub fn set_recorded(&mut self, handle: Handle, place: Option<Place>) {
        let recorded = place.map_or(Recorded::Captured, |place| Recorded::In(place, None));
        if let Some(event) = self.events.get_mut(&handle) {
            event.recorded = recorded;
        }
    }

    /// A stream has come to `place`: the time counts unless the event was recorded anew since.
    pub fn stamp(&mut self, handle: Handle, place: Place) {
        if let Some(event) = self.events.get_mut(&handle)
            && let Recorded::In(awaited, at) = &mut event.recorded
            && *awaited == place
        {
            *at = Some(Instant::now());
        }
    }

    /// Milliseconds between two events.
    ///
    /// # Errors
    /// `INVALID_HANDLE` where one was never recorded, takes no time, or is of another context;
    /// `NOT_READY` before both have completed.
    pub fn elapsed_ms(&self, start: Handle, end: Handle) -> Result<f32, Code> {
        if self.event(start)?.context != self.event(end)?.context {
            return Err(INVALID_HANDLE);
        }
        let (start, end) = (self.completed_at(start)?, self.completed_at(end)?);
        let forth = end.saturating_duration_since(start).as_secs_f32();
        let back = start.saturating_duration_since(end).as_secs_f32();
        Ok((forth - back) * 1000.0)
    }

    fn completed_at(&self, handle: Handle) -> Result<Instant, Code> {
        let event = self.event(handle)?;
        match event.recorded {
            _ if event.flags & EVENT_DISABLE_TIMING != 0 => Err(INVALID_HANDLE),
            Recorded::Never => Err(INVALID_HANDLE),
            Recorded::Captured => Err(CAPTURED_EVENT),
            Recorded::In(_, at) => at.ok_or(NOT_READY),
        }
    }
}
