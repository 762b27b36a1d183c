//! What a save leaves to others: its threads' priorities.

use crate::sys::priority;
use serde::{Deserialize, Serialize};
use std::io;

/// How far disk I/O comes after that of others. It works where the disk's scheduler knows priorities (`bfq`,
/// `mq-deadline`), not with `none`, and not on most network file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum IoPriority {
    /// That of the process.
    #[default]
    Normal,
    /// After others in the best-effort class.
    Low,
    /// Only when nobody else uses the disk.
    Idle,
}

impl IoPriority {
    /// Class and level, as `ioprio_set(2)` numbers them.
    fn class_and_level(self) -> Option<u16> {
        const CLASS_SHIFT: u32 = 13;
        match self {
            Self::Normal => None,
            Self::Low => Some(2 << CLASS_SHIFT | 7),
            Self::Idle => Some(3 << CLASS_SHIFT),
        }
    }
}

/// The priority of the threads that ringstow starts. Threads that these start inherit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Priority {
    pub nice: u32,
    pub io: IoPriority,
}

impl Priority {
    /// Gives the calling thread this priority, for good: a process without privileges cannot raise it again.
    ///
    /// # Errors
    /// The system's, which a sandbox may cause.
    pub fn apply(self) -> io::Result<()> {
        if self.nice > 0 {
            priority::set_nice(self.nice)?;
        }
        self.io.class_and_level().map_or(Ok(()), priority::set_io_priority)
    }

    /// Like [`Priority::apply`], for a thread that goes on without it: the report says so.
    pub fn try_apply(self) {
        if let Err(error) = self.apply() {
            tracing::debug!(%error, "cannot lower this thread's priority");
        }
    }
}
