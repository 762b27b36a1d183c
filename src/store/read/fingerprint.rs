//! Whether a checkpoint is still the one whose manifest was read. Before a reader opens the shards, a save may
//! replace the checkpoint or a removal may end it, and another checkpoint's shards may have the same names.
//! So a reader opens the shards first and then looks at the manifest again: while the same manifest exists,
//! no process removes its shards or writes to them.

use crate::error::{Error, Result};
use crate::format::{TRAILER_LEN, names};
use crate::object::is_url;
use crate::store::layout::manifest::check_directory;
use crate::store::read::object;
use crate::sys::file;
use std::fmt;
use std::io;
use std::path::Path;

/// Tells a manifest from every other one of its directory: its length, and its last bytes, which are the checksum of
/// the rest. Two manifests with one fingerprint list the same checksums, and so the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Fingerprint {
    bytes: u64,
    trailer: [u8; TRAILER_LEN],
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes{}", self.bytes, String::from_utf8_lossy(&self.trailer).trim_end())
    }
}

impl Fingerprint {
    /// The manifest's length, and its last bytes.
    pub fn parts(&self) -> (u64, [u8; TRAILER_LEN]) {
        (self.bytes, self.trailer)
    }

    /// The fingerprint of a manifest's bytes; `None` if they are too few for a manifest.
    pub fn of(manifest: &[u8]) -> Option<Self> {
        Some(Self { bytes: manifest.len() as u64, trailer: *manifest.last_chunk()? })
    }

    /// The fingerprint of the manifest at `path`, of which only the end is read; `None` if there is no manifest.
    fn at(path: &Path) -> Result<Option<Self>> {
        if is_url(path) {
            let end = object::read_end(path)?;
            return Ok(end.map(|(bytes, trailer)| Self { bytes, trailer }));
        }
        match file::read_end(path) {
            Ok((bytes, trailer)) => Ok(Some(Self { bytes, trailer })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("reading", path, e)),
        }
    }

    /// Checks that the checkpoint in `dir` still has this manifest. Call it after opening the shards, or after
    /// failing to open some (then `all_open` is false).
    ///
    /// # Errors
    /// [`Error::Replaced`] if another checkpoint took its place; [`Error::NoCheckpoint`] if it was removed;
    /// [`Error::Io`] if its directory was.
    pub fn check(&self, dir: &Path, all_open: bool) -> Result<()> {
        let now = Self::at(&dir.join(names::MANIFEST))?;
        if now == Some(*self) {
            return Ok(());
        }
        let path = dir.to_path_buf();
        if now.is_some() {
            return Err(Error::Replaced { path });
        }
        // During a removal no save begins in the directory, and open shards keep their bytes.
        if all_open && Self::at(&dir.join(names::REMOVAL_MARK))? == Some(*self) {
            return Ok(());
        }
        if !is_url(dir) {
            check_directory(dir)?;
        }
        let reason = "it was removed after it was opened: load another one";
        Err(Error::NoCheckpoint { path, reason: reason.into() })
    }
}
