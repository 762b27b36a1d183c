//! The marker of a stripe directory, which names the checkpoint that its shards belong to.

use crate::error::{Error, Result};
use crate::format::{names, whole_text};
use crate::sys::file;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The content of a stripe directory's marker.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    /// The checkpoint's own directory.
    checkpoint: String,
}

/// The text of the marker of a checkpoint, named by its own directory.
pub(in crate::store) fn text_of(checkpoint: &str) -> String {
    serde_json::json!(Marker { checkpoint: checkpoint.into() }).to_string()
}

/// Longer markers are not read: ours hold one path.
const MARKER_BYTES_MAX: u64 = 65_536;

/// The checkpoint whose stripe directory `dir` is, by its marker; `None` without a marker.
///
/// # Errors
/// [`Error::Io`] for a marker that exists and cannot be read: the files beside it may be somebody's.
pub(in crate::store) fn stripe_owner(dir: &Path) -> Result<Option<String>> {
    let marker = read_marker(dir)?.and_then(|text| serde_json::from_slice(&text).ok());
    Ok(marker.map(|marker: Marker| marker.checkpoint))
}

/// Whether the file in `dir` with a marker's name is another program's: whole text that names no checkpoint.
///
/// # Errors
/// As for [`stripe_owner`].
pub(in crate::store) fn is_foreign(dir: &Path) -> Result<bool> {
    let is_marker = |text: &str| serde_json::from_str::<Marker>(text).is_ok();
    let text = read_marker(dir)?;
    Ok(text.is_some_and(|text| whole_text(&text).is_some_and(|text| !is_marker(text))))
}

/// The text of the marker in `dir`; `None` without a marker.
///
/// # Errors
/// As for [`stripe_owner`].
pub(in crate::store) fn read_marker(dir: &Path) -> Result<Option<Vec<u8>>> {
    let path = dir.join(names::STRIPE_MARKER);
    match file::read_start(&path, MARKER_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(e) if file::is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io("reading", path, e)),
    }
}
