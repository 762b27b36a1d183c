//! What a clean-up reports.

use crate::error::{Error, Result};
use crate::sys::dir;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What a clean-up did to a directory, or would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Swept {
    /// Files that were removed, and directories that held nothing else. For a checkpoint of rank checkpoints whose
    /// removal was finished, its own path alone, if nothing else was in it.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// Shards of a committed checkpoint that got their final name.
    #[serde(with = "crate::path_text::list")]
    pub renamed: Vec<PathBuf>,
    /// Shards that became recycled files; see [`Disposal::Recycle`](crate::Disposal::Recycle).
    #[serde(with = "crate::path_text::list")]
    pub kept: Vec<PathBuf>,
    /// What was left alone, and why.
    pub left: Vec<Left>,
}

impl Swept {
    /// Adds the report of another directory.
    pub(in crate::store) fn add(&mut self, other: Self) {
        self.removed.extend(other.removed);
        self.renamed.extend(other.renamed);
        self.kept.extend(other.kept);
        other.left.into_iter().for_each(|left| self.leave(left));
    }

    /// Adds what was left. A failure that several looks at one directory meet is reported once.
    fn leave(&mut self, left: Left) {
        let is_known = |other: &Left| other.failed && other.reason == left.reason;
        if !left.failed || !self.left.iter().any(is_known) {
            self.left.push(left);
        }
    }

    /// The outcome of a step of a clean-up that goes on without it: `None` if it failed, and then `path` is in the report.
    pub(in crate::store) fn or_left<T>(&mut self, path: &Path, outcome: Result<T>) -> Option<T> {
        match outcome {
            Ok(done) => Some(done),
            // Another process removed it.
            Err(error) if error.is_not_found() && dir::is_gone(path) => None,
            Err(error) => {
                self.leave(Left::failed(path, &error));
                None
            }
        }
    }
}

impl From<Left> for Swept {
    fn from(left: Left) -> Self {
        Self { left: vec![left], ..Self::default() }
    }
}

/// A directory or file that a clean-up did not touch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The directory, or the file.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Why.
    pub reason: String,
    /// Whether the system failed or refused, so that the clean-up did not do all of its work.
    pub failed: bool,
}

impl Left {
    /// What a clean-up must not touch.
    pub(in crate::store) fn alone(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), reason: reason.into(), failed: false }
    }

    /// What stays because the system failed, while the clean-up does the rest.
    pub(in crate::store) fn failed(path: impl Into<PathBuf>, error: &Error) -> Self {
        let path = path.into();
        tracing::warn!(path = %path.display(), %error, "left alone");
        Self { path, reason: error.to_string(), failed: true }
    }

    /// A directory without a file of a checkpoint, which the system refuses to remove.
    pub(in crate::store) fn emptied(dir: &Path, error: &Error) -> Self {
        tracing::warn!(dir = %dir.display(), %error, "an empty directory is left");
        let reason = format!(
            "its files are removed, and the directory cannot be ({error}): remove it yourself"
        );
        Self { path: dir.into(), reason, failed: true }
    }
}
