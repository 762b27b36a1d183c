//! RLIMIT_MEMLOCK: how much memory may be registered with io_uring. Read before registering, because a registration
//! over the limit pins memory for seconds before it fails.
#![cfg_attr(
    not(any(feature = "uring", feature = "tokio-uring", feature = "cli")),
    allow(dead_code, reason = "only rings register memory, and only the doctor asks for them")
)]

#[cfg(target_os = "linux")]
use crate::sys::file::read_kernel_text;
#[cfg(target_os = "linux")]
use crate::sys::rlimit::limits;
#[cfg(target_os = "linux")]
use nix::sys::resource::Resource;

/// Bytes that the kernel charges for a ring's own queues and tables, at most (1024 operations in flight).
pub const RING_BYTES: u64 = 256 << 10;

/// How many bytes this process may lock; `None` means any number.
///
/// The kernel charges registered buffers to the user, over all of their processes, so less than this may be left.
#[cfg(target_os = "linux")]
pub fn limit_bytes() -> Option<u64> {
    if may_lock_any() {
        return None;
    }
    match limits(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if soft == nix::libc::RLIM_INFINITY => None,
        Ok((soft, _)) => Some(soft),
        Err(_) => Some(0),
    }
}

/// Off Linux nothing is registered, and so nothing limited.
#[cfg(not(target_os = "linux"))]
pub fn limit_bytes() -> Option<u64> {
    None
}

/// Whether the process has CAP_IPC_LOCK, which lifts the limit.
#[cfg(target_os = "linux")]
fn may_lock_any() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    read_kernel_text("/proc/self/status").ok().is_some_and(|status| {
        status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .is_some_and(|caps| caps & (1 << CAP_IPC_LOCK) != 0)
    })
}

/// How to allow `wanted_bytes` of buffers, and the ring, if they are over the limit.
pub fn remedy(wanted_bytes: u64) -> String {
    let kib = (wanted_bytes + RING_BYTES).div_ceil(1024);
    format!(
        "raise the limit to {kib} KiB or more: `ulimit -l {kib}` in the shell, `LimitMEMLOCK=infinity` in a \
         systemd unit, `--ulimit memlock=-1` for docker, `* - memlock unlimited` in \
         /etc/security/limits.conf; or lower pool_bytes"
    )
}
