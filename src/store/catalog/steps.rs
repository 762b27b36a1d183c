//! The steps of a run: the checkpoints in a directory that belong to its [row](crate::store::catalog::row).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{StepPattern, names};
use crate::object::is_url;
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::links::Link;
use crate::store::catalog::list::survey;
use crate::store::catalog::row::{Row, Rule};
use crate::sys::dir;
use std::borrow::Borrow;
use std::path::{Path, PathBuf};

/// See [`Store::steps`](crate::Store::steps).
pub fn steps(
    dir: impl AsRef<Path>,
    pattern: Option<&StepPattern>,
    config: &Config,
) -> Result<Vec<Found>> {
    let (mut steps, _) = steps_and_row(dir.as_ref(), pattern, config)?;
    match steps.iter_mut().find_map(|found| found.refusal.take()) {
        Some(refusal) => Err(refusal),
        None => Ok(steps),
    }
}

/// [`steps`], and their row. Includes [unreadable](Status::Unreadable) directories that may be steps.
pub(in crate::store) fn steps_and_row(
    dir: &Path,
    pattern: Option<&StepPattern>,
    config: &Config,
) -> Result<(Vec<Found>, Row)> {
    let (row, mut all) = match survey(dir, pattern, config) {
        // Nothing was saved yet. An object store lists nothing then, and has an error for a missing bucket.
        Err(error) if error.is_not_found() && !is_url(dir) && !dir::has(dir) => {
            return Ok((Vec::new(), Row::default()));
        }
        surveyed => surveyed?,
    };
    keep_steps(dir, &row, &mut all);
    Ok((all, row))
}

/// Keeps the steps of `all`, what a survey of `dir` has found, and what may be one.
pub(in crate::store) fn keep_steps<F: Borrow<Found>>(dir: &Path, row: &Row, all: &mut Vec<F>) {
    // A rank checkpoint in `dir` is not a step: all ranks cannot resume from one rank's share.
    let is_one = |found: &Found| {
        !names::is_never_a_step(&found.path) && Link::of(&found.path) != Link::Inside
    };
    all.retain(|found| found.borrow().path == dir || is_one(found.borrow()));
    let has_step = |found: &F| found.borrow().step.is_some();
    if matches!(row.rule, Rule::Pattern(_)) || all.iter().any(has_step) {
        // Only the unreadable manifest says whether it was saved as a step.
        let is_unknown = |found: &Found| {
            found.status == Status::Unreadable && matches!(row.rule, Rule::Saved(None))
        };
        all.retain(|found| has_step(found) || is_unknown(found.borrow()));
    }
}

/// Limits a search to older steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Before {
    /// Steps before this one.
    Step(u64),
    /// Steps older than the checkpoint at this path.
    Path(PathBuf),
}

impl Before {
    /// Keeps the older ones of `steps`: all steps of `dir`, oldest first.
    ///
    /// # Errors
    /// [`Error::Invalid`] if nothing in `dir` is a step, or the path is not one of the steps.
    pub(in crate::store) fn cut(&self, steps: &mut Vec<Found>, dir: &Path) -> Result<()> {
        match self {
            Self::Step(step) => {
                if steps.iter().any(|found| found.step.is_none()) {
                    return Err(Error::invalid(format!(
                        "nothing in {} counts as a step, so nothing is before step {step}: pass the \
                         checkpoint's path instead",
                        dir.display()
                    )));
                }
                steps.retain(|found| found.step < Some(*step));
            }
            Self::Path(path) => {
                let at = steps
                    .iter()
                    .position(|found| dir::is_same(&found.path, path))
                    .ok_or_else(|| {
                        Error::invalid(format!(
                            "{} is none of the {} steps in {}",
                            path.display(),
                            steps.len(),
                            dir.display()
                        ))
                    })?;
                steps.truncate(at);
            }
        }
        Ok(())
    }
}
