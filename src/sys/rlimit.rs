//! The limits of this process.

use crate::sys::seam::{Call, made};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io;
use std::path::Path;

/// The soft and the hard limit of a resource.
///
/// # Errors
/// The system's.
pub(crate) fn limits(of: Resource) -> io::Result<(u64, u64)> {
    made(Call::Limit, Path::new(&format!("{of:?}")), || Ok(getrlimit(of)?))
}

/// Raises this process' soft limit of open files if it is too low for `count` more: at most to the hard
/// limit, and for good. A checkpoint of thousands of processes has as many files, and the soft limit is low
/// only for the sake of `select`. Returns whether there is room.
pub fn make_room_for(count: usize) -> bool {
    /// Files that the process has open besides. The limit is raised only if fewer than this many fit.
    const OTHERS_MIN: u64 = 256;
    /// What a raised limit leaves for them.
    const OTHERS_MAX: u64 = 1024;
    let Ok((soft, hard)) = limits(Resource::RLIMIT_NOFILE) else { return false };
    let needed = count as u64 + OTHERS_MIN;
    if soft >= needed || soft >= hard {
        return soft >= needed;
    }
    let wanted = hard.min(count as u64 + OTHERS_MAX);
    // If it fails, opening the files does too, with a remedy.
    match setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
        Ok(()) => wanted >= needed,
        Err(error) => {
            tracing::debug!(%error, wanted, "cannot raise the limit of open files");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::rlimit::*;

    #[test]
    fn no_room_for_more_files_than_the_hard_limit_allows() {
        assert!(make_room_for(0));
        assert!(!make_room_for(usize::MAX / 2));
    }
}
