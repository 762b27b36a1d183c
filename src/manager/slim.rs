//! Older steps lose the parts that only a resumed training needs.

use super::Shared;
use crate::error::{Error, Result};
use crate::state::StateDict;
use crate::store::{Slimmed, older_steps};
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
    /// Saves that need no more slimming, by path and time: done, or their parts are not apart. A later save to the path
    /// may have them apart.
    settled: HashSet<(PathBuf, Option<u64>)>,
}

impl Shared {
    /// Slims the older steps, and says what came of each. A step that was saved without the parts apart stays as it is,
    /// with one warning. What failed is tried again after the next save.
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
        let mut outcomes = Vec::new();
        for step in steps {
            let save = (step.path.clone(), step.created_unix_ms);
            if slimming.settled.contains(&save) || self.awaits(&step.path) {
                continue; // a copy is to be whole
            }
            let outcome = self.store.slim(&step.path, parts);
            if let Err(error) = &outcome {
                tracing::warn!(path = %step.path.display(), %error, "an old step was not slimmed");
            }
            let is_settled = match &outcome {
                Ok(slimmed) => slimmed.left.is_empty(),
                Err(error) => matches!(error, Error::Invalid { .. }),
            };
            if is_settled {
                slimming.settled.insert(save);
            }
            outcomes.push((step.path, outcome));
        }
        outcomes
    }
}
