//! Device memory, its allocations, and registrations of host memory.
//!
//! A device's memory is a file in memory that is mapped twice: once where device pointers point,
//! with no access, and once as an alias that only the workers know.

use crate::abi::{
    Code, DevicePtr, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, Handle,
    INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY, REGISTER_PORTABLE,
};
use crate::driver::State;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, MsFlags, ProtFlags, madvise, mmap, msync};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::{self, NonNull};

/// Allocations start at, and take, whole pages, so that freed ones can be given back to the system.
const PAGE: usize = 4096;
/// A region has room for this many times its memory: addresses come again late, so that a pointer
/// to freed memory points to nothing.
const ADDRESSES_A_BYTE: usize = 4;
/// ... and for as many allocations of a page as a small device could be asked for.
const REGION_MIN: usize = 1 << 30;

#[derive(Default)]
pub struct Memory {
    regions: BTreeMap<usize, Region>,
    pub allocations: BTreeMap<DevicePtr, Allocation>,
    registrations: BTreeMap<usize, Registration>,
    pub allocated_peak: usize,
    pub registered_peak: usize,
}

struct Region {
    /// First device pointer.
    start: usize,
    /// First byte of the mapping that can be read and written.
    alias: usize,
    len: usize,
    /// Where the search for free addresses goes on, from `start`.
    cursor: usize,
}

#[derive(Clone, Copy)]
pub struct Allocation {
    pub len: usize,
    pub device: usize,
    pub context: Handle,
    /// Freed in the order of a stream that has not come to it yet.
    pub is_freeing: bool,
}

#[derive(Clone, Copy)]
pub struct Registration {
    pub len: usize,
    pub flags: u32,
    pub context: Handle,
}

/// How a range of host memory is known to a context.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HostRange {
    Registered,
    Pageable,
    /// Over the edge of a registration.
    Partly,
}

impl Region {
    fn map(len: usize, open: bool) -> nix::Result<Self> {
        let file = memfd_create("fake-cuda", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&file, len as i64)?;
        let map = |protection| {
            let len = NonZeroUsize::new(len).expect("a device has memory");
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
            // SAFETY: a new mapping where the kernel has room; it is never unmapped.
            unsafe { mmap(None, len, protection, flags, &file, 0) }
        };
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let visible = map(if open { access } else { ProtFlags::PROT_NONE })?;
        let alias = map(access)?;
        let (start, alias) = (visible.as_ptr() as usize, alias.as_ptr() as usize);
        Ok(Self { start, alias, len, cursor: 0 })
    }

    fn contains(&self, address: u64) -> bool {
        (self.start..self.start + self.len).contains(&(address as usize))
    }

    fn alias(&self, address: u64) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.alias + (address as usize - self.start))
    }
}

impl Memory {
    /// `len` bytes on `device`, which has `capacity` in all and is mapped with the first.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` over the capacity, `INVALID_VALUE` for 0 bytes, `OPERATING_SYSTEM` where no
    /// address space is left.
    pub fn allocate(
        &mut self,
        device: usize,
        context: Handle,
        len: usize,
        capacity: usize,
        open: bool,
    ) -> Result<DevicePtr, Code> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if len > capacity - self.allocated_on(device) {
            return Err(OUT_OF_MEMORY);
        }
        let taken = len.next_multiple_of(PAGE);
        if let Entry::Vacant(place) = self.regions.entry(device) {
            let room = capacity.next_multiple_of(PAGE).saturating_mul(ADDRESSES_A_BYTE);
            place.insert(Region::map(room.max(REGION_MIN), open).map_err(|_| OPERATING_SYSTEM)?);
        }
        let address = self.free_addresses(device, taken).ok_or(OUT_OF_MEMORY)?;
        let allocation = Allocation { len, device, context, is_freeing: false };
        self.allocations.insert(address, allocation);
        self.allocated_peak = self.allocated_peak.max(self.allocated());
        Ok(address)
    }

    /// Where `len` bytes are free: behind the latest allocation, from the start when the end is
    /// reached.
    fn free_addresses(&mut self, device: usize, len: usize) -> Option<DevicePtr> {
        let region = self.regions.get_mut(&device)?;
        let end = (region.start + region.len) as u64;
        let mut at = (region.start + region.cursor) as u64;
        let mut has_wrapped = false;
        loop {
            if at + len as u64 > end {
                if std::mem::replace(&mut has_wrapped, true) {
                    return None;
                }
                at = region.start as u64;
                continue;
            }
            // The last allocation that begins before the end of these.
            match self.allocations.range(..at + len as u64).next_back() {
                Some((&start, taken)) if pages_end(start, taken.len) > at => {
                    at = pages_end(start, taken.len);
                }
                _ => {
                    region.cursor = (at as usize - region.start) + len;
                    return Some(at);
                }
            }
        }
    }

    /// Forgets an allocation and its contents.
    pub fn free(&mut self, address: DevicePtr) {
        let Some(freed) = self.allocations.remove(&address) else { return };
        let region = &self.regions[&freed.device];
        let start = NonNull::new(region.alias(address).cast::<c_void>()).expect("mapped");
        let len = freed.len.next_multiple_of(PAGE);
        // SAFETY: pages of the alias that belong to this allocation alone.
        unsafe { madvise(start, len, MmapAdvise::MADV_REMOVE) }.expect("a file in memory");
    }

    pub fn is_device(&self, address: u64) -> bool {
        self.regions.values().any(|region| region.contains(address))
    }

    /// The allocation that a byte lies in, with its start.
    pub fn allocation_at(&self, address: DevicePtr) -> Option<(DevicePtr, Allocation)> {
        let (&start, &found) = self.allocations.range(..=address).next_back()?;
        (address < start + found.len as u64).then_some((start, found))
    }

    /// Whether the whole range lies in one allocation that nobody has freed.
    pub fn is_allocated(&self, range: &Range<u64>) -> bool {
        self.allocation_at(range.start).is_some_and(|(start, found)| {
            !found.is_freeing && range.end <= start + found.len as u64
        })
    }

    /// Where a worker finds the byte at `address`, of a device or of the host.
    pub fn reach(&self, address: u64) -> *mut u8 {
        match self.regions.values().find(|region| region.contains(address)) {
            Some(region) => region.alias(address),
            None => ptr::with_exposed_provenance_mut(address as usize),
        }
    }

    pub fn allocated_on(&self, device: usize) -> usize {
        let here = self.allocations.values().filter(|allocation| allocation.device == device);
        here.map(|allocation| allocation.len).sum()
    }

    pub fn allocated(&self) -> usize {
        self.allocations.values().map(|allocation| allocation.len).sum()
    }

    /// # Errors
    /// `INVALID_VALUE` for nothing, unknown flags or memory that is not mapped,
    /// `HOST_MEMORY_ALREADY_REGISTERED` where a part is registered.
    pub fn register(
        &mut self,
        start: usize,
        len: usize,
        flags: u32,
        context: Handle,
    ) -> Result<(), Code> {
        let end = start.checked_add(len).ok_or(INVALID_VALUE)?;
        if start == 0 || len == 0 || flags > 0xf || self.is_device(start as u64) {
            return Err(INVALID_VALUE);
        }
        if self.overlapping(&(start..end)).next().is_some() {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        if !is_mapped(start, end) {
            return Err(INVALID_VALUE);
        }
        self.registrations.insert(start, Registration { len, flags, context });
        self.registered_peak = self.registered_peak.max(self.registered());
        Ok(())
    }

    /// The range that was registered at `start`.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED`.
    pub fn unregister(&mut self, start: usize) -> Result<Range<u64>, Code> {
        let gone = self.registrations.remove(&start).ok_or(HOST_MEMORY_NOT_REGISTERED)?;
        Ok(start as u64..(start + gone.len) as u64)
    }

    /// The registration that a byte lies in, with its start.
    pub fn registration_at(&self, address: usize) -> Option<(usize, Registration)> {
        self.overlapping(&(address..address + 1)).next()
    }

    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Registration)> {
        let start = range.start;
        let before = self.registrations.range(..range.end).rev();
        before
            .map(|(&at, &found)| (at, found))
            .take_while(move |&(at, found)| at + found.len > start)
    }

    /// How `context` knows a range of host memory: what another context registered without the
    /// flag PORTABLE is pageable to it.
    pub fn host_range(&self, range: &Range<u64>, context: Handle) -> HostRange {
        let range = range.start as usize..range.end as usize;
        let visible =
            |found: &Registration| found.context == context || found.flags & REGISTER_PORTABLE != 0;
        let mut found = self.overlapping(&range).filter(|(_, found)| visible(found));
        match found.next() {
            None => HostRange::Pageable,
            Some((at, one)) if at <= range.start && range.end <= at + one.len => {
                HostRange::Registered
            }
            Some(_) => HostRange::Partly,
        }
    }

    pub fn registrations(&self) -> usize {
        self.registrations.len()
    }

    pub fn registered(&self) -> usize {
        self.registrations.values().map(|registration| registration.len).sum()
    }
}

impl State {
    /// The end of an allocation. A violation if copies that use it are not done.
    pub fn free_now(&mut self, address: DevicePtr) {
        let Some(&allocation) = self.memory.allocations.get(&address) else { return };
        let pending = self.abandon(&(address..address + allocation.len as u64));
        if pending > 0 {
            self.control.violation(format!(
                "device memory {address:#x} ({} bytes) freed while {pending} copies use it",
                allocation.len
            ));
        }
        self.memory.free(address);
    }

    /// The end of all allocations of a context, which goes away.
    pub fn free_all_of(&mut self, context: Handle) {
        let owned = self.memory.allocations.iter().filter(|(_, held)| held.context == context);
        let owned: Vec<DevicePtr> = owned.map(|(&address, _)| address).collect();
        owned.into_iter().for_each(|address| self.free_now(address));
    }
}

fn pages_end(start: u64, len: usize) -> u64 {
    start + len.next_multiple_of(PAGE) as u64
}

/// Whether every page of the range is mapped.
fn is_mapped(start: usize, end: usize) -> bool {
    let first = start / PAGE * PAGE;
    let at = NonNull::new(ptr::with_exposed_provenance_mut::<c_void>(first));
    // SAFETY: MS_ASYNC changes nothing; the call only says whether the pages are there.
    at.is_some_and(|at| unsafe { msync(at, end - first, MsFlags::MS_ASYNC) }.is_ok())
}
