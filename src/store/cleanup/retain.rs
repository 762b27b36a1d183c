//! Removes old checkpoints: decides which steps to keep, which to remove, and what to leave alone. See
//! [`remove_checkpoint`] for how one checkpoint is removed.

use crate::config::Config;
use crate::error::{Error, Result, some_of};
use crate::format::{StepPattern, names};
use crate::object::is_url;
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::links::Links;
use crate::store::catalog::row::Row;
use crate::store::cleanup::history::{self, remove_step};
use crate::store::cleanup::keep::{Best, Candidate, Rules, Verdict};
use crate::store::cleanup::look::Look;
use crate::store::cleanup::prune::{self, Act};
use crate::store::cleanup::remove::{Disposal, check, check_free, is_being_removed, is_gone};
use crate::store::layout::rank_dirs;
use crate::store::layout::recycled::beside_all;
use crate::store::write::swept::Left;
use crate::sys::{dir, lock, removal_note};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which checkpoints [`retain`](crate::retain()) keeps, and what happens to the others' files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetainOptions {
    /// How many of the newest steps to keep, at least 1.
    pub last: usize,
    /// Also keep the steps that this number divides.
    pub every: Option<u64>,
    /// Also keep the first save in each interval of this length, by the time that its manifest has. Intervals begin at
    /// 1970-01-01 UTC: those of an hour on the hour.
    pub every_time: Option<Duration>,
    /// Also keep the saves that are no older than the last save by more than this.
    pub within: Option<Duration>,
    /// Also keep the best steps by a metric. If no step has the metric, none is removed.
    pub best: Option<Best>,
    /// What happens to the files of removed steps.
    pub disposal: Disposal,
    /// Which names are steps; see [`Store::steps`](crate::Store::steps).
    pub pattern: Option<StepPattern>,
    /// Names of steps that stay whatever the rules say. What a link in the directory leads to stays in any case.
    pub pinned: Vec<String>,
}

impl RetainOptions {
    /// Keeps the newest `last` of [`steps`](crate::steps), and removes the others' files.
    pub fn new(last: usize) -> Self {
        Self {
            last,
            every: None,
            every_time: None,
            within: None,
            best: None,
            disposal: Disposal::Remove,
            pattern: None,
            pinned: Vec::new(),
        }
    }

    /// Checks that each rule keeps something.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the rule that does not.
    pub fn check(&self) -> Result<()> {
        self.rules().check()
    }

    fn rules(&self) -> Rules<'_> {
        let Self { last, every, every_time, within, .. } = *self;
        let best = self.best.as_ref();
        Rules { every, every_time, within, best, ..Rules::newest(last) }
    }
}

/// What [`retain`](crate::retain()) did, or would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Retained {
    /// What counted as a step, in words: `step-*`. `None` if nothing did.
    pub counted: Option<String>,
    /// Steps that stay, oldest first.
    #[serde(with = "crate::path_text::list")]
    pub kept: Vec<PathBuf>,
    /// Why each of `kept` stays, in the same order.
    pub reasons: Vec<String>,
    /// Steps that were removed, oldest first. An empty directory that the system refuses to remove is in `left` too.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// Directories of killed saves of steps before the newest. Their files were removed, and the directory if it was
    /// then empty.
    #[serde(with = "crate::path_text::list")]
    pub cleared: Vec<PathBuf>,
    /// What was left alone, and why.
    pub left: Vec<Left>,
    /// Recycled files of earlier calls that were removed, and their directory if nothing else was in it.
    #[serde(with = "crate::path_text::list")]
    pub removed_recycled: Vec<PathBuf>,
    /// Warnings if nothing counted as a step, or if several kinds of names looked like steps. Also logged.
    pub warnings: Vec<String>,
}

/// See [`retain`](crate::retain()).
pub fn retain(
    root: impl AsRef<Path>,
    retention: &RetainOptions,
    config: &Config,
) -> Result<Retained> {
    retention.check()?;
    let mut look = Look::at(root.as_ref(), retention.pattern.as_ref(), config)?;
    retain_seen(&mut look, retention, config)
}

/// [`retain`](crate::retain()) of what a look has found, which then knows what is gone.
///
/// # Errors
/// As for [`retain`](crate::retain()).
pub fn retain_seen(
    look: &mut Look,
    retention: &RetainOptions,
    config: &Config,
) -> Result<Retained> {
    let plan = plan(look, retention, config, Act::CarryOut)?;
    let done = carry_out(plan, &look.dir, retention.disposal, config);
    look.forget(&done.removed);
    look.forget(&done.cleared);
    Ok(done)
}

fn carry_out(mut plan: Retained, root: &Path, disposal: Disposal, config: &Config) -> Retained {
    for path in std::mem::take(&mut plan.removed) {
        let done = remove_step(&path, NO_RULE, disposal, config);
        plan.note(path, done.map(|removed| removed.left));
    }
    for path in std::mem::take(&mut plan.cleared) {
        plan.clear(path, config, Act::CarryOut, None);
    }
    for path in &plan.cleared {
        history::note(path, "it is what a killed save left");
    }
    if disposal == Disposal::Remove && !is_url(root) {
        for files in beside_all(root, config) {
            let done = files.clear_but(std::iter::empty(), &mut plan.removed_recycled);
            plan.note_recycled(files.dir(), done);
        }
    }
    plan
}

/// See [`Store::retain_plan`](crate::Store::retain_plan).
pub fn retain_plan(
    root: impl AsRef<Path>,
    retention: &RetainOptions,
    config: &Config,
) -> Result<Retained> {
    retention.check()?;
    let look = Look::at(root.as_ref(), retention.pattern.as_ref(), config)?;
    plan(&look, retention, config, Act::Plan)
}

fn plan(look: &Look, retention: &RetainOptions, config: &Config, act: Act) -> Result<Retained> {
    retention.check()?;
    let Look { dir: root, row, all } = look;
    let (counted, warnings) = (row.counted(), row.warnings(root, all));
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let mut plan = Retained { counted, warnings, ..Retained::default() };
    let links = if is_url(root) { Links::default() } else { Links::of(root)? };
    let (mut steps, mut going) = (Vec::new(), Vec::new());
    let is_step = |found: &&Found| matches!(fate(found, row, None), Fate::Step);
    let newest = all.iter().filter(is_step).filter_map(|found| found.step).max();
    for found in all {
        let path = found.path.clone();
        match fate(found, row, newest) {
            Fate::Step => steps.push(found),
            Fate::Interrupted => going.push(found),
            Fate::Killed(problem) => match links.to(&path) {
                Some(link) => plan.left.push(protected(path, link)),
                None => plan.clear(path, config, Act::Plan, Some(problem)),
            },
            Fate::Left(reason) => {
                let failed = found.status == Status::Unreadable;
                plan.left.push(Left { path, reason, failed });
            }
        }
    }
    // What a removal was killed before it removed is empty, and no step.
    if !is_url(root) {
        let dirs = dir::directories(root)?.into_iter();
        let emptied = dirs.filter(|dir| removal_note::is_left_empty(dir));
        emptied.for_each(|dir| plan.clear(dir, config, Act::Plan, None));
    }
    let is_pinned =
        |path: &Path| retention.pinned.iter().any(|name| path.ends_with(Path::new(name)));
    for (found, verdict) in plan.judge(steps, &retention.rules(), root) {
        let path = found.path.clone();
        match (verdict, links.to(&path)) {
            (Verdict::Stays(reason), _) => plan.keep(path, reason),
            (_, _) if is_pinned(&path) => {
                plan.keep(path, "it is kept until `release`".into());
            }
            (_, Some(link)) => plan.left.push(protected(path, link)),
            (Verdict::SavedLast, None) => plan.leave_last(path),
            (Verdict::Goes, None) => going.push(found),
        }
    }
    if is_url(root) {
        plan.removed.extend(going.into_iter().map(|found| found.path.clone()));
        return Ok(plan);
    }
    for Found { path, parts, .. } in going {
        let goes = check(path, parts, &config.stripe).and_then(|()| match act {
            // The removal takes the locks itself.
            Act::CarryOut => Ok(()),
            Act::Plan => check_free(path, parts),
        });
        plan.note(path.clone(), goes.map(|()| Vec::new()));
    }
    if retention.disposal == Disposal::Remove && act == Act::Plan {
        for files in beside_all(root, config) {
            let found = files.all_but(std::iter::empty());
            let found = found.map(|found| plan.removed_recycled.extend(found));
            plan.note_recycled(files.dir(), found);
        }
    }
    Ok(plan)
}

fn protected(path: PathBuf, link: &Path) -> Left {
    let reason = format!(
        "the link {} leads to it; without that link, it counts like any other",
        link.display()
    );
    Left::alone(path, reason)
}

impl Retained {
    /// Decides on all steps, oldest first. Warns if there is nothing to compare.
    fn judge<'a>(
        &mut self,
        steps: Vec<&'a Found>,
        rules: &Rules<'_>,
        root: &Path,
    ) -> Vec<(&'a Found, Verdict)> {
        let candidates = steps.iter().map(|found| Candidate {
            step: found.step.unwrap_or_default(),
            metrics: &found.metrics,
            age: found.order.age,
        });
        let candidates: Vec<Candidate<'_>> = candidates.collect();
        if let Some(metric) = rules.missing_metric(&candidates) {
            let known: BTreeSet<String> =
                steps.iter().flat_map(|found| found.metrics.keys().cloned()).collect();
            let known: Vec<String> = known.into_iter().collect();
            let others = if known.is_empty() { "no metric".into() } else { some_of(&known) };
            self.warn(format!(
                "no step in {} has the metric {metric:?}, by which to keep the best: none is removed. The steps \
                 have {others}",
                root.display()
            ));
        }
        let verdicts = rules.judge(&candidates);
        steps.into_iter().zip(verdicts).collect()
    }

    fn keep(&mut self, path: PathBuf, reason: String) {
        self.kept.push(path);
        self.reasons.push(reason);
    }

    fn warn(&mut self, warning: String) {
        tracing::warn!("{warning}");
        self.warnings.push(warning);
    }

    /// Leaves alone the checkpoint that was saved last, although there are higher steps.
    fn leave_last(&mut self, path: PathBuf) {
        let reason = "it was saved last, after the steps with higher numbers; if the run went back and no longer \
                      needs those, `remove` them";
        self.warn(format!("{} stays: {reason}", path.display()));
        self.left.push(Left::alone(path, reason));
    }

    /// Notes the outcome of removing a checkpoint: what is left of it, or the error. The others can still go.
    fn note(&mut self, path: PathBuf, outcome: Result<Vec<Left>>) {
        match outcome {
            Ok(left) => {
                self.left.extend(left);
                self.removed.push(path);
            }
            Err(error) if !may_be_another_call(&error) => {
                self.left.push(Left::failed(path, &error));
            }
            Err(_) if is_gone(&path) => self.removed.push(path),
            Err(Error::Busy { .. }) => self.left.push(Left::alone(path, BUSY)),
            Err(error) => self.left.push(Left::alone(path, error.to_string())),
        }
    }

    /// Notes the outcome of removing the recycled files in a directory.
    fn note_recycled(&mut self, dir: &Path, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.left.push(Left::failed(dir, &error));
        }
    }

    /// Removes what a killed save left in a directory. If it left nothing, the directory is left alone because of
    /// `problem`; without a problem, another call has cleared it.
    fn clear(&mut self, path: PathBuf, config: &Config, act: Act, problem: Option<String>) {
        let swept = prune::clear(&path, &config.stripe, act);
        let nothing = swept.removed.is_empty() && swept.left.is_empty();
        match problem {
            // It was not a killed save: another call has finished its removal.
            Some(_) if nothing && is_emptied(&path) => self.removed.push(path),
            Some(reason) if nothing => self.left.push(Left::alone(path, reason)),
            _ if nothing || !swept.removed.is_empty() => self.cleared.push(path),
            _ => {} // `swept.left` says why
        }
        for left in swept.left {
            // The plan may list it already.
            if !self.left.contains(&left) {
                self.left.push(left);
            }
        }
    }
}

/// Whether a directory is gone or empty.
fn is_emptied(dir: &Path) -> bool {
    lock::is_empty(dir) || !dir::has(dir)
}

/// Whether another call that removes the checkpoint may have caused this error.
fn may_be_another_call(error: &Error) -> bool {
    error.is_not_found() || error.is_incomplete() || matches!(error, Error::Busy { .. })
}

/// Why a step goes.
const NO_RULE: &str = "no rule keeps it";

const BUSY: &str = "a save into it, or its removal, is in progress";

/// What `retain` does with a directory.
enum Fate {
    /// It is a step: keep it while it is among the newest.
    Step,
    /// Its removal was killed.
    Interrupted,
    /// Nothing was committed there, for this reason, and a later step exists.
    Killed(String),
    /// Leave it alone, for this reason.
    Left(String),
}

/// Decides the fate of a directory, given the newest step if known.
fn fate(found: &Found, row: &Row, newest: Option<u64>) -> Fate {
    if let Some(reason) = none_of_the_row(&found.path) {
        return Fate::Left(reason.into());
    }
    let problem = || found.problem.clone().unwrap_or_else(|| "it cannot be loaded".into());
    // Perhaps a promotion is in progress, on whichever host.
    if is_url(&found.path) && found.status != Status::Committed {
        return Fate::Left(problem());
    }
    // Neither it nor a rank checkpoint in it has a manifest.
    let is_killed = found.status == Status::Incomplete && found.created_unix_ms.is_none();
    match (found.status, found.step) {
        (Status::Committed, Some(_)) => Fate::Step,
        (Status::Committed, None) => Fate::Left(row.why_not(found)),
        _ if is_being_removed(&found.path) || rank_dirs::removal_was_interrupted(&found.parts) => {
            Fate::Interrupted
        }
        (_, step) if is_killed && step.is_some() && step < newest => Fate::Killed(problem()),
        _ => Fate::Left(problem()),
    }
}

/// Why a directory cannot be a step, going by its kind and name; `None` if it may be one.
fn none_of_the_row(path: &Path) -> Option<&'static str> {
    if dir::is_link(path) {
        return Some("it is a link; `retain` only counts checkpoints in their own directory");
    }
    if names::is_unnamed(path) {
        return Some(
            "its save or removal has not ended; if that was killed, the trainer's next save removes it",
        );
    }
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(names::is_rank_dir).then_some(
        "it is one rank's share of a checkpoint; remove the whole checkpoint, once there is a newer one",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::cleanup::remove::remove_checkpoint;
    use crate::{Dtype, StateDict};

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for step in 1..4 {
            let mut state = StateDict::new();
            state.bytes("a", Dtype::U8, &[4], &[1; 4]).unwrap();
            crate::save(&state, root.path().join(format!("step-{step}"))).unwrap();
        }
        root
    }

    /// Runs `disturb` between the plan and the removal of a call, and returns the call's report.
    fn disturbed(root: &Path, disturb: impl FnOnce(&Path)) -> Retained {
        let config = Config::default();
        let plan = retain_plan(root, &RetainOptions::new(1), &config).unwrap();
        disturb(&plan.removed[0]);
        carry_out(plan, root, Disposal::Remove, &config)
    }

    #[test]
    fn step_removed_by_another_call_counts_as_removed() {
        let config = Config::default();
        let remove = |dir: &Path| drop(remove_checkpoint(dir, Disposal::Remove, &config).unwrap());
        for notes in [false, true] {
            let root = root();
            let done = disturbed(root.path(), |dir| {
                // The directory stays if other files are in it.
                if notes {
                    std::fs::write(dir.join("notes.txt"), "mine").unwrap();
                }
                remove(dir);
            });
            assert_eq!((done.kept.len(), done.removed.len(), done.left.len()), (1, 2, 0));
        }
    }

    #[test]
    fn step_that_cannot_be_looked_at_is_not_called_removed() {
        use crate::sys::seam::{Call, fail_call};
        let root = root();
        let step = root.path().join("step-1");
        assert!(!is_gone(&step));
        let _failing = [names::MANIFEST, names::REMOVAL_MARK]
            .map(|name| fail_call(Call::Look, &step.join(name), 5));
        assert!(!is_gone(&step));
    }

    #[test]
    fn retain_leaves_step_that_another_call_is_removing() {
        let (root, mut other) = (root(), None);
        let done = disturbed(root.path(), |dir| {
            other = Some(crate::Store::found().unwrap().begin(dir, 1).unwrap())
        });
        assert_eq!((done.kept.len(), done.removed.len(), done.left.len()), (1, 1, 1));
        assert!(done.left[0].reason.contains("or its removal, is in progress"), "{done:?}");
    }
}
