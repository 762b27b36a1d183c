//! Setting up a ring: the flags that this kernel takes, the operations that it knows.

use io_uring::{IoUring, Probe, opcode};
use std::time::Duration;
use std::{io, thread};

/// How a ring runs its completions, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flags {
    /// `SINGLE_ISSUER | DEFER_TASKRUN` (Linux 6.1): completions run when the thread asks for them.
    Deferred,
    /// `COOP_TASKRUN` (Linux 5.19): completions run at the thread's next system call.
    Cooperative,
    /// None.
    Plain,
}

impl Flags {
    const BEST_FIRST: [Self; 3] = [Self::Deferred, Self::Cooperative, Self::Plain];

    /// As the kernel's headers call them.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Deferred => "SINGLE_ISSUER | DEFER_TASKRUN",
            Self::Cooperative => "COOP_TASKRUN",
            Self::Plain => "none",
        }
    }
}

/// A ring for `entries` submissions with the best flags that the kernel takes.
pub(crate) fn ring(entries: u32) -> io::Result<(IoUring, Flags)> {
    // A ring is charged to the memory lock limit for some 20 ms after its end. Under a small limit
    // (64 KiB in many containers) that may be what the next one needs.
    for _ in 0..5 {
        match try_ring(entries) {
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOMEM) => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
    try_ring(entries)
}

fn try_ring(entries: u32) -> io::Result<(IoUring, Flags)> {
    let mut refused = None;
    for flags in Flags::BEST_FIRST {
        let mut builder = IoUring::builder();
        match flags {
            Flags::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
            }
            Flags::Cooperative => {
                builder.setup_coop_taskrun().setup_submit_all();
            }
            Flags::Plain => {}
        }
        match builder.dontfork().build(entries) {
            // A seccomp filter may let a ring be set up, and deny its use.
            Ok(ring) => return ring.submit().map(|_| (ring, flags)),
            // Flags that the kernel does not know. Anything else would be refused again.
            Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refused.expect("there are flags to try"))
}

/// Which of the operations that we use the kernel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operations {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) read_fixed: bool,
    pub(crate) write_fixed: bool,
    pub(crate) sync: bool,
}

impl Operations {
    /// Asks the kernel. One that can't be asked (before 5.6) knows none.
    pub(crate) fn probe(ring: &IoUring) -> io::Result<Self> {
        let mut probe = Probe::new();
        match ring.submitter().register_probe(&mut probe) {
            Err(error) if error.raw_os_error() != Some(nix::libc::EINVAL) => return Err(error),
            _ => {}
        }
        Ok(Self {
            read: probe.is_supported(opcode::Read::CODE),
            write: probe.is_supported(opcode::Write::CODE),
            read_fixed: probe.is_supported(opcode::ReadFixed::CODE),
            write_fixed: probe.is_supported(opcode::WriteFixed::CODE),
            sync: probe.is_supported(opcode::Fsync::CODE),
        })
    }

    /// Whether the engine can work at all.
    pub(crate) fn suffice(self) -> bool {
        self.read && self.write && self.sync
    }

    /// Whether fixed buffers are of use.
    pub(crate) fn take_fixed(self) -> bool {
        self.read_fixed && self.write_fixed
    }
}
