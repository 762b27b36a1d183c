//! Whether the steps in several places are of one run.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::catalog::found::Status;
use crate::store::catalog::steps::steps;
#[cfg(doc)]
use crate::store::promote::claim_for;
use crate::store::promote::{Owner, note_taking, noted, two_runs};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Checks that the steps in a run's directory and in further places are of one run. A directory that has no steps, or some that
/// the places have, too, goes on with their run: now it is noted, and the first copy takes the places over ([`claim_for`]).
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for steps of two runs; as for [`owner`](crate::store::owner) and [`steps`].
pub fn join(root: &Path, places: &[PathBuf], config: &Config) -> Result<()> {
    loop {
        let before = noted(root)?.map(|own| own.run);
        let joined = join_now(root, places, config);
        // A copy may take the places over just now.
        if joined.is_ok() || noted(root)?.map(|own| own.run) == before {
            return joined;
        }
    }
}

/// Checks that the steps in some places are not noted to be of different runs.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if they are; as for [`owner`](crate::store::owner).
pub fn check_one_run(places: &[PathBuf]) -> Result<()> {
    let refusal = |place: &Path, other: &Path| {
        let (place, other) = (place.display(), other.display());
        Error::invalid(format!(
            "{place} has steps of another run than {other}: name the tiers of one run"
        ))
    };
    other_run(places, |_| false, refusal).map(drop)
}

/// The run of those places that are noted to be of another than `is_own`'s, and whether one is of that.
///
/// # Errors
/// `refusal`, if they are of several.
fn other_run(
    places: &[PathBuf],
    is_own: impl Fn(&str) -> bool,
    refusal: impl Fn(&Path, &Path) -> Error,
) -> Result<(bool, Option<(&PathBuf, Owner)>)> {
    let (mut has_own, mut there) = (false, None::<(&PathBuf, Owner)>);
    for place in places {
        let Some(found) = noted(place)? else { continue };
        match &there {
            _ if is_own(&found.run) => has_own = true,
            None => there = Some((place, found)),
            Some((_, known)) if known.has_been(&found.run) => {}
            // It was not mounted when the run got a new name.
            Some((_, known)) if found.has_been(&known.run) => there = Some((place, found)),
            Some((other, _)) => return Err(refusal(place, other)),
        }
    }
    Ok((has_own, there))
}

fn join_now(root: &Path, places: &[PathBuf], config: &Config) -> Result<()> {
    let own = noted(root)?;
    let is_own = |run: &str| own.as_ref().is_some_and(|own| own.has_been(run));
    let (has_own, there) = other_run(places, is_own, two_runs)?;
    let Some((place, found)) = there else { return Ok(()) };
    let here = saves(root, config)?;
    let is_of_it = here.is_empty() || own.is_none() && !here.is_disjoint(&saves(place, config)?);
    if has_own || !is_of_it {
        return Err(two_runs(place, root));
    }
    // Now: a kill may come between the first save there and its copy.
    if let Err(error) = note_taking(root, found) {
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
