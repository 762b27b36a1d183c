//! Disks that lose what they had not flushed when their power is cut, and file systems on them; and file systems for one
//! thread.
//!
//! A disk is one file of a FUSE file system, in memory; a loop device makes it a block device, which takes any file
//! system. The disk has a cache as real ones do: what it takes is stable only after the next flush (an fsync of the
//! file). A cut fails everything from then on. When the power comes back, any of the writes since the last flush may
//! be there and any may be lost, in any order, one of them torn between sectors; a seed decides.
#![cfg(target_os = "linux")]

mod apart;
mod disk;
mod mount;

pub use apart::{Mount, unshare_mounts};
pub use mount::{BTRFS, EXT4, FileSystem, Powered, XFS, on_loop, run};
