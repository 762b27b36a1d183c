//! Stripe directories that no checkpoint leads to: a save was killed before their marker had its name, or what removed
//! their checkpoint could not remove them, or a rank outlived its cancelled session.

use crate::error::Result;
use crate::format::names;
use crate::store::layout::stripe_marker::{is_foreign, stripe_owner};
use crate::store::write::stripe_dir::markers_alone;
use crate::sys::dir::{self, file_names};
use crate::sys::lock;
use crate::sys::removal_note;
use std::path::{Path, PathBuf};

/// A stripe directory that no checkpoint leads to.
pub(in crate::store) enum Orphan {
    /// It holds these and nothing else: markers of a checkpoint that is gone, and markers without their final name.
    Markers(Vec<PathBuf>),
    /// It holds shards of this checkpoint, which is gone from its path. Nobody can tell whether it was moved.
    Shards(String),
    /// It holds what a rank was writing, and no marker or one without its final name: the rank outlived its session, whose
    /// cancellation was killed. Or it holds nothing, and its removal was killed.
    Unmarked,
}

/// What is in a stripe directory that no checkpoint below `root` leads to. None if one does, or may.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io).
pub(in crate::store) fn find(stripe_dir: &Path, root: &Path) -> Result<Option<Orphan>> {
    let markers = markers_alone(stripe_dir)?.filter(|markers| !markers.is_empty());
    // Its checkpoint's directory exists from before the marker is written until after it is removed.
    let is_gone = |checkpoint: &Path| checkpoint.starts_with(root) && dir::is_gone(checkpoint);
    Ok(match (markers, stripe_owner(stripe_dir)?) {
        (_, Some(checkpoint)) if !is_gone(Path::new(&checkpoint)) => None,
        (Some(markers), Some(_)) => Some(Orphan::Markers(markers)),
        (Some(markers), None) => (!is_foreign(stripe_dir)?).then_some(Orphan::Markers(markers)),
        (None, Some(checkpoint)) => {
            let is_shard = |name: &String| names::is_shard(name) || names::is_uncommitted(name);
            let has_shards = file_names(stripe_dir)?.iter().any(is_shard);
            has_shards.then_some(Orphan::Shards(checkpoint))
        }
        (None, None) => {
            let names = file_names(stripe_dir)?;
            let is_left = names.iter().any(|name| names::split_write(name).is_some())
                && names.iter().all(|name| name == lock::FILE || names::is_left_unmarked(name));
            (is_left || removal_note::is_left_empty(stripe_dir)).then_some(Orphan::Unmarked)
        }
    })
}
