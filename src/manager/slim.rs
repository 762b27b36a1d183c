//! Older steps lose the parts that only a resumed training needs.

use super::Shared;
use crate::error::{Error, Result};
use crate::state::StateDict;
use crate::store::{Found, Slimmed, older_steps};
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::PoisonError;

/// Which steps of a [`CheckpointManager`](crate::CheckpointManager) lose which parts. Each save sets these parts
/// [apart](StateDict::apart), so every state must have them.
///
/// ```
/// use ringstow::{Keep, Slim};
///
/// // The two newest steps can be resumed; all others keep the model.
/// let keep = Keep { slim: Some(Slim::after(2)), ..Keep::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slim {
    /// How many of the newest steps, and of the last saves, stay whole. What a link in the root leads to stays whole, too.
    /// Others that the rules keep, such as the best, do not.
    pub after: usize,
    /// The names of the parts that older steps lose; see [`slim`](crate::slim()).
    pub parts: Vec<String>,
}

impl Slim {
    /// Drops `optimizer` from all but the newest steps.
    pub fn after(after: usize) -> Self {
        Self { after, parts: vec!["optimizer".into()] }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.after == 0 {
            return Err(Error::invalid(
                "Slim.after is 0, and the newest step stays whole: 1 or more",
            ));
        }
        if self.parts.is_empty() {
            return Err(Error::invalid("Slim.parts is empty, so older steps would lose nothing"));
        }
        Ok(())
    }

    /// Makes a save write the parts into files of their own.
    pub(super) fn set_apart(&self, state: &mut StateDict<'_>) {
        for part in &self.parts {
            state.apart(part);
        }
    }
}

/// What a manager remembers of its slimming.
#[derive(Debug, Default)]
pub(super) struct Slimming {
    /// Steps that were saved without the parts apart: they stay whole.
    not_apart: HashSet<PathBuf>,
    /// Whether this process has looked for files that a killed slimming has left.
    has_looked: bool,
}

impl Shared {
    /// Slims the older steps, and says what came of each. A step that was saved without the parts apart stays whole, with
    /// one warning.
    pub(super) fn slim(&self) -> Vec<(PathBuf, Result<Slimmed>)> {
        let Some(Slim { after, parts }) = &self.slim else { return Vec::new() };
        let steps = match older_steps(&self.root, *after, self.store.config()) {
            Ok(steps) => steps,
            Err(error) => {
                tracing::warn!(root = %self.root.display(), %error, "old steps could not be slimmed");
                return vec![(self.root.clone(), Err(error))];
            }
        };
        let mut slimming = self.slimming.lock().unwrap_or_else(PoisonError::into_inner);
        let is_whole = |step: &Found| parts.iter().any(|part| !step.dropped.contains(part));
        let has_looked = std::mem::replace(&mut slimming.has_looked, true);
        let mut outcomes = Vec::new();
        for step in steps {
            if slimming.not_apart.contains(&step.path) || has_looked && !is_whole(&step) {
                continue;
            }
            let outcome = self.store.slim(&step.path, parts);
            if let Err(error) = &outcome {
                tracing::warn!(path = %step.path.display(), %error, "an old step stays whole");
            }
            if matches!(outcome, Err(Error::Invalid { .. })) {
                slimming.not_apart.insert(step.path.clone());
            }
            outcomes.push((step.path, outcome));
        }
        outcomes
    }
}
