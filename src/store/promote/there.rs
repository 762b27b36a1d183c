//! Whether a place has a copy of a save at this moment.

use super::target_at;
use super::{Patience, has_all};
use crate::error::Result;
use crate::format::manifest::Listed;
use crate::format::{Manifest, SaveId, names};
use crate::object::is_url;
use crate::pipeline::job::Job;
use crate::sys::dir;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Why a place does not have all that a checkpoint has, as its manifest and the lengths of its files tell; `None` if it does.
/// Takes the checkpoint and its manifest. Asks once: the caller repeats the look when it needs it again.
///
/// # Errors
/// What the store or the system says: nobody knows what is there.
pub(in crate::store) fn lacks(
    (checkpoint, here): (&Path, &Listed),
    place: &Path,
    job: &Arc<Job>,
) -> Result<Option<String>> {
    if !is_url(place) && dir::is_link(place) {
        return Ok(Some("is a link, which is no copy".into()));
    }
    if dir::is_same(checkpoint, place) {
        return Ok(Some("is the checkpoint itself, and no copy".into()));
    }
    let target = &*target_at(place, Patience::new(place, Duration::ZERO, job), job)?;
    let Some(seen) = target.manifest()? else { return Ok(Some("is not there".into())) };
    let there = match Manifest::decode_files(seen.manifest, &place.join(names::MANIFEST)) {
        Err(error) if error.is_damage() => return Ok(Some(format!("is damaged ({error})"))),
        there => there?,
    };
    if SaveId::of(&there) != SaveId::of(here) {
        return Ok(Some("is another save of this step".into()));
    }
    if there.dropped.iter().any(|name| !here.dropped.contains(name)) {
        return Ok(Some(format!(
            "lacks {}, which `slim` has dropped",
            there.dropped.join(" and ")
        )));
    }
    let is_whole = has_all(target, &there.files)?;
    Ok((!is_whole).then(|| "lacks files".into()))
}
