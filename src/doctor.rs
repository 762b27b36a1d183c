//! Finds out what this machine and a directory can do, for `ringstow doctor`. Tries things, and leaves nothing
//! behind.

mod directory;
mod gpu;
mod machine;
mod memory;
mod tiers;

use crate::config::Config;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The outcome of a check, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but slower than it could, or with less than the configuration wants.
    Warn,
    /// A save into this directory, or a copy to one of its tiers, would fail.
    Fail,
}

/// One fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was looked at: `"io_uring"`, `"O_DIRECT"`.
    pub name: String,
    /// The outcome.
    pub status: Status,
    /// What was found, numbers with their units.
    pub found: String,
    /// How to improve it, where that is possible.
    pub remedy: Option<String>,
}

impl Check {
    pub(crate) fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.into(), status: Status::Ok, found: found.into(), remedy: None }
    }

    pub(crate) fn warn(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { name: name.into(), status: Status::Warn, found: found.into(), remedy }
    }

    /// A shortfall that fails saves only if the configuration insists on the missing thing.
    fn short(insisted: bool, name: &str, found: String, remedy: impl Into<String>) -> Self {
        match insisted {
            true => Self::fail(name, found, remedy),
            false => Self::warn(name, found, remedy),
        }
    }

    pub(crate) fn fail(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Fail, ..Self::warn(name, found, remedy) }
    }
}

/// All facts about a machine and a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The facts, in the order in which they are worth reading.
    pub checks: Vec<Check>,
}

impl Diagnosis {
    /// The worst of all.
    pub fn status(&self) -> Status {
        self.checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok)
    }
}

/// Checks this machine, the directory for checkpoints, and the tiers. Writes a trial file of 4096 bytes to the directory, an
/// empty one to each directory among the tiers, a small object to each store, and removes them. Starts CUDA if there are
/// GPUs, and copies 256 MiB on each.
pub fn diagnose(dir: &Path, config: &Config) -> Diagnosis {
    let mut checks = machine::checks(config);
    checks.extend(directory::checks(dir, config));
    checks.extend(tiers::checks(dir, config));
    Diagnosis { checks }
}

#[cfg(test)]
mod tests {
    use crate::config::Switch;
    use crate::doctor::*;

    #[test]
    fn every_shortfall_has_a_remedy() {
        let nowhere = Path::new("/proc/nowhere"); // nobody creates anything there
        for config in [Config::default(), Config { direct: Switch::On, ..Config::default() }] {
            let diagnosis = diagnose(nowhere, &config);
            assert_eq!(diagnosis.status(), Status::Fail);
            for check in diagnosis.checks.iter().filter(|check| check.status != Status::Ok) {
                assert!(check.remedy.is_some(), "{check:?}");
            }
        }
    }
}
