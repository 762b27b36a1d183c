//! Which run the steps in a place are of. Two runs that save the same numbers to one place would replace each other's steps.

use crate::error::{Error, Result};
use crate::format::names;
use crate::object::{Bucket, is_url};
use crate::store::layout::{label, unique::unique};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// The content of the file that says it.
#[derive(Debug, Serialize, Deserialize)]
struct Owner {
    /// A text that no other run has.
    run: String,
}

/// The run whose steps a directory or a URL has; `None` if nothing says so yet.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for another program's file.
pub fn owner(place: &Path) -> Result<Option<String>> {
    let path = place.join(names::RUN);
    let text = match is_url(place) {
        false => label::read(place, names::RUN)?,
        true => match Bucket::at(place)?.read(names::RUN, label::BYTES_MAX) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io("reading", path, error)),
        },
    };
    let Some(text) = text else { return Ok(None) };
    let owner: Owner = serde_json::from_slice(&text).map_err(|error| {
        Error::format(
            path,
            format!("does not say which run these steps are of ({error}): remove it"),
        )
    })?;
    Ok(Some(owner.run))
}

/// Says that a place has the steps of a run, and returns its name; without one, of the run whose they are, or of a new one.
///
/// # Errors
/// As for [`owner`]; [`Error::Invalid`] if the place has the steps of another run.
pub fn claim(place: &Path, run: Option<&str>) -> Result<String> {
    let there = claimed(place, run)?;
    match run {
        Some(run) if run != there => {
            Err(two_runs(place, Path::new("those that are copied there now")))
        }
        _ => Ok(there),
    }
}

/// Checks that the steps in a run's directory and in further places are of one run. Returns the name of the run whose steps the
/// places have, if the directory did not have it, and has it now: training goes on with that run. `is_other` says whether the directory has
/// steps, and none of a place's, if one is named.
///
/// # Errors
/// As for [`claim`].
pub fn join(
    root: &Path,
    places: &[PathBuf],
    is_other: impl Fn(Option<&Path>) -> Result<bool>,
) -> Result<Option<String>> {
    let (mut there, own) = (None, owner(root)?);
    for place in places {
        let Some(run) = owner(place)? else { continue };
        match &there {
            None => there = Some((place, run)),
            Some((_, known)) if *known == run => {}
            Some((other, _)) => return Err(two_runs(place, other)),
        }
    }
    let Some((place, run)) = there.filter(|(_, run)| own.as_ref() != Some(run)) else {
        return Ok(None);
    };
    if is_other(own.is_none().then_some(place))? {
        return Err(two_runs(place, root));
    }
    // Before a step is saved there, which would be of no run.
    if let Err(error) = name_run(root, &run) {
        tracing::warn!(root = %root.display(), %error, "the directory cannot be noted as that run's");
    }
    let (root, place) = (root.display(), place.display());
    tracing::warn!(
        "{root} goes on with the run whose steps are in {place}. Another program that saves there is shut out at the first copy"
    );
    Ok(Some(run))
}

/// Gives a run that a directory goes on with a new name, there and in the places that have its steps. So a program that still
/// saves to them under the old name learns that it is no longer theirs.
///
/// # Errors
/// As for [`owner`].
pub fn take_over(root: &Path, places: &[PathBuf], run: &str) -> Result<()> {
    let new = unique();
    name_run(root, &new)?;
    for place in places {
        if owner(place)?.as_deref() == Some(run) {
            name_run(place, &new)?;
        }
    }
    Ok(())
}

/// Says which run a place has steps of, whatever it said before.
///
/// # Errors
/// As for [`owner`].
pub fn name_run(place: &Path, run: &str) -> Result<()> {
    let text = text_of(run.into());
    if !is_url(place) {
        return label::replace(place, names::RUN, &text);
    }
    let written = Bucket::at(place)?.replace(names::RUN, text.into_bytes());
    written.map_err(|error| Error::io("writing", place.join(names::RUN), error))
}

/// Checks that a checkpoint and what it is copied to are of one run, as far as the directories that they are in say.
///
/// # Errors
/// As for [`claim`].
pub(super) fn check_copy(from: &Path, to: &Path) -> Result<()> {
    let (Some(run), Some(place)) = (from.parent(), to.parent()) else { return Ok(()) };
    let Some(own) = owner(run)? else { return Ok(()) };
    match owner(place)? {
        Some(there) if there != own => Err(two_runs(place, run)),
        _ => Ok(()),
    }
}

fn text_of(run: String) -> String {
    serde_json::json!(Owner { run }).to_string()
}

fn two_runs(place: &Path, other: &Path) -> Error {
    Error::invalid(format!(
        "{} has steps of another run than {}, by the file {} in each, or another program has taken them over: two runs in one \
         place would replace each other's steps. Name another place in tiers; or, to go on with the steps that are there, \
         restore them in a directory that has none",
        place.display(),
        other.display(),
        names::RUN
    ))
}

fn claimed(place: &Path, run: Option<&str>) -> Result<String> {
    if let Some(owner) = owner(place)? {
        return Ok(owner);
    }
    let run = run.map_or_else(unique, str::to_owned);
    let text = text_of(run);
    match is_url(place) {
        false => label::create(place, names::RUN, &text)?,
        true => match Bucket::at(place)?.create(names::RUN, text.into_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::io("creating", place.join(names::RUN), error));
            }
            _ => {}
        },
    }
    let gone = || Error::io("reading", place.join(names::RUN), io::ErrorKind::NotFound.into());
    owner(place)?.ok_or_else(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_of_the_run_that_claims_it_first() {
        let root = tempfile::tempdir().unwrap();
        let (place, other) = (root.path().join("a/run"), root.path().join("b"));
        assert_eq!(owner(&place).unwrap(), None);
        assert_eq!(claim(&place, Some("1")).unwrap(), "1");
        assert_eq!(claim(&place, None).unwrap(), "1");
        assert!(claim(&place, Some("2")).unwrap_err().to_string().contains("of another run"));
        assert_ne!(claim(&other, None).unwrap(), "1");
        std::fs::write(place.join(names::RUN), "notes").unwrap();
        assert!(claim(&place, Some("1")).unwrap_err().to_string().contains("remove it"));
    }
}
