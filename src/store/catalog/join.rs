//! Whether the steps in several places are of one run.

use crate::config::Config;
use crate::error::Result;
use crate::store::catalog::found::Status;
use crate::store::catalog::steps::steps;
#[cfg(doc)]
use crate::store::promote::take_over;
use crate::store::promote::{note_taking, noted, owner, two_runs};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Checks that the steps in a run's directory and in further places are of one run. A directory that has no steps, or some that
/// the places have, too, goes on with their run: now it is noted, and the first copy takes the places over ([`take_over`]).
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for steps of two runs; as for [`owner`] and [`steps`].
pub fn join(root: &Path, places: &[PathBuf], config: &Config) -> Result<()> {
    let (own, takes) = noted(root)?.map_or((None, None), |noted| (Some(noted.run), noted.takes));
    let mut there = None;
    for place in places {
        let Some(run) = owner(place)? else { continue };
        // A kill came after this place was taken over, and before the last one was.
        if takes.is_some() && takes.as_ref() != Some(&run) && own.as_ref() == Some(&run) {
            continue;
        }
        match &there {
            None => there = Some((place, run)),
            Some((_, known)) if *known == run => {}
            Some((other, _)) => return Err(two_runs(place, other)),
        }
    }
    let is_noted = |run: &String| own.as_ref() == Some(run) || takes.as_ref() == Some(run);
    let Some((place, run)) = there.filter(|(_, run)| !is_noted(run)) else { return Ok(()) };
    let here = saves(root, config)?;
    let is_of_it = here.is_empty() || own.is_none() && !here.is_disjoint(&saves(place, config)?);
    if !is_of_it {
        return Err(two_runs(place, root));
    }
    // Now: a kill may come between the first save there and its copy.
    if let Err(error) = note_taking(root, &run, &run) {
        tracing::warn!(root = %root.display(), %error, "the directory cannot be noted as that run's");
    }
    let (root, place) = (root.display(), place.display());
    tracing::warn!(
        "{root} goes on with the run whose steps are in {place}. Another program that saves there is shut out at the first copy"
    );
    Ok(())
}

/// What tells the committed steps in a place from others.
fn saves(place: &Path, config: &Config) -> Result<HashSet<(Option<u64>, Option<u64>)>> {
    let steps = steps(place, None, config)?.into_iter();
    let committed = steps.filter(|found| found.status == Status::Committed);
    Ok(committed.map(|found| (found.step, found.created_unix_ms)).collect())
}
