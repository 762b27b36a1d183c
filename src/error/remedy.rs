//! What an error of the system means, and what to do about it.

use nix::errno::Errno;
use std::io;

/// What a file system lacks for a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shortage {
    /// Bytes.
    Bytes {
        /// What the save needs.
        needed: u64,
        /// What is free, including what the save's own files take.
        free: u64,
    },
    /// Inodes: no file can be created, however many bytes are free.
    Inodes,
}

/// Whether the system reported a full disk or an exhausted quota.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Whether the system said that the medium is damaged: a bad sector, or what a file system's own checksums find.
pub(crate) fn is_bad_medium(error: &io::Error) -> bool {
    is_one_of(error, &[Errno::EIO, Errno::EUCLEAN, Errno::EBADMSG, Errno::ENODATA])
}

/// Whether the file system or the kernel lacks an operation.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || is_one_of(error, &[Errno::EOPNOTSUPP, Errno::ENOSYS])
}

/// Whether the system gave one of these error numbers.
pub(crate) fn is_one_of(error: &io::Error, numbers: &[Errno]) -> bool {
    numbers.iter().any(|number| error.raw_os_error() == Some(*number as i32))
}

/// What follows the system's message: the space needed, what to do, what is at the path instead.
pub(super) fn advice(cause: &io::Error, shortage: Option<Shortage>, hint: &str) -> String {
    let remedy = match shortage {
        // The hint says what became of what was written.
        Some(Shortage::Bytes { needed, free }) if !hint.is_empty() => format!(
            "; {needed} bytes are needed on this file system, which has {free} free, {} too few: free some space",
            needed.saturating_sub(free)
        ),
        Some(Shortage::Bytes { needed, free }) => format!(
            "; the save needs {needed} bytes on this file system, which has {free} free{}",
            remedy_for(cause)
        ),
        Some(Shortage::Inodes) => format!("; {NO_INODES}. {UNDONE}"),
        None if cause.kind() == io::ErrorKind::StorageFull && !hint.is_empty() => {
            "; free some space".into()
        }
        None => remedy_for(cause),
    };
    let hint = if hint.is_empty() { String::new() } else { format!("; {hint}") };
    format!("{remedy}{hint}")
}

/// For a file system that can hold no more files.
pub(crate) const NO_INODES: &str = "the file system has no free inodes (see `df -i`), so it can hold no more files, \
                                    however much space is free: remove files from it or save elsewhere";

pub(super) const UNDONE: &str =
    "What was written has been removed, and what was saved here before is untouched";

/// What to do about an error of the system, for those that users meet.
fn remedy_for(cause: &io::Error) -> String {
    use io::ErrorKind::*;
    let remedy = match cause.kind() {
        StorageFull => return format!("; free some space or save elsewhere. {UNDONE}"),
        QuotaExceeded => "the disk quota is used up: free some space or save elsewhere",
        // An object store's answer, which says more than a number.
        PermissionDenied if cause.get_ref().is_some() => {
            "check the credentials in the environment, and what they allow"
        }
        PermissionDenied => "check the owner and mode of the file and of its directory",
        ReadOnlyFilesystem => "the file system is mounted read-only: save elsewhere",
        // Of a file that ringstow itself finds too large, the message says all.
        FileTooLarge if cause.raw_os_error().is_some() => {
            "raise `ulimit -f`, or set `shard_bytes` so that each file is smaller"
        }
        _ if is_one_of(cause, &[Errno::EIO]) => {
            "the device reports a hardware error: see the kernel's log (dmesg)"
        }
        _ if is_one_of(cause, &[Errno::EMFILE]) => "too many open files: raise `ulimit -n`",
        _ => return String::new(),
    };
    format!("; {remedy}")
}

/// What to do if the system has no thread or no memory left for this process.
pub(super) fn missing_resource(doing: &str, cause: &io::Error) -> Option<&'static str> {
    use nix::libc::{EAGAIN, ENOMEM};
    match cause.raw_os_error() {
        Some(EAGAIN) if doing.starts_with("starting") => Some(
            "the system starts no more threads for this process: raise `ulimit -u`, or the limit of processes of its \
             container or cgroup (pids.max)",
        ),
        Some(ENOMEM) if doing.starts_with("taking") => Some(
            "set `pool_bytes` lower, or raise the limit of memory or of address space (`ulimit -v`) of this process",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn settings_that_a_remedy_names_exist() {
        let settings = serde_json::to_value(crate::Config::default()).unwrap();
        let named: Vec<&str> = include_str!("remedy.rs")
            .split('`')
            .filter(|word| word.ends_with("_bytes") && !word.contains(' '))
            .collect();
        assert!(named.len() >= 2, "{named:?}");
        for name in named {
            assert!(settings.get(name).is_some(), "{name} is no setting");
        }
    }
}
