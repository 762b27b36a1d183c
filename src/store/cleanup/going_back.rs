//! Going back to an earlier step of a run: which steps are newer, and their removal.

use crate::config::Config;
use crate::error::Result;
use crate::format::manifest::Order;
use crate::store::catalog::found::Found;
use crate::store::catalog::pins::pinned;
use crate::store::catalog::steps::steps;
use crate::store::cleanup::history::{note, note_failed};
use crate::store::cleanup::remove::{Disposal, remove_checkpoint};
use crate::store::write::place::follow;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// The steps in some places of a run that are newer than a restored one. Copies of one step count each.
#[derive(Debug)]
pub struct Newer<'a> {
    root: &'a Path,
    /// The number of the restored step.
    step: u64,
    /// Newest first.
    found: Vec<Found>,
}

impl<'a> Newer<'a> {
    /// Finds them. What is saved to `root` from now on is newer.
    ///
    /// # Errors
    /// As for [`steps`].
    pub fn find(
        root: &'a Path,
        places: &[PathBuf],
        restored: Order,
        config: &Config,
    ) -> Result<Self> {
        let mut found = Vec::new();
        for place in places {
            found.extend(steps(place, None, config)?);
        }
        let is_newer = |found: &Found| found.step != restored.step && found.order > restored;
        found.retain(|found| found.step.is_some() && found.was_committed() && is_newer(found));
        found.sort_by_key(|found| Reverse(found.order));
        found.iter().for_each(|found| follow(root, found.order));
        Ok(Self { root, step: restored.step.unwrap_or_default(), found })
    }

    /// Warns of them, if there are any.
    pub fn warn(&self) {
        let mut numbers: Vec<u64> = self.found.iter().filter_map(|found| found.step).collect();
        numbers.dedup();
        let Some(newest) = numbers.first() else { return };
        let all = numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        tracing::warn!(
            "step {} is restored, and {} has newer ones: {all}. Until the next save, a restart goes on from step {newest}; \
             drop_newer removes them",
            self.step,
            self.root.display()
        );
    }

    /// Removes them, except those that are [kept](pinned). Returns what was removed. The next save goes on from the restored
    /// step, and does not warn that it is lower than the newest.
    ///
    /// # Errors
    /// The first failure of a removal, after trying all of them.
    pub fn remove(self, config: &Config) -> Result<Vec<PathBuf>> {
        let kept = pinned(self.root);
        let reason = format!("the run goes back to step {}", self.step);
        let (mut removed, mut failure) = (Vec::new(), None);
        let gone_back = self.found.first().map(|newest| Order {
            branch: newest.order.branch + 1,
            step: Some(self.step),
            ..newest.order
        });
        for Found { path, .. } in self.found {
            if kept.iter().any(|name| path.ends_with(name)) {
                continue;
            }
            note(&path, &reason); // first: a copy in progress asks why the step is gone
            match remove_checkpoint(&path, Disposal::of(config), config) {
                Ok(_) => removed.push(path),
                Err(error) => {
                    note_failed(&path, &error);
                    failure = failure.or(Some(error));
                }
            }
        }
        if let (Some(order), None) = (gone_back, &failure) {
            follow(self.root, order);
        }
        failure.map_or(Ok(removed), Err)
    }
}
