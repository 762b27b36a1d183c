//! Setting up a ring: the flags that this kernel takes, the operations that it knows.

use io_uring::{Builder, IoUring, Probe, opcode};
use std::time::Duration;
use std::{io, thread};

/// Sets flags of a ring to be built.
type SetFlags = fn(&mut Builder) -> &mut Builder;

/// How a ring runs its completions, best first: the flags as the kernel's headers call them, and how to set them.
const FLAGS: [(&str, SetFlags); 3] = [
    // Linux 6.1: completions run when the thread asks for them.
    ("SINGLE_ISSUER | DEFER_TASKRUN", |ring| {
        ring.setup_single_issuer().setup_defer_taskrun().setup_submit_all()
    }),
    // Linux 5.19: completions run at the thread's next system call.
    ("COOP_TASKRUN", |ring| ring.setup_coop_taskrun().setup_submit_all()),
    ("none", |ring| ring),
];

/// A ring for `entries` submissions with the best flags that the kernel takes.
pub(crate) fn ring(entries: u32) -> io::Result<(IoUring, &'static str)> {
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

fn try_ring(entries: u32) -> io::Result<(IoUring, &'static str)> {
    let mut refused = None;
    for (flags, set) in FLAGS {
        match set(&mut IoUring::builder()).dontfork().build(entries) {
            // A seccomp filter may let a ring be set up, and deny its use.
            Ok(ring) => return ring.submit().map(|_| (ring, flags)),
            // Flags that the kernel does not know. Anything else would be refused again.
            Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refused.expect("there are flags to try"))
}

/// The operations that we use, as the kernel calls them. The engine can do without the two of fixed buffers.
pub(crate) const OPERATIONS: [(&str, u8); 5] = [
    ("READ", opcode::Read::CODE),
    ("WRITE", opcode::Write::CODE),
    ("READ_FIXED", opcode::ReadFixed::CODE),
    ("WRITE_FIXED", opcode::WriteFixed::CODE),
    ("FSYNC", opcode::Fsync::CODE),
];

/// Which of [`OPERATIONS`] the kernel lacks. One that can't be asked (before 5.6) lacks all.
pub(crate) fn missing_operations(ring: &IoUring) -> io::Result<Vec<&'static str>> {
    let mut probe = Probe::new();
    match ring.submitter().register_probe(&mut probe) {
        Err(error) if error.raw_os_error() != Some(nix::libc::EINVAL) => return Err(error),
        _ => {}
    }
    let missing = OPERATIONS.iter().filter(|(_, code)| !probe.is_supported(*code));
    Ok(missing.map(|(name, _)| *name).collect())
}
