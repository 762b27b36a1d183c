//! Which process holds the lock of a directory, without taking it.

use crate::sys::dir;
use crate::sys::file::read_kernel_text;
#[cfg(feature = "cli")]
use crate::sys::file_system::FileSystem;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file: the major and minor number of its device, and its inode.
type FileNumber = (u32, u32, u64);

/// The processes that hold locks of whole files.
pub(crate) struct Holders {
    by_file: HashMap<FileNumber, u32>,
    /// Whether the kernel has listed them.
    #[cfg(feature = "cli")]
    are_listed: bool,
}

impl Holders {
    /// Those of this moment. None off Linux.
    pub fn now() -> Self {
        let text = read_kernel_text("/proc/locks");
        Self {
            #[cfg(feature = "cli")]
            are_listed: text.is_ok(),
            by_file: listed(&text.unwrap_or_default()),
        }
    }

    /// Whether [`Holders::of`] finds every process that may hold the lock of a directory. It does not if other hosts use
    /// the file system, nor on btrfs, for which `/proc/locks` has another device number than the files.
    #[cfg(feature = "cli")]
    pub fn know_all(&self, path: &Path) -> bool {
        let found = FileSystem::of(path).ok().filter(|found| !found.is_shared());
        self.are_listed && found.is_some_and(|found| found.name != "btrfs")
    }

    /// Who holds the lock of a directory, if this host knows.
    pub fn of(&self, path: &Path) -> Option<u32> {
        let found = dir::look(path).ok()?;
        let (device, inode) = (found.dev(), found.ino());
        let file = (rustix::fs::major(device), rustix::fs::minor(device), inode);
        // A process of another container has the number 0.
        self.by_file.get(&file).copied().filter(|&process| process > 0)
    }
}

/// Parses `/proc/locks`. A lock of a whole file is a line such as `1: FLOCK  ADVISORY  WRITE 712 fe:00:262146 0 EOF`:
/// after the mode come the process, and the file's device and inode. A process that waits for a lock has `->` before `FLOCK`.
fn listed(text: &str) -> HashMap<FileNumber, u32> {
    let holder = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let process: u32 = words.nth(2)?.parse().ok()?;
        let mut numbers = words.next()?.split(':');
        let hex = |text: &str| u32::from_str_radix(text, 16).ok();
        let (major, minor) = (hex(numbers.next()?)?, hex(numbers.next()?)?);
        Some(((major, minor, numbers.next()?.parse().ok()?), process))
    };
    text.lines().filter_map(holder).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::sys::lock::DirLock;

    #[test]
    fn holder_of_a_lock_is_this_process_until_it_lets_go() {
        let root = tempfile::tempdir().unwrap();
        let lock = DirLock::take(root.path()).unwrap();
        assert_eq!(Holders::now().of(root.path()), Some(std::process::id()));
        drop(lock);
        assert_eq!(Holders::now().of(root.path()), None);
    }

    #[test]
    fn who_waits_or_locks_a_range_is_no_holder() {
        let text = "1: FLOCK  ADVISORY  WRITE 712 fe:00:262146 0 EOF\n\
                    1: -> FLOCK  ADVISORY  WRITE 713 fe:00:7 0 EOF\n\
                    2: POSIX  ADVISORY  WRITE 714 fe:00:8 0 1\nnonsense";
        assert_eq!(listed(text), HashMap::from([((0xfe, 0, 262_146), 712)]));
    }
}
