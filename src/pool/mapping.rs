//! Anonymous memory on 2 MiB pages.

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{MmapOptions, MmapRaw};
use std::any::Any;
use std::io;
use std::sync::OnceLock;

/// Size and alignment of a transparent huge page on x86-64 and arm64 (4 KiB granule).
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// A private anonymous mapping: 2 MiB-aligned, advised to use huge pages, zero-filled.
///
/// Memory is taken from the system when it is first touched, or by [`Mapping::prefault`].
#[derive(Debug)]
pub struct Mapping {
    /// Dropped before the memory is unmapped.
    attachment: OnceLock<Box<dyn Any + Send + Sync>>,
    raw: MmapRaw,
    /// Bytes from the start of `raw` to the first 2 MiB boundary.
    lead: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes.
    ///
    /// # Errors
    /// The system's, when it has no address space or memory left for the mapping.
    pub fn new(len: usize) -> io::Result<Self> {
        let room = len
            .max(1)
            .checked_add(HUGE_PAGE)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let raw = MmapRaw::from(MmapOptions::new().len(room).map_anon()?);
        let lead = raw.as_mut_ptr().align_offset(HUGE_PAGE);
        let mapping = Self { attachment: OnceLock::new(), raw, lead, len };
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            // Refused only by kernels built without transparent huge pages; 4 KiB pages then.
            let _ = mapping.advise(Advice::HugePage, 0, len);
        }
        Ok(mapping)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `lead` < 2 MiB and the mapping is at least 2 MiB longer than `len`.
        unsafe { self.raw.as_mut_ptr().add(self.lead) }
    }

    /// Keeps the memory out of child processes: a fork need not copy its page tables (0.1 ms
    /// instead of 755 ms for 512 MiB of registered memory), and cannot break the kernel's pins.
    pub fn keep_from_children(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.advise(Advice::DontFork, 0, self.len);
    }

    /// Takes the memory of `[offset, offset + len)` from the system now, so that no page fault
    /// comes in the middle of a copy or a transfer. Contents stay as they are.
    ///
    /// # Safety
    /// Nobody else uses these bytes meanwhile: kernels before 5.14 get the pages by a write.
    pub unsafe fn prefault(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // One huge page at a time: meanwhile the kernel holds the lock of the address space, and every
        // thread that maps memory or starts a thread waits for it.
        let mut at = offset;
        while at < offset + len {
            let end = (at / HUGE_PAGE + 1) * HUGE_PAGE;
            let piece = end.min(offset + len) - at;
            self.prefault_piece(at, piece);
            at += piece;
        }
    }

    fn prefault_piece(&self, offset: usize, len: usize) {
        #[cfg(target_os = "linux")]
        if self.advise(Advice::PopulateWrite, offset, len).is_ok() {
            return;
        }
        self.touch(offset, len);
    }

    /// Faults pages in by rewriting a byte of each: the portable way, and that of Linux before 5.14.
    fn touch(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(4096) {
            // SAFETY: within the mapping, of which `prefault`'s caller keeps these bytes to itself. Volatile, so that
            // it is not optimised away.
            unsafe {
                let byte = self.as_ptr().add(at);
                byte.write_volatile(byte.read_volatile());
            }
        }
    }

    /// [`Mapping::prefault`] of all of it.
    pub fn prefault_all(&mut self) {
        // SAFETY: `&mut`: nobody else can use the bytes.
        unsafe { self.prefault(0, self.len) };
    }

    /// Returns the memory of the whole pages in `[offset, offset + len)` to the system.
    ///
    /// # Safety
    /// Nobody uses these bytes any more: they read as zeros from now on.
    pub unsafe fn release(&self, offset: usize, len: usize) {
        const PAGE: usize = 4096;
        let start = offset.next_multiple_of(PAGE);
        let end = offset.saturating_add(len).min(self.len) / PAGE * PAGE;
        #[cfg(target_os = "linux")]
        if start < end && !cfg!(miri) {
            // SAFETY: within the mapping; its contents are given up by the caller.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.raw.unchecked_advise_range(advice, self.lead + start, end - start)
            };
        }
        let _ = (start, end);
    }

    /// Returns what is attached to the memory: made on the first call, dropped just before the memory is
    /// unmapped. Meant for a registration with a driver, which knows the memory by its address.
    ///
    /// # Panics
    /// If something of another type was attached.
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> &T {
        let attached = self.attachment.get_or_init(|| Box::new(make()));
        attached.downcast_ref().expect("one type is attached")
    }

    #[cfg(target_os = "linux")]
    fn advise(&self, advice: Advice, offset: usize, len: usize) -> io::Result<()> {
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.raw.advise_range(advice, self.lead + offset, len)
    }

    /// The bytes. Nobody writes to them: the writers are [`Buffer`](super::Buffer)s, and while one
    /// is left, safe code cannot reach the mapping that it was cut from.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `as_ptr` is valid for `len` initialised (zeroed) bytes, without writers: see above.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}
