//! The copy of one step to one of the further places of its run.

use super::Retention;
use super::queue::Added;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::{
    Disposal, Promotion, PromotionReport, RetainOptions, claim_for, pinned, retain, was_removed,
};
use std::path::{Path, PathBuf};

/// How the steps of a run get to its further places.
#[derive(Debug, Clone)]
pub struct Copying {
    /// The run's directory.
    pub root: PathBuf,
    /// The places, the nearest first.
    pub places: Vec<PathBuf>,
    /// Bytes a second at most; 0 for no limit.
    pub rate: u64,
    /// What stays in each place; `None` for all.
    pub rule: Option<RetainOptions>,
}

impl Copying {
    /// Copies with these rules in each place.
    pub fn new(root: PathBuf, places: Vec<PathBuf>, rate: u64, keep: Retention) -> Self {
        Self { root, places, rate, rule: keep.options(Disposal::Remove) }
    }

    /// Copies a step to a place by `promote`. If the disk there is full, removes first what the rules no longer keep there, and
    /// after the copy of a new step in any case. `None` if a rule has removed the step meanwhile, which is fine.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the place has steps of another run, or files of other nodes have yet to be sent there; as for
    /// [`Store::promote`](crate::Store::promote).
    pub fn send(
        &self,
        step: &Added,
        place: &Path,
        config: &Config,
        mut promote: impl FnMut(&Path, Promotion) -> Result<PromotionReport>,
    ) -> Result<Option<PromotionReport>> {
        let to = place.join(step.path.file_name().unwrap_or_default());
        // A run that went back saves a step again.
        let (rate, defaults) = (self.rate, Promotion::default());
        let how = Promotion { rate, replace_older: true, refuse_link: true, ..defaults };
        let sent = claim_for(&self.root, &self.places, place).and_then(|_| promote(&to, how));
        let sent = sent.or_else(|error| match error.is_disk_full() && self.rule.is_some() {
            true => {
                self.clear(place, config);
                promote(&to, how)
            }
            false => Err(error),
        });
        let report = match sent {
            Err(_) if was_removed(&step.path, config) => return Ok(None),
            sent => sent?,
        };
        if report.missing > 0 {
            return Err(Error::invalid(format!(
                "{} is not committed: other nodes have still to send {} files; run `ringstow promote` on each node, or let \
                 a manager of all nodes copy",
                to.display(),
                report.missing
            )));
        }
        // After a step that was found, another one may be there because the newest is damaged.
        if step.is_new {
            self.clear(place, config);
        }
        Ok(Some(report))
    }

    /// Removes what the rules no longer keep in a place, if there are any. A failure is logged.
    pub fn clear(&self, place: &Path, config: &Config) {
        let Some(rule) = &self.rule else { return };
        let rule = RetainOptions { pinned: pinned(&self.root), ..rule.clone() };
        if let Err(error) = retain(place, &rule, config) {
            tracing::error!("old steps stay in {}: {error}", place.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;
    use crate::store;
    use crate::sys::seam::{Call, fail_call};
    use std::cell::Cell;

    /// A run with these steps, a place that has the first of them, and the copying of one step at most.
    fn run_with(steps: &[u64]) -> (tempfile::TempDir, Copying) {
        let dir = tempfile::tempdir().unwrap();
        let (root, place) = (dir.path().join("run"), dir.path().join("place"));
        for step in steps {
            let mut state = StateDict::new();
            state.value("x", *step).step(*step);
            crate::save(&state, root.join(format!("step-{step}"))).unwrap();
        }
        let keep = Retention { last: Some(1), ..Retention::default() };
        let copying = Copying::new(root, vec![place], 0, keep);
        send(&copying, steps[0], None).unwrap();
        (dir, copying)
    }

    fn send(copying: &Copying, step: u64, full: Option<&Cell<bool>>) -> Result<bool> {
        let config = Config::default();
        let path = copying.root.join(format!("step-{step}"));
        let promote = |to: &Path, how| match full.is_some_and(|full| full.take()) {
            true => Err(Error::io("writing", to, nix::errno::Errno::ENOSPC.into())),
            false => crate::Store::new(config.clone())?.promote(&path, to, how),
        };
        let added = Added { path: path.clone(), is_new: true };
        copying.send(&added, &copying.places[0], &config, promote).map(|sent| sent.is_some())
    }

    fn there(copying: &Copying) -> Vec<u64> {
        let steps = store::steps(&copying.places[0], None, &Config::default()).unwrap();
        steps.iter().filter_map(|found| found.step).collect()
    }

    #[test]
    fn full_place_loses_first_what_its_rules_no_longer_keep() {
        let (_dir, mut copying) = run_with(&[1, 2, 3]);
        let rule = copying.rule.take();
        send(&copying, 2, None).unwrap();
        let full = Cell::new(true);
        assert!(send(&copying, 3, Some(&full)).unwrap_err().is_disk_full(), "nothing may go");
        copying.rule = rule;
        full.set(true);
        assert!(send(&copying, 3, Some(&full)).unwrap());
        assert_eq!(there(&copying), [3]);
    }

    #[test]
    fn old_steps_that_cannot_be_removed_are_no_failed_copy() {
        let (_dir, copying) = run_with(&[1, 2]);
        let refused = fail_call(Call::List, &copying.places[0], nix::libc::EACCES);
        assert!(send(&copying, 2, None).unwrap());
        drop(refused);
        assert_eq!(there(&copying), [1, 2]);
    }

    #[test]
    fn step_that_a_rule_has_removed_is_passed_over_and_one_that_somebody_has_is_an_error() {
        let (_dir, copying) = run_with(&[1, 2, 3]);
        crate::remove(copying.root.join("step-2"), Disposal::Remove).unwrap();
        assert!(!send(&copying, 2, None).unwrap());
        std::fs::remove_dir_all(copying.root.join("step-3")).unwrap();
        assert!(send(&copying, 3, None).is_err());
    }
}
