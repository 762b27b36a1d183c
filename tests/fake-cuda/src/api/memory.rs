//! Device memory and the registration of host memory.

use super::{Call, Needs, call, put};
use crate::abi::{Code, DevicePtr, Handle, INVALID_VALUE, NOT_SUPPORTED, TYPE_DEVICE, TYPE_HOST};
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
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    call("cuMemGetInfo_v2", Needs::Context, |call| {
        let capacity = call.state.options.memory_bytes;
        let used = call.state.memory.allocated_on(context::device_of(call.context));
        // SAFETY: the caller's promise.
        unsafe {
            put(free, capacity - used)?;
            put(total, capacity)
        }
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

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetFlags(out: *mut c_uint, address: usize) -> Code {
    call("cuMemHostGetFlags", Needs::Context, |call| {
        let (_, found) = call.state.memory.registration_at(address).ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, found.flags) }
    })
}

/// What `cuPointerGetAttribute` tells of an address, of a device or registered.
struct Known {
    context: Handle,
    memory_type: c_uint,
    start: u64,
    len: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(out: usize, attribute: c_uint, address: u64) -> Code {
    call("cuPointerGetAttribute", Needs::Init, |call| {
        let known = call.know(address).ok_or(INVALID_VALUE)?;
        let ordinal = context::device_of(known.context) as c_int;
        // SAFETY: the caller's promise that there is room for what the attribute is, for all arms.
        unsafe {
            match attribute {
                1 => put(out as *mut Handle, known.context), // CONTEXT
                2 => put(out as *mut c_uint, known.memory_type), // MEMORY_TYPE
                3 => put(out as *mut u64, address),          // DEVICE_POINTER
                4 if known.memory_type == TYPE_HOST => put(out as *mut u64, address), // HOST_POINTER
                4 => Err(INVALID_VALUE),
                8 => put(out as *mut c_uint, 0),      // IS_MANAGED
                9 => put(out as *mut c_int, ordinal), // DEVICE_ORDINAL
                11 => put(out as *mut u64, known.start), // RANGE_START_ADDR
                12 => put(out as *mut usize, known.len), // RANGE_SIZE
                13 => put(out as *mut c_uint, 1),     // MAPPED
                _ => Err(NOT_SUPPORTED),
            }
        }
    })
}

impl Call {
    fn know(&self, address: u64) -> Option<Known> {
        let memory = &self.state.memory;
        if let Some((start, found)) = memory.allocation_at(address) {
            let (context, len) = (found.context, found.len);
            return Some(Known { context, memory_type: TYPE_DEVICE, start, len });
        }
        let (start, found) = memory.registration_at(address as usize)?;
        let (context, len) = (found.context, found.len);
        Some(Known { context, memory_type: TYPE_HOST, start: start as u64, len })
    }
}
