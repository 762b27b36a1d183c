//! The row: which names in a directory are the steps of a run. A single name is ambiguous: `gpt2` is not step 2 beside
//! `step-900` and `step-1000`. So all names together decide the row.

use crate::error::some_of;
use crate::format::manifest::Age;
use crate::format::{NoStep, Stem, StepName, StepPattern, names};
use crate::store::catalog::found::{Found, Status};
use crate::store::catalog::links::Link;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How the steps of a directory are recognized.
#[derive(Debug, Default)]
pub(in crate::store) struct Row {
    pub rule: Rule,
    /// Stems of other names that look like steps.
    rivals: Vec<Stem>,
    /// A checkpoint that is newer than all steps and has a number, but is the only one with its stem.
    newer: Option<PathBuf>,
    /// Numbers of saved steps that a name says, too. Another checkpoint that was saved with such a number, as `best` beside
    /// `step-10`, is no step: it would stand in the way of that one.
    named: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(in crate::store) enum Rule {
    /// Nothing is a step.
    #[default]
    Nothing,
    /// The caller's pattern.
    Pattern(StepPattern),
    /// Checkpoints saved as steps, and others with the same stem.
    Saved(Option<Stem>),
    /// Names with this stem.
    Named(Stem),
}

impl Row {
    /// Decides the row from all checkpoints of a directory.
    pub fn of(all: &[Found], pattern: Option<&StepPattern>) -> Self {
        let rule = |rule| Self { rule, ..Self::default() };
        if let Some(pattern) = pattern {
            return rule(Rule::Pattern(pattern.clone()));
        }
        let own: Vec<&Found> = all.iter().filter(|found| may_lead(found, Link::None)).collect();
        let saved = |found: &&&Found| found.saved_step.is_some() && found.saved_as.is_none();
        let newest_saved = own.iter().filter(saved).max_by_key(|found| age(found));
        if let Some(newest) = newest_saved {
            let named = name_of(&newest.path).ok();
            let same_number = named.filter(|named| Some(named.step) == newest.saved_step);
            let rule = Rule::Saved(same_number.map(|named| named.stem));
            let saved = own.iter().filter(saved).filter(|found| says_its_number(found));
            let named = saved.filter_map(|found| found.saved_step).collect();
            return Self { rule, named, ..Self::default() };
        }
        match own.is_empty() {
            false => Self::named(&own),
            // The directory holds only links to checkpoints on other disks.
            true => {
                Self::named(&all.iter().filter(|f| may_lead(f, Link::Outside)).collect::<Vec<_>>())
            }
        }
    }

    /// The row of the stem with the newest save: among the stems that count steps (`step-`) if there are any,
    /// otherwise among the stems that several names share.
    fn named(all: &[&Found]) -> Self {
        let mut by_stem: BTreeMap<Stem, Vec<&Found>> = BTreeMap::new();
        for found in all {
            if let Ok(name) = name_of(&found.path) {
                by_stem.entry(name.stem).or_default().push(found);
            }
        }
        // Ignore stems without a commit: they have no newest save.
        by_stem.retain(|_, row| row.iter().any(|found| found.created_unix_ms.is_some()));
        let newest = |row: &[&Found]| row.iter().map(|found| age(found)).max();
        let Some(last) = by_stem.values().flatten().max_by_key(|found| age(found)).copied() else {
            return Self::default();
        };
        let is_row = |row: &[&Found]| row.len() > 1;
        if by_stem.keys().any(Stem::counts_steps) {
            by_stem.retain(|stem, _| stem.counts_steps());
        } else if by_stem.values().any(|row| is_row(row)) {
            by_stem.retain(|_, row| is_row(row));
        }
        let (stem, row) = by_stem.iter().max_by_key(|(_, row)| newest(row)).expect("at least one");
        let newer = (newest(row) < Some(age(last))).then(|| last.path.clone());
        let rivals = by_stem.iter().filter(|(other, row)| *other != stem && is_row(row));
        let rivals = rivals.map(|(other, _)| other.clone()).collect();
        Self { rule: Rule::Named(stem.clone()), rivals, newer, ..Self::default() }
    }

    /// The checkpoint's step number; `None` if it is not a step.
    pub fn step(&self, found: &Found) -> Option<u64> {
        let link = Link::of(&found.path);
        if link == Link::Inside || names::is_never_a_step(&found.path) {
            return None;
        }
        let named = |stem: &Stem| {
            let name = name_of(&found.path).ok()?;
            (name.stem == *stem).then_some(name.step)
        };
        match &self.rule {
            Rule::Nothing => None,
            Rule::Pattern(pattern) => pattern.step_in(file_name(&found.path)),
            // Somebody has copied a step, or given it another name, to keep it.
            Rule::Saved(_) if found.saved_step.is_some() && found.saved_as.is_some() => None,
            Rule::Saved(_) if self.is_beside(found) => None,
            Rule::Saved(stem) => found
                .saved_step
                .filter(|_| link == Link::None)
                .or_else(|| stem.as_ref().and_then(named)),
            Rule::Named(stem) => named(stem),
        }
    }

    /// Whether a checkpoint was saved with the number of a step that has a name of its own.
    fn is_beside(&self, found: &Found) -> bool {
        found.saved_step.is_some_and(|step| self.named.contains(&step)) && !says_its_number(found)
    }

    /// Why a checkpoint that can be loaded is not a step.
    pub fn why_not(&self, found: &Found) -> String {
        let why = match (&self.rule, name_of(&found.path)) {
            (Rule::Pattern(pattern), _) => format!("its name does not fit the pattern {pattern}"),
            (Rule::Saved(_), _) if found.saved_as.is_some() => format!(
                "it was saved as {:?}, and has been copied or renamed",
                found.saved_as.as_deref().unwrap_or_default()
            ),
            (Rule::Saved(_), _) if self.is_beside(found) => {
                let step = found.saved_step.unwrap_or_default();
                format!("it was saved as step {step}, and another one here is named so")
            }
            (_, Err(why @ NoStep::NoNumber)) => format!("{why}"),
            (Rule::Saved(_), _) => "it was not saved with step=, as the steps here were".into(),
            (Rule::Named(stem), Ok(_)) => format!("the steps here are {stem}"),
            (_, Err(why)) => why.to_string(),
            (Rule::Nothing, Ok(_)) => "nothing here counts as a step".into(),
        };
        format!("{why}, so it is not a step; `remove` it if you no longer need it")
    }

    /// Describes the steps: `step-*`. `None` if nothing counts as a step.
    pub fn counted(&self) -> Option<String> {
        match &self.rule {
            Rule::Nothing => None,
            Rule::Pattern(pattern) => Some(pattern.to_string()),
            Rule::Saved(None) => Some("saved with step=".into()),
            Rule::Saved(Some(stem)) => Some(format!("saved with step=, and {stem}")),
            Rule::Named(stem) => Some(stem.to_string()),
        }
    }

    /// A checkpoint that is newer than all steps and may be one by its name.
    pub fn newer(&self) -> Option<&Path> {
        self.newer.as_deref()
    }

    /// Warnings for a clean-up of `dir`, if nothing counts as a step or the row is a guess.
    pub fn warnings(&self, dir: &Path, all: &[Found]) -> Vec<String> {
        let is_whole = |found: &&Found| {
            found.status == Status::Committed && !names::is_never_a_step(&found.path)
        };
        let wholes = all.iter().filter(is_whole).count();
        let none = wholes > 0 && all.iter().all(|found| found.step.is_none());
        let dir = dir.display();
        let nothing = none.then(|| match &self.rule {
            Rule::Pattern(pattern) => {
                format!("no checkpoint in {dir} fits the pattern {pattern}: none is removed")
            }
            _ => format!(
                "none of the {wholes} checkpoints in {dir} counts as a step: none is removed. {REMEDY}"
            ),
        });
        let guess = (!self.rivals.is_empty()).then(|| {
            let rivals: Vec<String> = self.rivals.iter().map(Stem::to_string).collect();
            let taken = self.counted().unwrap_or_default();
            format!(
                "several kinds of names in {dir} look like steps: {taken}, the newest save's, is taken, {} left \
                 alone. {REMEDY}",
                some_of(&rivals)
            )
        });
        nothing.into_iter().chain(guess).collect()
    }
}

const REMEDY: &str = "Save with step=1000, or say which names are steps: pattern=\"step-*\"";

/// Whether a directory may be a step by its name alone.
pub(in crate::store) fn may_be_step(path: &Path, pattern: Option<&StepPattern>) -> bool {
    match pattern {
        Some(pattern) => pattern.step_in(file_name(path)).is_some(),
        None => name_of(path).is_ok(),
    }
}

/// The key that orders saves. In the same millisecond, the higher number is later.
fn age(found: &Found) -> (Age, Option<u64>) {
    (found.order.age, found.saved_step.or_else(|| Some(name_of(&found.path).ok()?.step)))
}

/// Whether a directory counts when the row is decided: it is this kind of link (or none), and may be a step.
fn may_lead(found: &Found, link: Link) -> bool {
    !names::is_never_a_step(&found.path) && Link::of(&found.path) == link
}

fn file_name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_bytes()
}

/// Whether a checkpoint's name has the number that it was saved with.
fn says_its_number(found: &Found) -> bool {
    name_of(&found.path).is_ok_and(|name| Some(name.step) == found.saved_step)
}

fn name_of(path: &Path) -> std::result::Result<StepName, NoStep> {
    StepName::of(file_name(path))
}
