//! The steps of a run: those of a directory's checkpoints that make up its [row](crate::store::catalog::row).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{StepPattern, names};
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::links::Link;
use crate::store::catalog::list::survey;
use crate::store::catalog::row::{Row, Rule};
use crate::sys::dir;
use std::path::{Path, PathBuf};

/// The steps in `dir`, oldest first, including those that cannot be loaded. If nothing counts as a step, all
/// checkpoints by the time of their commit. Empty if `dir` does not exist.
///
/// - With a pattern, the steps are the names that fit it, and nothing else.
/// - A checkpoint is a step if it was [saved as one](crate::StateDict::step), with the number it was given.
/// - So is a checkpoint whose name has the same stem as the newest of these, such as `step-` in `step-900`.
/// - If nothing was saved as a step, the names with the newest save's stem are the steps. A stem that counts steps
///   (`step-`, `epoch_`, `checkpoint-`) goes before any other (`best-7`), and a stem that several names have before
///   one that a single name has (`gpt2`).
/// - A number that is a fraction (`loss=0.2`), a value (`acc=95`) or part of a date is not a step. Nor is a link to
///   something in `dir` itself.
///
/// # Errors
/// [`Error::Io`] if `dir` cannot be listed, or the system refuses to read a directory that may be a step.
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

/// [`steps`], and the row that they make up. [Unreadable](Status::Unreadable) directories that may be steps are
/// among them.
pub(in crate::store) fn steps_and_row(
    dir: &Path,
    pattern: Option<&StepPattern>,
    config: &Config,
) -> Result<(Vec<Found>, Row)> {
    let (row, mut all) = match survey(dir, pattern, config) {
        // Nothing was saved yet.
        Err(error) if error.is_not_found() && !dir::has(dir) => {
            return Ok((Vec::new(), Row::default()));
        }
        surveyed => surveyed?,
    };
    // All ranks cannot resume from one rank's share.
    let is_one = |found: &Found| {
        names::rank_of_dir(&found.path).is_none() && Link::of(&found.path) != Link::Inside
    };
    all.retain(|found| found.path == dir || is_one(found));
    if matches!(row.rule, Rule::Pattern(_)) || all.iter().any(|found| found.step.is_some()) {
        // Only the manifest says whether it was saved as a step.
        let is_unknown = |found: &Found| {
            found.status == Status::Unreadable && matches!(row.rule, Rule::Saved(None))
        };
        all.retain(|found| found.step.is_some() || is_unknown(found));
    }
    Ok((all, row))
}

/// Limits a search to older steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Before {
    /// Those before this step.
    Step(u64),
    /// Those older than the checkpoint at this path.
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
                        "nothing in {} counts as a step, so that none is before step {step}: name the \
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
                            "{} is none of the {} steps in {}, so that none is before it",
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
