//! One look at a run, on which retention, slimming and eviction work after a save. It is no older than the save: only the
//! manager that looks saves and removes there. Links are read again each time: anybody may make one.

use crate::config::Config;
use crate::error::Result;
use crate::format::StepPattern;
use crate::object::is_url;
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::list::survey;
use crate::store::catalog::row::Row;
use crate::store::catalog::steps::{keep_steps, steps};
use crate::sys::dir;
use std::path::{Path, PathBuf};

/// What a run's directory holds.
#[derive(Debug, Default)]
pub struct Look {
    pub(super) dir: PathBuf,
    pub(super) row: Row,
    /// What is no step comes first; then the steps, oldest first.
    pub(super) all: Vec<Found>,
}

impl Look {
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if the directory cannot be listed.
    pub(super) fn at(dir: &Path, pattern: Option<&StepPattern>, config: &Config) -> Result<Self> {
        let (row, all) = survey(dir, pattern, config)?;
        Ok(Self { dir: dir.into(), row, all })
    }

    /// Looks at a run. A directory that does not exist has no steps.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if the directory cannot be listed.
    pub fn of_run(dir: &Path, config: &Config) -> Result<Self> {
        match Self::at(dir, None, config) {
            Err(error) if error.is_not_found() && !is_url(dir) && !dir::has(dir) => {
                Ok(Self { dir: dir.into(), ..Self::default() })
            }
            looked => looked,
        }
    }

    /// The steps that can be loaded, oldest first.
    ///
    /// # Errors
    /// As for [`steps`]: what the system refused to read is read again for its error.
    pub fn committed(&self, config: &Config) -> Result<Vec<&Found>> {
        let mut found: Vec<&Found> = self.all.iter().collect();
        keep_steps(&self.dir, &self.row, &mut found);
        if found.iter().any(|step| step.status == Status::Unreadable) {
            steps(&self.dir, None, config)?;
        }
        found.retain(|step| step.status == Status::Committed && step.step.is_some());
        Ok(found)
    }

    /// Bytes of the newest step that can be loaded.
    pub fn newest_bytes(&self) -> Option<u64> {
        let is_whole = |step: &&Found| step.status == Status::Committed && step.step.is_some();
        self.all.iter().rev().find(is_whole)?.file_bytes
    }

    /// Forgets what was removed since.
    pub(super) fn forget(&mut self, gone: &[PathBuf]) {
        self.all.retain(|found| !gone.contains(&found.path));
    }
}
