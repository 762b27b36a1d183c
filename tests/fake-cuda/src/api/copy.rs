//! Copies and memsets.

use super::{Call, Needs, call};
use crate::abi::{
    Code, DevicePtr, Handle, INVALID_VALUE, MAX_PITCH, Memcpy2d, STREAM_CAPTURE_UNSUPPORTED,
    TYPE_DEVICE, TYPE_HOST, TYPE_UNIFIED,
};
use crate::memory::HostRange;
use crate::stream::{Copy2d, Place, Work};
use std::ops::Range;

/// Where an end of a copy is said to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Host,
    Device,
    /// The address tells.
    Either,
}

/// A copy as the program asks for it.
struct Request {
    copy: Copy2d,
    from: Side,
    to: Side,
}

impl Request {
    fn row(from: (Side, u64), to: (Side, u64), len: usize) -> Self {
        let copy = Copy2d {
            from: from.1,
            from_pitch: len,
            to: to.1,
            to_pitch: len,
            width: len,
            height: 1,
        };
        Self { copy, from: from.0, to: to.0 }
    }

    /// # Errors
    /// `INVALID_VALUE` for rows wider than a pitch, pitches beyond the device's, arrays.
    fn rows(asked: &Memcpy2d) -> Result<Self, Code> {
        let side = |kind, host: usize, device| match kind {
            TYPE_HOST => Ok((Side::Host, host as u64)),
            TYPE_DEVICE => Ok((Side::Device, device)),
            TYPE_UNIFIED => Ok((Side::Either, device)),
            _ => Err(INVALID_VALUE),
        };
        let (from, from_base) = side(asked.src_type, asked.src_host, asked.src_device)?;
        let (to, to_base) = side(asked.dst_type, asked.dst_host, asked.dst_device)?;
        let first = |base: u64, x: usize, y: usize, pitch: usize| {
            let row_end = x.checked_add(asked.width_bytes).ok_or(INVALID_VALUE)?;
            if row_end > pitch || pitch > MAX_PITCH {
                return Err(INVALID_VALUE);
            }
            let last = y.checked_add(asked.height).and_then(|rows| rows.checked_mul(pitch));
            last.and_then(|bytes| base.checked_add(bytes as u64)).ok_or(INVALID_VALUE)?;
            Ok(base + (y * pitch + x) as u64)
        };
        let copy = Copy2d {
            from: first(from_base, asked.src_x_bytes, asked.src_y, asked.src_pitch)?,
            from_pitch: asked.src_pitch,
            to: first(to_base, asked.dst_x_bytes, asked.dst_y, asked.dst_pitch)?,
            to_pitch: asked.dst_pitch,
            width: asked.width_bytes,
            height: asked.height,
        };
        Ok(Self { copy, from, to })
    }
}

impl Call {
    /// Checks both ends and queues the copy. Whether it is asynchronous, and where it stands in the
    /// stream (nowhere if that is being captured, or nothing is to be copied).
    fn queue(
        &mut self,
        function: &str,
        request: &Request,
        stream: Handle,
    ) -> Result<(bool, Option<Place>), Code> {
        let stream = self.state.own_stream(self.context, stream)?;
        let copy = request.copy;
        if copy.width == 0 || copy.height == 0 {
            return Ok((true, None));
        }
        let from = self.check_side(function, request.from, &copy.source())?;
        let to = self.check_side(function, request.to, &copy.target())?;
        let is_asynchronous = from && to;
        if !is_asynchronous && self.state.captures.is_capturing(stream) {
            self.state.captures.invalidate(stream);
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok((is_asynchronous, self.state.submit(stream, None, Work::Copy(copy))))
    }

    /// Whether this end of a copy lets it be asynchronous.
    ///
    /// # Errors
    /// `INVALID_VALUE`; a violation too for what is not all in one allocation.
    fn check_side(&mut self, function: &str, side: Side, range: &Range<u64>) -> Result<bool, Code> {
        let is_device = self.state.memory.is_device(range.start);
        if range.end < range.start || range.start == 0 {
            return Err(INVALID_VALUE);
        }
        if side == Side::Device || is_device {
            return self.check_device_side(function, side, range).map(|()| true);
        }
        match self.state.memory.host_range(range, self.context) {
            HostRange::Registered => Ok(true),
            HostRange::Pageable => Ok(false),
            HostRange::Partly => Err(INVALID_VALUE),
        }
    }

    fn check_device_side(
        &mut self,
        function: &str,
        side: Side,
        range: &Range<u64>,
    ) -> Result<(), Code> {
        let what = match side {
            Side::Host => "device memory where host memory is due",
            _ if self.state.memory.is_allocated(range) => return Ok(()),
            _ => "not all in one allocation",
        };
        let (start, len) = (range.start, range.end - range.start);
        self.state.control.violation(format!("{function}: {start:#x} ({len} bytes): {what}"));
        Err(INVALID_VALUE)
    }

    /// Waits for a copy to be done.
    fn finish(self, place: Option<Place>) -> Result<(), Code> {
        let Some(place) = place else { return Ok(()) };
        let context = self.context;
        self.wait_until(|state| state.is_done(place), context).map(drop)
    }
}

fn copy_async(
    function: &'static str,
    stream: Handle,
    request: impl FnOnce() -> Result<Request, Code>,
) -> Code {
    call(function, Needs::Context, |mut call| {
        if stream <= 1 {
            call.state.control.count("default-stream-copies");
        }
        let (is_asynchronous, place) = call.queue(function, &request()?, stream)?;
        if is_asynchronous { Ok(()) } else { call.finish(place) }
    })
}

/// On the default stream, done when it returns.
fn copy_now(function: &'static str, request: Request) -> Code {
    call(function, Needs::Context, |mut call| {
        let (_, place) = call.queue(function, &request, 0)?;
        call.finish(place)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: usize,
    from: DevicePtr,
    len: usize,
    stream: Handle,
) -> Code {
    copy_async("cuMemcpyDtoHAsync_v2", stream, || {
        Ok(Request::row((Side::Device, from), (Side::Host, to as u64), len))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: DevicePtr,
    from: usize,
    len: usize,
    stream: Handle,
) -> Code {
    copy_async("cuMemcpyHtoDAsync_v2", stream, || {
        Ok(Request::row((Side::Host, from as u64), (Side::Device, to), len))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: DevicePtr,
    from: DevicePtr,
    len: usize,
    stream: Handle,
) -> Code {
    copy_async("cuMemcpyDtoDAsync_v2", stream, || {
        Ok(Request::row((Side::Device, from), (Side::Device, to), len))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(asked: *const Memcpy2d, stream: Handle) -> Code {
    copy_async("cuMemcpy2DAsync_v2", stream, || {
        // SAFETY: the caller's promise that it is null or points to one.
        Request::rows(unsafe { asked.as_ref() }.ok_or(INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: usize, from: DevicePtr, len: usize) -> Code {
    let request = Request::row((Side::Device, from), (Side::Host, to as u64), len);
    copy_now("cuMemcpyDtoH_v2", request)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: DevicePtr, from: usize, len: usize) -> Code {
    let request = Request::row((Side::Host, from as u64), (Side::Device, to), len);
    copy_now("cuMemcpyHtoD_v2", request)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: DevicePtr, value: u8, len: usize, stream: Handle) -> Code {
    call("cuMemsetD8Async", Needs::Context, |mut call| {
        fill(&mut call, to, value, len, stream).map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8_v2(to: DevicePtr, value: u8, len: usize) -> Code {
    call("cuMemsetD8_v2", Needs::Context, |mut call| {
        let place = fill(&mut call, to, value, len, 0)?;
        call.finish(place)
    })
}

fn fill(
    call: &mut Call,
    to: DevicePtr,
    value: u8,
    len: usize,
    stream: Handle,
) -> Result<Option<Place>, Code> {
    let stream = call.state.own_stream(call.context, stream)?;
    let end = to.checked_add(len as u64).ok_or(INVALID_VALUE)?;
    if len == 0 {
        return Ok(None);
    }
    call.check_device_side("memset", Side::Device, &(to..end))?;
    Ok(call.state.submit(stream, None, Work::Fill { to, value, len }))
}
