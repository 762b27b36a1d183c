//! The newest checkpoint of a run that can be loaded.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{StepPattern, names};
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::gone::has_gone;
use crate::store::catalog::steps::{Before, steps_and_row};
use crate::store::layout::manifest;
use crate::store::read::again::again;
use crate::store::read::checkpoint::OpenOptions;
use crate::store::read::verify::verify;
use crate::sys::dir;
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Which checkpoint [`Store::latest`](crate::Store::latest) returns.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Which names are steps; see [`Store::steps`](crate::Store::steps).
    pub pattern: Option<StepPattern>,
    /// Only steps older than this.
    pub before: Option<Before>,
    /// Whether to read and check every byte.
    pub verify: bool,
}

/// See [`Store::latest`](crate::Store::latest). Looks again if another process removes the step whose bytes it compares.
pub fn latest(
    dir: impl AsRef<Path>,
    wanted: &Wanted,
    config: &Config,
    job: &Arc<Job>,
) -> Result<Option<Found>> {
    let is_final = |looked: &Result<Newest>| !matches!(looked, Ok(Newest::Gone(_)));
    let looked = again(|| look(dir.as_ref(), wanted, config, job), is_final);
    match looked? {
        Newest::Is(found) => Ok(Some(*found)),
        Newest::None => Ok(None),
        Newest::Gone(error) => Err(error),
    }
}

/// What one look has found.
enum Newest {
    Is(Box<Found>),
    /// Nothing was committed.
    None,
    /// The newest step was removed while it was read.
    Gone(Error),
}

fn look(dir: &Path, wanted: &Wanted, config: &Config, job: &Arc<Job>) -> Result<Newest> {
    let (mut steps, row) = steps_and_row(dir, wanted.pattern.as_ref(), config)?;
    if let Some(newer) = row.newer() {
        tracing::warn!(
            "{} is newer than the steps in {}, but is not counted as a step: no other name there has its stem. If \
             it is a step, save with step=1000, or pass pattern=",
            newer.display(),
            dir.display()
        );
    }
    // An unreadable one without a number may be the newest.
    for found in steps.extract_if(.., |found| found.step.is_none() && found.refusal.is_some()) {
        pass_over_unreadable(found, wanted.verify)?;
    }
    if steps.is_empty() {
        warn_of_nested(dir);
    }
    if let Some(before) = &wanted.before {
        before.cut(&mut steps, dir)?;
    }
    // Why the newest of those that were committed cannot be loaded.
    let mut lost = None;
    for found in steps.into_iter().rev() {
        match found.status {
            Status::Committed => {}
            Status::Unreadable => {
                pass_over_unreadable(found, wanted.verify)?;
                continue;
            }
            Status::Incomplete | Status::Damaged => {
                if pass_over(&found) {
                    lost = lost.or_else(|| why_lost(&found, config));
                }
                continue;
            }
        }
        match wanted.verify.then(|| damage(&found, config, job)).transpose() {
            Ok(Some(Some(error))) | Err(error) if has_gone(&found.path) => {
                return Ok(Newest::Gone(error));
            }
            damage => match damage?.flatten() {
                None => return Ok(Newest::Is(Box::new(found))),
                Some(damage) => {
                    tracing::warn!("skipping {}, it is damaged: {damage}", found.path.display());
                    lost = lost.or(Some(damage));
                }
            },
        }
    }
    // `None` would let a trainer begin anew beside a run that a mount or a copy may bring back.
    match lost {
        Some(error) => {
            tracing::error!("no checkpoint of {} can be loaded", dir.display());
            Err(error.without_earlier())
        }
        None => Ok(Newest::None),
    }
}

/// Warns once of checkpoints that are too deep to be found.
fn warn_of_nested(dir: &Path) {
    if let Some(nested) = nested_in(dir)
        && is_first_time(dir)
    {
        tracing::warn!(
            "{} holds no step, since {} is in a directory of its own below: pass {} to look there. Steps whose parts are \
             saved apart are found if each part has its own directory of steps (run/actor/step-1, run/critic/step-1)",
            dir.display(),
            nested.display(),
            nested.parent().unwrap_or(dir).display()
        );
    }
}

/// A checkpoint two levels below a directory, such as `step-1/actor`.
fn nested_in(dir: &Path) -> Option<PathBuf> {
    let below = |dir: &PathBuf| dir::directories(dir).unwrap_or_default();
    let mut nested = below(&dir.to_path_buf()).into_iter().flat_map(|dir| below(&dir));
    nested.find(|path| manifest::is_committed(path))
}

/// Logs why a checkpoint that cannot be loaded is skipped. Returns whether it was committed.
fn pass_over(found: &Found) -> bool {
    let (path, problem) = (found.path.display(), found.problem.as_deref().unwrap_or_default());
    match found.created_unix_ms {
        // A killed save, or one in progress.
        None if found.status == Status::Incomplete => {
            if !warn_if_lost(found) {
                tracing::info!("skipping {path}, it was never committed: {problem}");
            }
            false
        }
        _ => {
            tracing::warn!("skipping {path}, it cannot be loaded: {problem}");
            true
        }
    }
}

/// Warns once of a checkpoint that was committed, and whose manifest is gone; returns whether it is one.
pub fn warn_if_lost(found: &Found) -> bool {
    let is_lost = has_lost_manifest(found);
    if is_lost && is_first_time(&found.path) {
        tracing::warn!(
            "skipping {}, whose manifest is gone: only a committed checkpoint has files of these names, so somebody has \
             removed it, or is still copying: {}",
            found.path.display(),
            found.problem.as_deref().unwrap_or_default()
        );
    }
    is_lost
}

/// Whether a directory without a manifest, or one of its rank checkpoints, has shards under their final names. A save
/// gives them these after its manifest, and a removal leaves a mark.
fn has_lost_manifest(found: &Found) -> bool {
    let itself = std::iter::once(&found.path).filter(|_| found.parts.is_empty());
    itself.chain(&found.parts).any(|dir| {
        let present = dir::file_names(dir).unwrap_or_default();
        let has = |name: &str| present.iter().any(|present| present == name);
        let is_marked =
            [names::MANIFEST, names::REMOVAL_MARK, names::STRIPE_MARKER].map(has).contains(&true);
        !is_marked && present.iter().any(|name| names::is_shard(name))
    })
}

/// Whether this process asks for the first time about a path.
fn is_first_time(path: &Path) -> bool {
    static KNOWN: PerProcess<BTreeSet<PathBuf>> =
        PerProcess::new([const { Mutex::new(BTreeSet::new()) }; GENERATIONS]);
    KNOWN.lock().is_some_and(|mut known| known.insert(path.into()))
}

/// Why a committed checkpoint cannot be loaded, of shares by ranks the first that cannot; `None` if it was never committed as a whole, is gone, or loads by now.
pub(crate) fn why_lost(found: &Found, config: &Config) -> Option<Error> {
    let itself = std::iter::once(&found.path).filter(|_| found.parts.is_empty());
    let mut errors =
        itself.chain(&found.parts).filter_map(|path| OpenOptions::of(config).open(path).err());
    // A save that never got to its commit, on one rank of several, or a removal: nothing to go back to.
    let never = |error: &Error| {
        use Error::{MissingShare, NoCheckpoint, NotCommitted};
        matches!(error, NoCheckpoint { .. } | NotCommitted { .. } | MissingShare { .. })
    };
    errors.find(|error| !error.is_not_found() && !never(error))
}

/// Skips an unreadable checkpoint only with `verify`, and if a sector is bad. Any other failure may be temporary, or this
/// machine's: then returning an older checkpoint would silently lose progress.
///
/// # Errors
/// Any other reason why the system refused.
fn pass_over_unreadable(found: Found, verify: bool) -> Result<()> {
    match found.refusal {
        Some(refusal) if verify && refusal.is_of_checkpoint() => {
            tracing::warn!("skipping {}, it cannot be read: {refusal}", found.path.display());
            Ok(())
        }
        Some(refusal) => Err(refusal),
        None => Ok(()),
    }
}

/// The first damage to a checkpoint's bytes; `None` if they are intact.
///
/// # Errors
/// Failures that are not the checkpoint's.
fn damage(found: &Found, config: &Config, job: &Arc<Job>) -> Result<Option<Error>> {
    let runtime = Runtime::shared(config)?;
    let itself = std::slice::from_ref(&found.path);
    let parts = if found.parts.is_empty() { itself } else { &found.parts };
    for part in parts {
        let report = match verify(&runtime, part, job) {
            Err(error) if error.is_of_checkpoint() => return Ok(Some(error)),
            report => report?,
        };
        // Another process may read the file: an older step would silently lose progress.
        if let Some(refused) = report.damage.iter().find(|damage| damage.is_refusal) {
            return Err(Error::io("opening", &refused.file, ErrorKind::PermissionDenied.into()));
        }
        if let Some(first) = report.damage.into_iter().next() {
            // Says which files are missing, as loading would.
            return match OpenOptions::of(config).open(part) {
                Err(error) if !error.is_of_checkpoint() => Err(error),
                opened => Ok(Some(opened.err().unwrap_or_else(|| first.into()))),
            };
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;
    use std::fs;

    #[test]
    fn nested_directories_with_another_programs_manifest_are_not_called_checkpoints() {
        let root = tempfile::tempdir().unwrap();
        let app = root.path().join("a/app");
        fs::create_dir_all(&app).unwrap();
        fs::write(app.join(names::MANIFEST), r#"{"name": "my web app"}"#).unwrap();
        assert_eq!(nested_in(root.path()), None);
        let actor = root.path().join("step-1/actor");
        crate::save(&StateDict::new(), &actor).unwrap();
        assert_eq!(nested_in(root.path()), Some(actor));
    }
}
