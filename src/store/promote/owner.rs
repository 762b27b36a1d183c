//! Which run the steps in a place are of. Two runs that save the same numbers to one place would replace each other's steps.

use super::Promotion;
use super::patience::Patience;
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::{Bucket, is_url};
use crate::pipeline::job::Job;
use crate::store::layout::published::{LABEL_BYTES_MAX, read_label, write_label};
use crate::store::layout::unique::unique;
use crate::sys::dir;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The content of the file that says it.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::store) struct Owner {
    /// A text that no other run has.
    pub run: String,
    /// Of a run's directory: the run whose steps in the tiers it goes on with, until it has taken all of them over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<String>,
}

/// The run whose steps a directory or a URL has; `None` if nothing says so yet.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for another program's file.
pub fn owner(place: &Path) -> Result<Option<String>> {
    owner_by(place, Bucket::at)
}

/// All that the file in a run's directory says.
///
/// # Errors
/// As for [`owner`].
pub(in crate::store) fn noted(root: &Path) -> Result<Option<Owner>> {
    noted_by(root, Bucket::at)
}

/// Whether the run files of two checkpoints' directories name the same run. False if one cannot be read.
pub fn is_one_run(one: &Path, other: &Path) -> bool {
    let run = |path: &Path| owner(path.parent()?).ok().flatten();
    run(one).is_some_and(|run_of_one| run(other) == Some(run_of_one))
}

/// [`owner`], by requests of this bucket.
fn owner_by(place: &Path, bucket: impl Fn(&Path) -> Result<Bucket>) -> Result<Option<String>> {
    Ok(noted_by(place, bucket)?.map(|owner| owner.run))
}

fn noted_by(place: &Path, bucket: impl Fn(&Path) -> Result<Bucket>) -> Result<Option<Owner>> {
    let path = place.join(names::RUN);
    let text = match is_url(place) {
        false => read_label(place, names::RUN)?,
        true => match bucket(place)?.read(names::RUN, LABEL_BYTES_MAX) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io("reading", path, error)),
        },
    };
    let Some(text) = text else { return Ok(None) };
    let owner = serde_json::from_slice(&text).map_err(|error| {
        Error::format(
            path,
            format!("does not say which run these steps are of ({error}): remove it"),
        )
    })?;
    Ok(Some(owner))
}

/// Notes that a place has the steps of a run, and returns the run's name. Without a name, that is the run whose steps are there, or
/// a new one. Goes on for as long as a promotion does by default while a store does not answer.
///
/// # Errors
/// As for [`owner`]; [`Error::Invalid`] if the place has the steps of another run.
pub fn claim(place: &Path, run: Option<&str>) -> Result<String> {
    let patience = Patience::new(place, Promotion::default().patience, &Arc::default());
    let there = patience.ask(|| claimed(place, run))?;
    match run {
        Some(run) if run != there => {
            Err(two_runs(place, Path::new("those that are copied there now")))
        }
        _ => Ok(there),
    }
}

/// Checks that a place is in none of the others, nor one of them in it.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_apart<'a>(place: &Path, others: impl Iterator<Item = &'a Path>) -> Result<()> {
    match others.into_iter().find(|other| dir::are_nested(place, other)) {
        None => Ok(()),
        Some(other) => Err(Error::invalid(format!(
            "{} in tiers and {} are the same, or one is in the other: name places elsewhere, each once; the directory that \
             the checkpoints are in is not named",
            place.display(),
            other.display()
        ))),
    }
}

/// If a directory goes on with the run of its places ([`join`](crate::store::join)), gives that run a new name, here and there.
/// So a program that still saves to them under the old name learns that it is no longer theirs.
///
/// # Errors
/// As for [`owner`].
pub fn take_over(root: &Path, places: &[PathBuf]) -> Result<()> {
    let Some(Owner { run, takes: Some(takes) }) = noted(root)? else { return Ok(()) };
    // One that failed in the middle has named the directory: it goes on with that name.
    let new = if run == takes { unique() } else { run };
    note_taking(root, &new, &takes)?;
    for place in places {
        if owner(place)?.as_ref() == Some(&takes) {
            name_run(place, &new)?;
        }
    }
    name_run(root, &new)
}

/// Notes in a run's directory which run's steps it goes on with, until [`take_over`] has given that run a new name.
///
/// # Errors
/// As for [`owner`].
pub(in crate::store) fn note_taking(root: &Path, run: &str, takes: &str) -> Result<()> {
    let owner = Owner { run: run.into(), takes: Some(takes.into()) };
    write_label(root, names::RUN, &serde_json::json!(owner).to_string(), true)
}

/// Notes which run's steps a place has, in place of what was noted.
///
/// # Errors
/// As for [`owner`].
pub fn name_run(place: &Path, run: &str) -> Result<()> {
    let text = text_of(run.into());
    if !is_url(place) {
        return write_label(place, names::RUN, &text, true);
    }
    let written = Bucket::at(place)?.replace(names::RUN, text.into_bytes());
    written.map_err(|error| Error::io("writing", place.join(names::RUN), error))
}

/// Checks that a checkpoint and what it is copied to are of one run, as far as the directories that they are in say.
///
/// # Errors
/// As for [`claim`].
pub(super) fn check_copy(from: &Path, to: &Path, job: &Job) -> Result<()> {
    let (Some(run), Some(place)) = (from.parent(), to.parent()) else { return Ok(()) };
    let Some(own) = owner(run)? else { return Ok(()) };
    let bucket = |url: &Path| Ok(Bucket::retried_by_caller(url)?.until(job.stop_flag()));
    match owner_by(place, bucket)? {
        Some(there) if there != own => Err(two_runs(place, run)),
        _ => Ok(()),
    }
}

fn text_of(run: String) -> String {
    serde_json::json!(Owner { run, takes: None }).to_string()
}

/// The error for a place with steps of another run than another one.
pub(in crate::store) fn two_runs(place: &Path, other: &Path) -> Error {
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
    if let Some(owner) = owner_by(place, Bucket::retried_by_caller)? {
        return Ok(owner);
    }
    let run = run.map_or_else(unique, str::to_owned);
    let text = text_of(run);
    match is_url(place) {
        false => write_label(place, names::RUN, &text, false)?,
        true => match Bucket::retried_by_caller(place)?.create(names::RUN, text.into_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::io("creating", place.join(names::RUN), error));
            }
            _ => {}
        },
    }
    let gone = || Error::io("reading", place.join(names::RUN), io::ErrorKind::NotFound.into());
    owner_by(place, Bucket::retried_by_caller)?.ok_or_else(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take_over_that_failed_in_the_middle_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let [root, a, b] = ["root", "a", "b"].map(|name| dir.path().join(name));
        for place in [&root, &a, &b] {
            claim(place, Some("old")).unwrap();
        }
        note_taking(&root, "old", "old").unwrap();
        let label = b.join(names::RUN);
        std::fs::write(&label, "notes").unwrap();
        take_over(&root, &[a.clone(), b.clone()]).unwrap_err();
        std::fs::remove_file(&label).unwrap();
        claim(&b, Some("old")).unwrap();
        assert_eq!(noted(&root).unwrap().unwrap().takes.as_deref(), Some("old"));
        take_over(&root, &[a.clone(), b.clone()]).unwrap();
        assert_eq!(noted(&root).unwrap().unwrap().takes, None);
        let new = owner(&root).unwrap().unwrap();
        assert_ne!(new, "old");
        assert_eq!([owner(&a).unwrap(), owner(&b).unwrap()], [Some(new.clone()), Some(new)]);
    }

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
