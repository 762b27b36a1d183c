//! Streams and their capture.

use super::{Needs, call, put};
use crate::abi::{
    Code, Handle, HostFn, INVALID_HANDLE, INVALID_VALUE, STREAM_CAPTURE_ISOLATION,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_NON_BLOCKING,
};
use crate::capture::{Mode, exchange_mode};
use crate::stream::{Kind, Work};
use std::ffi::c_uint;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(out: *mut Handle, flags: c_uint) -> Code {
    call("cuStreamCreate", Needs::Context, |mut call| {
        let kind = match flags {
            0 => Kind::Blocking,
            STREAM_NON_BLOCKING => Kind::NonBlocking,
            _ => return Err(INVALID_VALUE),
        };
        let context = call.context;
        // SAFETY: the caller's promise.
        unsafe { put(out, call.state.create_stream(context, kind)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Code {
    call("cuStreamDestroy_v2", Needs::Context, |mut call| {
        if stream <= 2 || !call.state.is_stream(stream) {
            return Err(INVALID_HANDLE);
        }
        call.state.destroy_stream(stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(stream: Handle) -> Code {
    call("cuStreamSynchronize", Needs::Context, |mut call| {
        let stream = call.state.stream(call.context, stream)?;
        call.state.refuse_captured(stream)?;
        let places = call.state.so_far(stream);
        let context = call.state.streams[&stream].context;
        call.wait_until(|state| state.are_done(&places), context).map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Code {
    call("cuStreamWaitEvent", Needs::Context, |mut call| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let stream = call.state.stream(call.context, stream)?;
        let Some(place) = call.state.recorded(event)? else { return Ok(()) };
        if call.state.captures.is_capturing(stream) {
            call.state.captures.invalidate(stream);
            return Err(STREAM_CAPTURE_ISOLATION);
        }
        call.state.submit(stream, Some(place), Work::Wait);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    stream: Handle,
    function: Option<HostFn>,
    argument: usize,
) -> Code {
    call("cuLaunchHostFunc", Needs::Context, |mut call| {
        let function = function.ok_or(INVALID_VALUE)?;
        let stream = call.state.own_stream(call.context, stream)?;
        call.state.submit(stream, None, Work::Call { function, argument });
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, out: *mut c_uint) -> Code {
    call("cuStreamIsCapturing", Needs::Context, |mut call| {
        let stream = call.state.stream(call.context, stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, call.state.captures.status(stream)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) -> Code {
    call("cuStreamBeginCapture_v2", Needs::Context, |mut call| {
        let mode = Mode::from_raw(mode).ok_or(INVALID_VALUE)?;
        let stream = call.state.stream(call.context, stream)?;
        if call.state.streams[&stream].kind == Kind::Legacy {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        call.state.captures.begin(stream, mode)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Code {
    call("cuStreamEndCapture", Needs::Context, |mut call| {
        let stream = call.state.stream(call.context, stream)?;
        // SAFETY: the caller's promise, here and below.
        unsafe { put(graph, 0)? };
        call.state.captures.end(stream)?;
        let handle = call.state.new_handle();
        // SAFETY: see above.
        unsafe { put(graph, handle) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> Code {
    call("cuThreadExchangeStreamCaptureMode", Needs::Init, |_| {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        let wanted = Mode::from_raw(unsafe { mode.read() }).ok_or(INVALID_VALUE)?;
        // SAFETY: as above.
        unsafe { put(mode, exchange_mode(wanted) as c_uint) }
    })
}
