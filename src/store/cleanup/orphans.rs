//! Stripe directories that no checkpoint leads to: a save was killed before their marker had its name, or what removed
//! their checkpoint could not remove them. They hold no shard.

use crate::error::Result;
use crate::store::layout::stripe_marker::{is_foreign, stripe_owner};
use crate::store::write::stripe_dir::markers_alone;
use crate::sys::dir;
use std::path::{Path, PathBuf};

/// The files of such a directory: markers of a checkpoint below `root` that is gone, and markers without their final name.
/// None if it is not one.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub(in crate::store) fn remains(stripe_dir: &Path, root: &Path) -> Result<Vec<PathBuf>> {
    let markers = markers_alone(stripe_dir)?.unwrap_or_default();
    if markers.is_empty() {
        return Ok(markers);
    }
    // Its checkpoint's directory exists from before the marker is written until after it is removed.
    let is_gone = |checkpoint: &Path| checkpoint.starts_with(root) && dir::is_gone(checkpoint);
    let is_alone = match stripe_owner(stripe_dir)? {
        Some(checkpoint) => is_gone(Path::new(&checkpoint)),
        None => !is_foreign(stripe_dir)?,
    };
    Ok(if is_alone { markers } else { Vec::new() })
}
