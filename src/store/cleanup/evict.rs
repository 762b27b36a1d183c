//! Removes steps from a run's directory that all of its further places have. Nothing is remembered: it checks each
//! place right before it removes a step, since the place may have lost the step, or may be another disk by now.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::manifest::Listed;
use crate::pipeline::job::Job;
use crate::store::cleanup::history::remove_step;
use crate::store::cleanup::look::Look;
use crate::store::cleanup::remove::Disposal;
use crate::store::cleanup::slim::older_steps;
use crate::store::layout::manifest;
use crate::store::promote;
use crate::store::write::swept::Left;
use crate::sys::fork::{GENERATIONS, PerProcess};
use crossbeam_channel::bounded;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the looks of one eviction may take in all: a save waits for them.
const LOOKS_MAX: Duration = Duration::from_secs(5);

/// What an eviction did.
#[derive(Debug, Default, Serialize)]
pub struct Evicted {
    /// Steps that were removed.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// Older steps that stay, oldest first.
    pub stay: Vec<Stay>,
    /// What could not be removed, and why.
    pub left: Vec<Left>,
}

/// A step that stays in the run's directory.
#[derive(Debug, Serialize)]
pub struct Stay {
    /// Its directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Which place does not have it, and why.
    pub reason: String,
    /// Whether another copy is needed. Otherwise a place did not answer, and the next eviction checks it again.
    pub is_lacking: bool,
}

/// Removes the steps of a run that each of `places` has whole at this moment, except the newest `keep`, the last `keep`
/// saves, and what a link leads to: see [`older_steps`]. Passes over steps that are `awaited`, which are to be copied yet.
///
/// # Errors
/// As for [`older_steps`]. What fails for one step is in [`Evicted`].
pub fn evict(
    look: &Look,
    places: &[PathBuf],
    keep: usize,
    awaited: &[PathBuf],
    config: &Config,
) -> Result<Evicted> {
    let mut done = Evicted::default();
    let mut looks = Looks::new(places);
    for step in older_steps(look, keep, config)? {
        if awaited.contains(&step.path) {
            continue;
        }
        if let Err(stay) = looks.everywhere(&step.path) {
            done.stay.push(stay);
            continue;
        }
        match remove_step(&step.path, "all tiers have it", Disposal::of(config), config) {
            Ok(removed) => {
                done.left.extend(removed.left);
                done.removed.push(step.path.clone());
            }
            Err(error) => done.left.push(Left::failed(&step.path, &error)),
        }
    }
    Ok(done)
}

/// A setting: its name, and how many of the newest steps it keeps.
pub type Setting<'a> = (&'a str, usize);

/// Checks that places keep each step that the other settings keep: such a step leaves the run's directory, and is then in
/// the places alone.
///
/// # Errors
/// [`Error::Invalid`] naming both settings.
pub fn check_covers(there: Setting<'_>, others: &[Setting<'_>]) -> Result<()> {
    let (name, count) = there;
    let larger: Vec<&Setting> = others.iter().filter(|(_, other)| count < *other).collect();
    let Some(most) = larger.iter().map(|(_, other)| other).max() else { return Ok(()) };
    let named: Vec<String> = larger.iter().map(|(name, other)| format!("{name}={other}")).collect();
    Err(Error::invalid(format!(
        "{name}={count} keeps fewer steps in the further places than {}: with keep_here, older steps are there alone, so \
         some of these {most} would be nowhere; set {name} to {most} or more, or leave it out to keep all there",
        named.join(" and ")
    )))
}

/// Whether each of these places has a step whole at this moment.
pub fn is_everywhere(step: &Path, places: &[PathBuf]) -> bool {
    Looks::new(places).everywhere(step).is_ok()
}

/// Looks into places, within a time limit.
struct Looks<'a> {
    places: &'a [PathBuf],
    until: Instant,
    /// Places that did not answer, and what they said instead: they are not checked again.
    failed: BTreeMap<&'a Path, String>,
}

/// The places that are being asked, since when: a disk that hangs must not collect threads.
static ASKED: PerProcess<BTreeMap<PathBuf, Instant>> =
    PerProcess::new([const { Mutex::new(BTreeMap::new()) }; GENERATIONS]);

impl<'a> Looks<'a> {
    fn new(places: &'a [PathBuf]) -> Self {
        Self { places, until: Instant::now() + LOOKS_MAX, failed: BTreeMap::new() }
    }

    /// Whether all places have a step; otherwise, why it stays.
    fn everywhere(&mut self, step: &Path) -> std::result::Result<(), Stay> {
        let stay = |reason, is_lacking| Stay { path: step.into(), reason, is_lacking };
        let here = match (manifest::read_files(step), step.file_name()) {
            (Ok(Some(here)), Some(name)) => (Arc::new(here), name),
            // Ranks saved it each by itself, so it is not copied.
            (Ok(_), _) => return Err(stay("it has no manifest of its own".into(), false)),
            (Err(error), _) => return Err(stay(error.to_string(), false)),
        };
        for place in self.places {
            let copy = place.join(here.1);
            if !self.failed.contains_key(&**place) {
                match self.ask(step, &here.0, &copy, place) {
                    Ok(None) => continue,
                    Ok(Some(why)) => return Err(stay(format!("{} {why}", copy.display()), true)),
                    Err(why) => drop(self.failed.insert(place, why)),
                }
            }
            let why = &self.failed[&**place];
            return Err(stay(format!("{} does not answer: {why}", place.display()), false));
        }
        Ok(())
    }

    /// What a place lacks of a step, asked in a thread: a hung disk would hold up the save for good.
    ///
    /// # Errors
    /// Why it did not say.
    fn ask(
        &self,
        step: &Path,
        here: &Arc<Listed>,
        copy: &Path,
        place: &Path,
    ) -> std::result::Result<Option<String>, String> {
        let silent = || format!("nothing within {} s", LOOKS_MAX.as_secs());
        let has_hung = |since: &Instant| since.elapsed() >= LOOKS_MAX;
        match ASKED.lock() {
            Some(asked) if asked.get(place).is_some_and(has_hung) => return Err(silent()),
            Some(mut asked) => drop(asked.insert(place.into(), Instant::now())),
            None => return Err("this process is forked too many times".into()),
        }
        let (tell, told) = bounded(1);
        let job: Arc<Job> = Arc::default();
        let (step, here) = (step.to_owned(), here.clone());
        let (copy, asked) = (copy.to_owned(), place.to_owned());
        let stopped = job.clone();
        let look = move || {
            let _ = tell.send(promote::lacks((&step, &here), &copy, &stopped));
            if let Some(mut all) = ASKED.lock() {
                all.remove(&asked);
            }
        };
        let thread = std::thread::Builder::new().name("ringstow-look".into());
        thread.spawn(look).map_err(|error| format!("no thread to ask it ({error})"))?;
        let answer = told.recv_deadline(self.until).map_err(|_| {
            job.cancel(); // ends requests to a store
            silent()
        })?;
        answer.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;

    #[test]
    fn step_stays_while_a_place_hangs_and_costs_no_thread_more() {
        let root = tempfile::tempdir().unwrap();
        let (run, place) = (root.path().join("run"), root.path().join("place"));
        for step in 1..=2 {
            let mut state = StateDict::new();
            state.value("step", step).step(step);
            crate::save(&state, run.join(format!("step-{step}"))).unwrap();
        }
        crate::Store::found()
            .unwrap()
            .promote(run.join("step-1"), place.join("step-1"), crate::Promotion::default())
            .unwrap();
        let hung = Instant::now().checked_sub(LOOKS_MAX).unwrap();
        ASKED.lock().unwrap().insert(place.clone(), hung);
        let places = [place.clone()];
        let config = Config::default();
        let look = || Look::of_run(&run, &config).unwrap();
        let evict = || evict(&look(), &places, 1, &[], &config).unwrap();
        let done = evict();
        assert!(done.removed.is_empty() && !done.stay[0].is_lacking, "{done:?}");
        assert!(done.stay[0].reason.contains("does not answer"), "{done:?}");
        ASKED.lock().unwrap().remove(&place);
        assert_eq!(evict().removed, [run.join("step-1")]);
    }
}
