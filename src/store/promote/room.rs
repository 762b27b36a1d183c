//! Whether a place has room for what is to be sent there.

use super::journal::Journal;
use super::parts::AGAIN;
use super::target::Target;
use crate::error::{Error, Result, Shortage};
use nix::errno::Errno;

/// Bytes that these files, each with its length, still need: what uploads have reserved is there.
fn needed(target: &dyn Target, files: &[(&str, u64)], journal: &Journal) -> u64 {
    let reserved = |name| journal.upload_of(name).map_or(0, |upload| target.taken(&upload));
    files.iter().map(|&(name, bytes)| bytes.saturating_sub(reserved(name))).sum()
}

/// Checks that there is room for these files, before the first byte is sent. A place that does not know passes.
///
/// # Errors
/// [`Error::Io`] of a full disk, with what is needed and what is free.
pub(super) fn check(target: &dyn Target, files: &[(&str, u64)], journal: &Journal) -> Result<()> {
    let needed = needed(target, files, journal);
    match target.free() {
        Some(free) if free < needed => {
            let error = Error::io("promoting to", target.place(), Errno::ENOSPC.into());
            Err(error.hinted(AGAIN).short_of(Shortage::Bytes { needed, free }))
        }
        _ => Ok(()),
    }
}

/// Adds to an error of a full disk what is needed and free: another program may have taken what was free at first.
pub(super) fn explained(
    error: Error,
    target: &dyn Target,
    files: &[(&str, u64)],
    journal: &Journal,
) -> Error {
    if !error.is_disk_full() {
        return error;
    }
    let Ok(missing) = target.missing(files) else { return error };
    let missing: Vec<_> = missing.into_iter().map(|file| files[file]).collect();
    let needed = needed(target, &missing, journal);
    match target.free() {
        Some(free) if free < needed => error.short_of(Shortage::Bytes { needed, free }),
        _ => error,
    }
}
