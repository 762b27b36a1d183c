//! Which steps of a run can be restored, and from which of its places.

#[cfg(doc)]
use super::CheckpointManager;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::object::is_url;
use crate::pipeline::job::Job;
use crate::store::{self, Found, OpenOptions, Status, Wanted, has_gone, warn_if_lost, why_lost};
use crate::sys::dir;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What [`CheckpointManager::restore`] does if a step is damaged or incomplete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDamage {
    /// It returns the error.
    #[default]
    Raise,
    /// It restores the newest earlier step that is intact, with a warning for each that it passes over.
    Previous,
}

/// The steps of a run, in its directory and in further places.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// The directory.
    pub root: &'a Path,
    /// The further places, the nearest first.
    pub places: &'a [PathBuf],
    /// Settings of the look.
    pub config: &'a Config,
}

impl Run<'_> {
    /// The steps that a restore may load, newest first, and of one step the nearest copy first. Includes damaged ones. With
    /// [`OnDamage::Previous`] and a manifest on bad sectors in the directory, only the newest step there that is intact.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the directory has a checkpoint, but nothing that counts as a step, or the places have steps of
    /// another run; [`Error::Io`] if the directory or a place cannot be read: it may have the newest step.
    pub fn candidates(&self, on_damage: OnDamage) -> Result<Vec<Found>> {
        // The directory first: a step that is copied and leaves meanwhile is in one list at least.
        let here = self.committed().and_then(|here| match here.is_empty() {
            true => self.refuse_other_checkpoints(),
            false => Ok(here),
        });
        let here = here.or_else(|error| match on_damage {
            OnDamage::Previous if matches!(error, Error::Io { .. }) && error.is_damage() => {
                self.intact(error)
            }
            _ => Err(error),
        });
        let there = self.there()?;
        if !there.is_empty() {
            // A copy comes before it.
            let damaged = here.iter().flatten().filter(|found| found.status == Status::Damaged);
            for found in damaged {
                let problem = found.problem.as_deref().unwrap_or_default();
                tracing::warn!("{} is damaged: {problem}", found.path.display());
            }
        }
        self.with_copies(here, there)
    }

    /// The steps that can be loaded, in the same order.
    ///
    /// # Errors
    /// As for [`Run::candidates`], but for a checkpoint that counts as no step.
    pub fn loadable(&self) -> Result<Vec<Found>> {
        let mut found = self.with_copies(self.committed(), self.there()?)?;
        found.retain(|found| found.status == Status::Committed);
        Ok(found)
    }

    /// The newest step that can be loaded by itself, and of its copies the nearest; `None` if nothing was committed.
    ///
    /// # Errors
    /// As for [`Run::candidates`]; what is wrong with the newest step, if none can be loaded.
    pub fn newest(&self) -> Result<Option<Found>> {
        let mut lost = None;
        for found in self.candidates(OnDamage::Raise)? {
            if found.status == Status::Committed {
                return Ok(Some(found));
            }
            pass_over(&found);
            lost = lost.or_else(|| why_lost(&found, self.config));
        }
        lost.map_or(Ok(None), |error| Err(error.without_earlier()))
    }

    /// The copies of the step of this number, the nearest first.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if no place has it (the list is never empty), which names the steps that there are; as for [`Run::loadable`].
    pub fn named(&self, step: u64) -> Result<Vec<Found>> {
        let mut found = self.with_copies(self.committed(), self.there()?)?;
        let mut there: Vec<u64> = found.iter().filter_map(|found| found.step).collect();
        found.retain(|found| found.step == Some(step));
        if !found.is_empty() {
            return Ok(found);
        }
        there.sort_unstable();
        there.dedup();
        let there: Vec<String> = there.iter().map(u64::to_string).collect();
        let there = if there.is_empty() { "none yet".into() } else { there.join(", ") };
        let all = std::iter::once(self.root).chain(self.places.iter().map(PathBuf::as_path));
        let all: Vec<String> = all.map(|place| place.display().to_string()).collect();
        let (has, their) = if all.len() > 1 { ("have", "their") } else { ("has", "its") };
        let reason = format!("{} {has} no step {step}; {their} steps: {there}", all.join(" and "));
        Err(Error::NoCheckpoint { path: usual_path(self.root, step), reason })
    }

    /// The committed steps in the directory alone, newest first, damaged ones too.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be listed, or the system refuses to read a directory that may be one of these steps.
    pub fn committed(&self) -> Result<Vec<Found>> {
        committed_in(self.root, self.config)
    }

    /// The committed steps in the further places, newest first in each.
    ///
    /// # Errors
    /// A place that cannot be listed; [`Error::Invalid`] for steps of another run.
    pub fn there(&self) -> Result<Vec<Found>> {
        if self.places.is_empty() {
            return Ok(Vec::new());
        }
        store::join(self.root, self.places, self.config)?;
        let mut all = Vec::new();
        for place in self.places {
            warn_if_missing(place);
            all.append(&mut committed_in(place, self.config)?);
        }
        Ok(all)
    }

    /// Why nothing can be loaded, if nothing counts as a step, but something was committed.
    ///
    /// # Errors
    /// That; no steps if nothing was committed; the steps, if another process has committed the first one meanwhile.
    fn refuse_other_checkpoints(&self) -> Result<Vec<Found>> {
        let wanted = Wanted::default();
        let newest = store::latest(self.root, &wanted, self.config, &Job::of(self.config))?;
        let Some(newest) = newest else { return Ok(Vec::new()) };
        let found = self.committed()?;
        if found.is_empty() && !has_gone(&newest.path) {
            return Err(Error::invalid(format!(
                "{} is a checkpoint, but nothing in {} counts as a step: training must not begin anew beside it. Load it \
                 by its path, or give the manager another directory",
                newest.path.display(),
                self.root.display()
            )));
        }
        Ok(found)
    }

    /// The newest step in the directory whose every byte is intact.
    ///
    /// # Errors
    /// `error`, if there is none.
    fn intact(&self, error: Error) -> Result<Vec<Found>> {
        let wanted = Wanted { verify: true, ..Wanted::default() };
        let newest = store::latest(self.root, &wanted, self.config, &Job::of(self.config))?;
        let found: Vec<Found> = newest.into_iter().filter(|found| found.step.is_some()).collect();
        if found.is_empty() { Err(error) } else { Ok(found) }
    }

    /// The steps here and in the places, newest first, of copies the nearest first. What is wrong with the directory is no
    /// error where a place has steps, unless the system refuses to read it.
    fn with_copies(&self, here: Result<Vec<Found>>, mut there: Vec<Found>) -> Result<Vec<Found>> {
        let is_refused = |error: &Error| matches!(error, Error::Io { .. }) && !error.is_not_found();
        let mut all = match here {
            Err(error) if !there.is_empty() && !is_refused(&error) => {
                tracing::warn!("{} has nothing to restore: {error}", self.root.display());
                Vec::new()
            }
            here => here?,
        };
        all.append(&mut there);
        all.sort_by_key(|found| Reverse(found.order)); // a stable sort: of copies the nearest
        Ok(all)
    }
}

/// The nearest copy of the newest step in some places that can be loaded by itself; `None` if nothing was committed.
///
/// # Errors
/// [`Error::Invalid`] for steps of two runs; what is wrong with the newest step, if none can be loaded; as for
/// [`latest`](crate::latest()).
pub fn latest_of(
    places: &[PathBuf],
    wanted: &Wanted,
    config: &Config,
    job: &Arc<Job>,
) -> Result<Option<Found>> {
    store::check_one_run(places)?;
    let (mut newest, mut lost) = (None::<Found>, None);
    for place in places {
        match store::latest(place, wanted, config, job) {
            Ok(Some(found)) if newest.as_ref().is_none_or(|known| found.order > known.order) => {
                newest = Some(found);
            }
            Ok(_) => {}
            Err(error) if error.is_damage() || matches!(error, Error::MissingFiles { .. }) => {
                tracing::warn!("{} has no step that can be loaded: {error}", place.display());
                lost = lost.or(Some(error));
            }
            Err(error) => return Err(error),
        }
    }
    match (newest, lost) {
        (None, Some(error)) => Err(error),
        (newest, _) => Ok(newest),
    }
}

/// The newest step of which some places have all files together, and its copies in the others, the nearest first.
///
/// # Errors
/// [`Error::NoCheckpoint`] if nothing was committed there; [`Error::Invalid`] for steps of two runs; what is wrong with the
/// newest step, if none is whole; a place that cannot be listed.
pub fn newest_of(places: &[PathBuf], config: &Config) -> Result<(PathBuf, Vec<PathBuf>)> {
    store::check_one_run(places)?;
    let mut listed = Vec::new();
    for place in places {
        warn_if_missing(place);
        listed.extend(listed_in(place, config)?.into_iter().filter(Found::was_committed));
    }
    // A damaged manifest does not tell when it was committed.
    let is_damaged = |found: &mut Found| found.created_unix_ms.is_none();
    let damaged: Vec<Found> = listed.extract_if(.., is_damaged).collect();
    damaged.iter().for_each(pass_over);
    listed.sort_by_key(|found| Reverse(found.order)); // a stable sort: of copies the nearest
    let mut lost = None;
    for copies in listed.chunk_by(|one, other| one.order == other.order) {
        let (nearest, others) = copies.split_first().expect("no chunk is empty");
        let others: Vec<PathBuf> = others.iter().map(|copy| copy.path.clone()).collect();
        let opened = match nearest.status {
            Status::Committed => Ok(()),
            _ => OpenOptions::of(config).copies(&others).open(&nearest.path).map(drop),
        };
        match opened {
            Ok(()) => return Ok((nearest.path.clone(), others)),
            Err(error) if !error.is_of_checkpoint() => return Err(error),
            Err(error) => {
                tracing::warn!("passing over {}: {error}", nearest.path.display());
                lost = lost.or(Some(error));
            }
        }
    }
    let newest = || damaged.iter().max_by_key(|found| found.order);
    Err(lost.or_else(|| why_lost(newest()?, config)).unwrap_or_else(|| {
        let all: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
        let reason = format!("no step was committed in {}", all.join(" and "));
        Error::NoCheckpoint { path: places.first().cloned().unwrap_or_default(), reason }
    }))
}

/// Where a step is saved, unless the run has it under another name.
pub fn usual_path(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:08}"))
}

/// The committed steps in a place, newest first.
fn committed_in(place: &Path, config: &Config) -> Result<Vec<Found>> {
    let mut steps = listed_in(place, config)?;
    steps.retain(is_step);
    Ok(steps)
}

/// The steps in a place, newest first. Warns of those before the newest committed one whose manifest is gone.
fn listed_in(place: &Path, config: &Config) -> Result<Vec<Found>> {
    let mut steps = store::steps(place, None, config)?;
    steps.reverse();
    for newer in steps.iter().take_while(|found| !is_step(found)) {
        warn_if_lost(newer);
    }
    Ok(steps)
}

/// Warns of a place that does not exist: the steps that it may have are not seen.
fn warn_if_missing(place: &Path) {
    if !is_url(place) && !dir::has(place) {
        tracing::warn!(
            "{} does not exist: there is nothing to restore from it, and the first copy creates it. Is its disk mounted?",
            place.display()
        );
    }
}

fn pass_over(found: &Found) {
    let problem = found.problem.as_deref().unwrap_or_default();
    tracing::warn!("passing over {}, which cannot be loaded: {problem}", found.path.display());
}

fn is_step(found: &Found) -> bool {
    found.step.is_some() && found.was_committed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;
    use crate::format::names;

    fn save(at: &Path, step: Option<u64>) {
        let mut state = StateDict::new();
        if let Some(step) = step {
            state.value("x", 1).step(step);
        }
        crate::save(&state, at).unwrap();
    }

    #[test]
    fn a_training_does_not_begin_anew_beside_a_checkpoint_that_is_no_step() {
        let root = tempfile::tempdir().unwrap();
        let run = Run { root: root.path(), places: &[], config: &Config::default() };
        assert!(run.candidates(OnDamage::Raise).unwrap().is_empty());
        save(&root.path().join("final"), None);
        let refused = run.candidates(OnDamage::Raise).unwrap_err();
        assert!(refused.to_string().contains("begin anew"), "{refused}");
        assert!(run.newest().is_err() && run.loadable().unwrap().is_empty());
        save(&root.path().join("step-7"), Some(7));
        assert_eq!(run.newest().unwrap().unwrap().step, Some(7));
    }

    #[test]
    fn a_directory_that_holds_no_step_gives_way_to_a_place_that_does() {
        let dir = tempfile::tempdir().unwrap();
        let (root, places) =
            (dir.path().join("here"), [dir.path().join("there"), dir.path().join("gone")]);
        save(&root.join("final"), None);
        save(&places[0].join("step-7"), Some(7));
        let run = Run { root: &root, places: &places, config: &Config::default() };
        let found = run.candidates(OnDamage::Raise).unwrap();
        assert_eq!(found[0].path, places[0].join("step-7"));
        let missing = run.named(8).unwrap_err().to_string();
        assert!(missing.contains("their steps: 7"), "{missing}");
    }

    #[test]
    fn a_first_commit_between_two_looks_is_a_step() {
        use crate::sys::seam::{Call, Outcome, on_thread};
        let dir = tempfile::tempdir().unwrap();
        let (root, step) = (dir.path().to_path_buf(), dir.path().join("step-7"));
        let run = Run { root: &root, places: &[], config: &Config::default() };
        // Another process commits it after the first look.
        let (mut listed, root) = (0, root.clone());
        let _watch = on_thread(move |_, call, path| {
            listed += usize::from(call == Call::List && path == root);
            if listed == 2 {
                listed += 1;
                std::thread::scope(|scope| drop(scope.spawn(|| save(&step, Some(7))).join()));
            }
            Outcome::Pass
        });
        assert_eq!(run.newest().unwrap().unwrap().step, Some(7));
    }

    #[test]
    fn places_of_a_run_that_got_a_new_name_are_of_one_run() {
        let dir = tempfile::tempdir().unwrap();
        let places = ["a", "b"].map(|name| dir.path().join(name));
        save(&places[0].join("step-1"), Some(1));
        save(&places[1].join("step-1"), Some(1));
        let note = |place: &Path, text| std::fs::write(place.join(names::RUN), text).unwrap();
        let look = || {
            let config = Config::default();
            latest_of(&places, &Wanted::default(), &config, &Job::of(&config))
        };
        note(&places[0], r#"{"run": "new", "former": ["run"]}"#);
        note(&places[1], r#"{"run": "run"}"#); // it was not mounted then
        assert_eq!(look().unwrap().unwrap().step, Some(1));
        note(&places[1], r#"{"run": "another"}"#);
        assert!(look().unwrap_err().to_string().contains("another run"));
    }
}
