//! Device memory and the registration of host memory.

use super::{Call, Needs, call, put};
use crate::abi::{Code, DevicePtr, Handle, INVALID_VALUE, NOT_SUPPORTED};
use crate::context;
use crate::driver::driver;
use crate::stream::Work;
use std::ffi::{c_int, c_uint};

impl Call {
    /// # Errors
    /// Those of [`crate::memory::Memory::allocate`].
    fn allocate(&mut self, len: usize) -> Result<DevicePtr, Code> {
        let options = self.state.options.clone();
        let device = context::device_of(self.context);
        let context = self.context;
        self.state.memory.allocate(device, context, len, options.memory_bytes, options.open)
    }

    /// That `address` is the start of an allocation which nobody has freed.
    ///
    /// # Errors
    /// `INVALID_VALUE`, and a violation is noted.
    fn check_start(&mut self, address: DevicePtr) -> Result<(), Code> {
        match self.state.memory.allocations.get(&address) {
            Some(found) if !found.is_freeing => Ok(()),
            _ => {
                let what = format!("{address:#x} freed, which is not the start of an allocation");
                self.state.control.violation(what);
                Err(INVALID_VALUE)
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(out: *mut DevicePtr, len: usize) -> Code {
    call("cuMemAlloc_v2", Needs::Context, |mut call| {
        // SAFETY: the caller's promise.
        unsafe { put(out, call.allocate(len)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(out: *mut DevicePtr, len: usize, stream: Handle) -> Code {
    call("cuMemAllocAsync", Needs::Context, |mut call| {
        call.state.own_stream(call.context, stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, call.allocate(len)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(address: DevicePtr) -> Code {
    call("cuMemFree_v2", Needs::Context, |mut call| {
        if address == 0 {
            return Ok(());
        }
        call.check_start(address)?;
        call.state.free_now(address);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(address: DevicePtr, stream: Handle) -> Code {
    call("cuMemFreeAsync", Needs::Context, |mut call| {
        if address == 0 {
            return Err(INVALID_VALUE);
        }
        call.check_start(address)?;
        if call.state.contexts.lost(call.context).is_some() {
            call.state.free_now(address);
            return Ok(());
        }
        let stream = call.state.own_stream(call.context, stream)?;
        if let Some(freed) = call.state.memory.allocations.get_mut(&address) {
            freed.is_freeing = true;
        }
        call.state.submit(stream, None, Work::Free(address));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostRegister_v2(start: usize, len: usize, flags: c_uint) -> Code {
    call("cuMemHostRegister_v2", Needs::Context, |mut call| {
        let context = call.context;
        call.state.memory.register(start, len, flags, context)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostUnregister(start: usize) -> Code {
    call("cuMemHostUnregister", Needs::Context, |mut call| {
        let range = call.state.memory.unregister(start)?;
        let pending = call.state.abandon(&range);
        if pending > 0 {
            call.state.control.violation(format!(
                "host memory {start:#x} ({} bytes) unregistered while {pending} copies use it",
                range.end - range.start
            ));
        }
        // The program may unmap it next: no worker may be on it then.
        drop(driver().wait_until(call.state, |state| !state.is_in_use(&range)));
        Ok(())
    })
}

/// The Python package asks whose memory it is, and nothing else.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(out: usize, attribute: c_uint, address: u64) -> Code {
    const DEVICE_ORDINAL: c_uint = 9;
    call("cuPointerGetAttribute", Needs::Init, |call| {
        let memory = &call.state.memory;
        let allocated = memory.allocation_at(address).map(|(_, found)| found.context);
        let registered = || Some(memory.registration_at(address as usize)?.1.context);
        let context = allocated.or_else(registered).ok_or(INVALID_VALUE)?;
        if attribute != DEVICE_ORDINAL {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller's promise.
        unsafe { put(out as *mut c_int, context::device_of(context) as c_int) }
    })
}
