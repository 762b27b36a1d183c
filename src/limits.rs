//! Limits that several layers share, named once. Imports nothing, so that every layer may use it.

/// Alignment in bytes of every direct transfer: its file offset, its memory address and its length.
/// 4096 satisfies every disk in use (512-byte and 4Kn) and file systems that announce nothing.
pub const ALIGN: usize = 4096;

/// Buffers that io_uring registers at most (`IORING_MAX_REG_BUFFERS` in the kernel's
/// [io_uring/rsrc.c](https://github.com/torvalds/linux/blob/v6.6/io_uring/rsrc.c)).
pub const FIXED_BUFFERS_MAX: usize = 1 << 14;

/// Most directories besides its own that a checkpoint can be striped over.
pub const STRIPES_MAX: usize = 64;

/// Most names that a checkpoint can be slimmed by.
pub const DROPPED_MAX: usize = 64;

/// Interruptions in a row (EINTR, EAGAIN) after which a call or a transfer fails. Far beyond what a working kernel does; it
/// only keeps a broken one from blocking a save forever.
pub const INTERRUPTIONS_MAX: u32 = 1000;
