//! Whether a checkpoint is still the one whose manifest was read. A save may replace it before its shards
//! are opened, a removal may end it, and after both another checkpoint's shards may lie there under the
//! same names. Whoever has read a manifest therefore opens the shards first and then looks at the manifest
//! again: while it lies there, nobody removes its shards or writes to them.

use crate::error::{Error, Result};
use crate::format::{TRAILER_LEN, names};
use crate::store::layout::manifest::check_directory;
use crate::sys::file;
use std::fmt;
use std::io;
use std::path::Path;

/// Which manifest one is, of all that may come to lie in a directory: its length, and its end, which is the
/// checksum of all the rest. Two manifests of one stamp list the same checksums, and so the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Stamp {
    bytes: u64,
    trailer: [u8; TRAILER_LEN],
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes{}", self.bytes, String::from_utf8_lossy(&self.trailer).trim_end())
    }
}

impl Stamp {
    /// Of a manifest's bytes; `None` if they are too few for one.
    pub fn of(manifest: &[u8]) -> Option<Self> {
        Some(Self { bytes: manifest.len() as u64, trailer: *manifest.last_chunk()? })
    }

    /// Of the manifest at `path`, of which no more than the end is read; `None` if none is there.
    fn at(path: &Path) -> Result<Option<Self>> {
        match file::read_end(path) {
            Ok((bytes, trailer)) => Ok(Some(Self { bytes, trailer })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("reading", path, e)),
        }
    }

    /// Called when shards of the checkpoint in `dir` have been opened, or some could not be: checks that
    /// they are those of this manifest, or that it is not for another one that they could not.
    ///
    /// # Errors
    /// [`Error::Replaced`] by another checkpoint; [`Error::NoCheckpoint`] if it is removed, and
    /// [`Error::Io`] if its directory is.
    pub fn check(&self, dir: &Path, all_open: bool) -> Result<()> {
        let now = Self::at(&dir.join(names::MANIFEST))?;
        if now == Some(*self) {
            return Ok(());
        }
        let path = dir.to_path_buf();
        if now.is_some() {
            return Err(Error::Replaced { path });
        }
        // While it is being removed no save begins there, and what is open stays what it was.
        if all_open && Self::at(&dir.join(names::RETIRED))? == Some(*self) {
            return Ok(());
        }
        check_directory(dir)?;
        let reason = "it was removed after it was opened: load another one";
        Err(Error::NoCheckpoint { path, reason: reason.into() })
    }
}

/// Does something to the checkpoint at a path, and begins again if another save replaced that meanwhile.
/// Each time a whole save has to come in between, so that this is as good as for ever.
///
/// # Errors
/// Those of `attempt`; [`Error::Replaced`] if that came every time.
pub(crate) fn while_replaced<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    const ATTEMPTS: usize = 100;
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error @ Error::Replaced { .. }) => tracing::debug!(%error, "beginning again"),
            done => return done,
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use crate::store::read::fingerprint::*;

    fn replaced<T>() -> Result<T> {
        Err(Error::Replaced { path: "a".into() })
    }

    #[test]
    fn what_was_replaced_is_begun_again_and_not_for_ever() {
        let mut left = 3;
        let third = while_replaced(|| {
            left -= 1;
            if left > 0 { replaced() } else { Ok(7) }
        });
        assert_eq!((third.unwrap(), left), (7, 0));
        let mut count = 0;
        let never = while_replaced(|| {
            count += 1;
            replaced::<()>()
        });
        assert!(matches!(never, Err(Error::Replaced { .. })) && count < 1000, "{count}");
    }

    #[test]
    fn other_failures_are_final() {
        let mut count = 0;
        let busy = while_replaced(|| {
            count += 1;
            Err::<(), _>(Error::Busy { path: "a".into() })
        });
        assert!(matches!(busy, Err(Error::Busy { .. })));
        assert_eq!(count, 1);
    }
}
