//! Events.

use super::{Needs, call, put};
use crate::abi::{Code, Handle, INVALID_HANDLE, NOT_READY};
use crate::stream::Work;
use std::ffi::c_uint;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(out: *mut Handle, flags: c_uint) -> Code {
    call("cuEventCreate", Needs::Context, |mut call| {
        let event = call.state.create_event(call.context, flags)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, event) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Code {
    call("cuEventRecord", Needs::Context, |mut call| {
        let stream = call.state.stream(call.context, stream)?;
        if call.state.event(event)?.context != call.state.streams[&stream].context {
            return Err(INVALID_HANDLE);
        }
        let place = call.state.submit(stream, None, Work::Record(event));
        if place.is_none() {
            call.state.control.violation("event recorded on a stream being captured".into());
        }
        call.state.set_recorded(event, place);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(event: Handle) -> Code {
    call("cuEventQuery", Needs::Context, |call| match call.state.recorded(event)? {
        Some(place) if !call.state.is_done(place) => Err(NOT_READY),
        _ => Ok(()),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: Handle, end: Handle) -> Code {
    call("cuEventElapsedTime", Needs::Context, |call| {
        // SAFETY: the caller's promise.
        unsafe { put(out, call.state.elapsed_ms(start, end)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(event: Handle) -> Code {
    call("cuEventDestroy_v2", Needs::Context, |mut call| {
        call.state.events.remove(&event).map(drop).ok_or(INVALID_HANDLE)
    })
}
