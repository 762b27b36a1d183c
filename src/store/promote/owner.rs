//! Which run the steps in a place are of. Two runs that save the same numbers to one place would replace each other's steps.

use super::Promotion;
use super::patience::Patience;
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::{Bucket, is_url};
use crate::pipeline::job::Job;
use crate::store::layout::published::{LABEL_BYTES_MAX, read_label, write_label};
use crate::sys::chance::unique;
use crate::sys::dir;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// So many former names of a run are remembered.
const FORMER_MAX: usize = 20;

/// The content of the file that says it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(in crate::store) struct Owner {
    /// A text that no other run has.
    pub run: String,
    /// Of a run's directory: the run whose steps in the tiers it goes on with, until the first copy gives that a new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<String>,
    /// The names that the run had before, the last one last. A tier that was not mounted when it got a new one has one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<String>,
}

impl Owner {
    fn named(run: &str) -> Self {
        Self { run: run.into(), ..Self::default() }
    }

    /// Whether the run has this name, or had it before.
    pub fn has_been(&self, run: &str) -> bool {
        self.run == run || self.former.iter().any(|name| name == run)
    }

    /// The same run under a new name.
    fn renamed(mut self) -> Self {
        let old = std::mem::replace(&mut self.run, unique());
        self.former.retain(|name| *name != old);
        self.former.push(old);
        self.former.drain(..self.former.len().saturating_sub(FORMER_MAX));
        Self { takes: None, ..self }
    }
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
    claim_as(place, run.map(Owner::named).as_ref())
}

/// [`claim`] of one of its places for the run of a directory, which gets a name if it has none. A place that has a former name
/// of it gets the present. If the directory goes on with the run of its places ([`join`](crate::store::join)), that run first
/// gets a new name, here and there: so a program that still saves to them under the old name learns that it is no longer theirs.
///
/// # Errors
/// As for [`claim`].
pub fn claim_for(root: &Path, places: &[PathBuf], place: &Path) -> Result<String> {
    take_over(root, places)?;
    claim(root, None)?;
    claim_as(place, noted(root)?.as_ref())
}

fn claim_as(place: &Path, own: Option<&Owner>) -> Result<String> {
    let patience = Patience::new(place, Promotion::default().patience, &Arc::default());
    let there = patience.ask(|| claimed(place, own))?;
    match own {
        Some(own) if own.run != there => {
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

/// Gives the run that a directory goes on with, if it does, a new name. A place that cannot be asked, or is not mounted, gets the
/// name with its next copy.
fn take_over(root: &Path, places: &[PathBuf]) -> Result<()> {
    let Some(owner) = noted(root)?.filter(|owner| owner.takes.is_some()) else { return Ok(()) };
    let named = owner.renamed();
    note(root, &named)?;
    for place in places {
        let done = noted(place).and_then(|there| match there {
            Some(there) if named.has_been(&there.run) => note(place, &named),
            _ => Ok(()),
        });
        if let Err(error) = done {
            tracing::debug!(place = %place.display(), %error, "it gets the run's new name with its first copy");
        }
    }
    Ok(())
}

/// Notes in a run's directory which run's steps it goes on with, until [`claim_for`] gives that run a new name.
///
/// # Errors
/// As for [`owner`].
pub(in crate::store) fn note_taking(root: &Path, owner: Owner) -> Result<()> {
    note(root, &Owner { takes: Some(owner.run.clone()), ..owner })
}

/// Notes which run's steps a place has, in place of what was noted.
///
/// # Errors
/// As for [`owner`].
pub fn name_run(place: &Path, run: &str) -> Result<()> {
    note(place, &Owner::named(run))
}

fn note(place: &Path, owner: &Owner) -> Result<()> {
    let text = serde_json::json!(owner).to_string();
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
    let Some(own) = noted(run)? else { return Ok(()) };
    let bucket = |url: &Path| Ok(Bucket::retried_by_caller(url)?.until(job.stop_flag()));
    match owner_by(place, bucket)? {
        Some(there) if !own.has_been(&there) => Err(two_runs(place, run)),
        _ => Ok(()),
    }
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

fn claimed(place: &Path, own: Option<&Owner>) -> Result<String> {
    if let Some(there) = owner_by(place, Bucket::retried_by_caller)? {
        return match own.filter(|own| own.run != there && own.has_been(&there)) {
            Some(own) => note(place, own).map(|()| own.run.clone()),
            None => Ok(there),
        };
    }
    let owner =
        own.map_or_else(|| Owner::named(&unique()), |own| Owner { takes: None, ..own.clone() });
    let text = serde_json::json!(owner).to_string();
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
    fn place_that_was_away_when_its_run_got_a_new_name_gets_it_later() {
        let dir = tempfile::tempdir().unwrap();
        let [root, a, b] = ["root", "a", "b"].map(|name| dir.path().join(name));
        for place in [&root, &a, &b] {
            claim(place, Some("old")).unwrap();
        }
        note_taking(&root, Owner::named("old")).unwrap();
        let away = dir.path().join("away");
        std::fs::rename(&b, &away).unwrap();
        let places = [a.clone(), b.clone()];
        take_over(&root, &places).unwrap();
        let new = owner(&root).unwrap().unwrap();
        assert_ne!(new, "old");
        assert_eq!(claim_for(&root, &places, &a).unwrap(), new);
        // What is made in place of a disk that is not mounted.
        assert_eq!(claim_for(&root, &places, &b).unwrap(), new);
        std::fs::remove_dir_all(&b).unwrap();
        std::fs::rename(&away, &b).unwrap();
        take_over(&root, &places).unwrap();
        assert_eq!(owner(&root).unwrap().as_ref(), Some(&new), "once");
        crate::store::join(&root, &places, &crate::Config::default()).unwrap();
        assert_eq!(claim_for(&root, &places, &b).unwrap(), new);
        assert_eq!([owner(&a).unwrap(), owner(&b).unwrap()], [Some(new.clone()), Some(new)]);
        assert!(claim(&b, Some("old")).unwrap_err().to_string().contains("another run"));
    }

    #[test]
    fn only_the_last_names_are_remembered() {
        let mut owner = Owner::named("first");
        for _ in 0..2 * FORMER_MAX {
            owner = owner.renamed();
        }
        assert_eq!(owner.former.len(), FORMER_MAX);
        assert!(!owner.has_been("first"));
        let last = owner.run.clone();
        assert!(owner.renamed().has_been(&last));
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
