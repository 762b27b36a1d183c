//! The file `.metadata` of torch.distributed.checkpoint (DCP). PyTorch's own writer commits with it, and ringstow
//! leaves one of that name beside its manifest, for programs that look whether it is there.

use crate::error::{Error, Result};
use crate::format::names;
use crate::sys::dir::look_at;
use crate::sys::file;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Whether the mark in a directory is ringstow's.
///
/// # Errors
/// [`Error::Io`] for a mark that exists and cannot be read.
pub(in crate::store) fn is_ours(dir: &Path) -> Result<bool> {
    let path = dir.join(names::DCP_MARK);
    match starts_with(&path, names::DCP_MARK_WORDS) {
        Err(error) if file::is_absent(&error) => Ok(false),
        found => found.map_err(|e| Error::io("reading", path, e)),
    }
}

/// Refuses a checkpoint that PyTorch's own writer has saved over: it writes files of other names, so that the older
/// checkpoint would still load. A mark that is older than the manifest is of a checkpoint that ringstow saved over,
/// or of one that a program keeps in the same directory.
///
/// # Errors
/// [`Error::Invalid`] names the files of both.
pub(in crate::store) fn refuse_newer(dir: &Path) -> Result<()> {
    let manifest = dir.join(names::MANIFEST);
    match newer_than(&manifest, dir) {
        None => Ok(()),
        Some(mark) => Err(Error::invalid(format!(
            "{} was saved over by PyTorch's own writer of torch.distributed.checkpoint: {} is newer than {}. Load \
             the newer checkpoint with dcp.load without ringstow's reader, or convert it (`ringstow convert --from \
             dcp OLD NEW`). To load ringstow's older one, or if this directory is a copy made without the files' \
             times, move {} away",
            dir.display(),
            mark.display(),
            manifest.display(),
            mark.display(),
        ))),
    }
}

/// A mark of PyTorch's that was written after the manifest of the checkpoint in `dir`.
fn newer_than(manifest: &Path, dir: &Path) -> Option<PathBuf> {
    let committed = changed(manifest)?; // if it is gone, the caller finds that there is no checkpoint
    // Ranks that save each by itself have the directory above in common.
    let is_rank = names::rank_of_dir(dir).is_some();
    let above = if is_rank { dir.parent() } else { None };
    let dirs = [Some(dir), above].into_iter().flatten();
    let marks =
        dirs.flat_map(|dir| [names::DCP_MARK, names::DCP_RANK_MARK].map(|name| dir.join(name)));
    let mut newer = marks.filter(|mark| changed(mark).is_some_and(|at| at > committed));
    newer.find(|mark| starts_with(mark, names::DCP_TORCH_WORDS).unwrap_or(false))
}

fn changed(path: &Path) -> Option<SystemTime> {
    look_at(path).ok()?.modified().ok()
}

fn starts_with(path: &Path, words: &[u8]) -> io::Result<bool> {
    const START_BYTES: u64 = 256; // ours is shorter, and PyTorch's says near its beginning what it is
    let start = file::read_start(path, START_BYTES)?;
    Ok(start.windows(words.len()).any(|found| found == words))
}
