//! Removes old checkpoints: which of a row of them stay, which go, and what is left alone. How one is
//! removed, [`retire`](super::retire()) knows.

use super::list::{Found, Status, list_with};
use super::ranks;
use super::retire::{Disposal, check, is_retired, retire_with};
use super::spares::Spares;
use super::sweep::Left;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// What [`retain`] did, or would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Retained {
    /// Checkpoints that stay, by rising step.
    pub kept: Vec<PathBuf>,
    /// Checkpoints that were removed, by rising step.
    pub retired: Vec<PathBuf>,
    /// What was left alone, and why.
    pub left: Vec<Left>,
    /// Spare files of earlier calls that were removed, and their directory if nothing else was in it.
    pub spares: Vec<PathBuf>,
}

/// Removes all checkpoints directly under `root` but the newest `keep` that can be loaded, in the order
/// of [`list`](super::list). Those whose names do not end in a number are no steps: they are neither
/// counted nor removed. Nor is what cannot be loaded, and links. With [`Disposal::Remove`], spare files of
/// earlier calls go too.
///
/// # Errors
/// [`Error::Invalid`] for a `keep` of 0; [`Error::Io`] if a directory cannot be listed or a file not be
/// removed; what [`Config::found`] gives.
pub fn retain(root: &Path, keep: usize, disposal: Disposal) -> Result<Retained> {
    retain_with(root, keep, disposal, &Config::found()?)
}

/// [`retain`] with a configuration of the caller's, of which `stripe` counts.
///
/// # Errors
/// As for [`retain`].
pub fn retain_with(
    root: &Path,
    keep: usize,
    disposal: Disposal,
    config: &Config,
) -> Result<Retained> {
    let mut plan = retain_plan(root, keep, disposal, config)?;
    let mut retired = Vec::new();
    for path in std::mem::take(&mut plan.retired) {
        match retire_with(&path, disposal, config) {
            Err(error @ (Error::Busy { .. } | Error::Incomplete { .. })) => {
                plan.leave(path, &error)
            }
            done => retired.push(done?.path),
        }
    }
    if disposal == Disposal::Remove {
        plan.spares = remove_spares(root, config)?;
    }
    Ok(Retained { retired, ..plan })
}

/// What [`retain_with`] would do now. Changes nothing.
///
/// # Errors
/// As for [`retain`].
pub fn retain_plan(
    root: &Path,
    keep: usize,
    disposal: Disposal,
    config: &Config,
) -> Result<Retained> {
    if keep == 0 {
        return Err(Error::invalid("keep = 0 would remove every checkpoint; keep at least 1"));
    }
    let mut plan = Retained::default();
    let (mut steps, mut going) = (Vec::new(), Vec::new());
    for found in list_with(root, config)? {
        match fate(&found) {
            Fate::Step => steps.push(found),
            Fate::Interrupted => going.push(found),
            Fate::Left(reason) => plan.left.push(Left { path: found.path, reason }),
        }
    }
    let old = steps.len().saturating_sub(keep);
    going.extend(steps.drain(..old));
    plan.kept = steps.into_iter().map(|found| found.path).collect();
    for Found { path, parts, .. } in going {
        match check(&path, &parts, &config.stripe) {
            Err(error @ Error::Incomplete { .. }) => plan.leave(path, &error),
            goes => {
                goes?;
                plan.retired.push(path);
            }
        }
    }
    if disposal == Disposal::Remove {
        for root in roots(root, config) {
            plan.spares.extend(Spares::under(root).all_but(std::iter::empty())?);
        }
    }
    Ok(plan)
}

impl Retained {
    fn leave(&mut self, path: PathBuf, why: &Error) {
        self.left.push(Left { path, reason: why.to_string() });
    }
}

/// What is to become of a directory.
enum Fate {
    /// It is one of the row: it stays while it is among the newest.
    Step,
    /// It was being removed, and what did that was killed.
    Interrupted,
    /// It is left alone, for this reason.
    Left(String),
}

fn fate(found: &Found) -> Fate {
    if let Some(reason) = none_of_the_row(&found.path) {
        return Fate::Left(reason.into());
    }
    match (found.status, found.step) {
        (Status::Committed, Some(_)) => Fate::Step,
        (Status::Committed, None) => Fate::Left(UNNUMBERED.into()),
        _ if is_retired(&found.path) || ranks::removal_was_interrupted(&found.parts) => {
            Fate::Interrupted
        }
        _ => Fate::Left(found.problem.clone().unwrap_or_else(|| "it cannot be loaded".into())),
    }
}

const UNNUMBERED: &str = "its name does not end in a number, so that it is no step; \
                          `retire` it, or remove the directory, when it is no longer wanted";

/// Why a directory is left alone, whatever lies in it; `None` if it may be one of a row of checkpoints.
fn none_of_the_row(path: &Path) -> Option<&'static str> {
    if fs::symlink_metadata(path).is_ok_and(|kind| kind.is_symlink()) {
        return Some("it is a link; what it leads to is looked at where that lies");
    }
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(names::is_rank_dir).then_some(
        "it is one rank's part of a checkpoint that ranks saved each by itself; remove that whole, \
         when a newer one is there",
    )
}

/// Removes the spare files beside the checkpoints in `root`, and in the configuration's `stripe`; says which.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_spares(root: &Path, config: &Config) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for root in roots(root, config) {
        removed.extend(Spares::under(root).clear_but(std::iter::empty())?);
    }
    Ok(removed)
}

/// The directories beside whose checkpoints, or parts of them, spare files may lie.
fn roots<'a>(root: &'a Path, config: &'a Config) -> impl Iterator<Item = &'a Path> {
    config.stripe.iter().map(PathBuf::as_path).chain([root])
}
