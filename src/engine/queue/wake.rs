//! Wakes the I/O thread once for many commands.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a wakeup of the I/O thread is on its way. Set by the sender that wakes it, cleared by that thread before it
/// looks at the commands: of many commands in a row only the first costs a system call.
#[derive(Debug, Default)]
pub(super) struct WakePending(AtomicBool);

impl WakePending {
    /// Call this before looking for commands: one that is sent after the look wakes the thread again.
    pub fn acknowledge(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }

    /// Whether the caller, who has sent a command, has to wake the thread.
    pub fn claim(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}
