//! Older steps lose the parts that only a resumed training needs.

use crate::error::{Error, Result};
use crate::state::StateDict;

/// Which steps of a [`CheckpointManager`](crate::CheckpointManager) lose which parts. Each save makes these parts
/// [droppable](StateDict::droppable), so every state must have them.
///
/// ```
/// use ringstow::{Retention, Slim};
///
/// // The two newest steps can be resumed; all others keep the model.
/// let keep = Retention { slim: Some(Slim::after(2)), ..Retention::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slim {
    /// How many of the newest steps, and of the last saves, stay whole. What a link in the root leads to stays whole, too.
    /// Others that the rules keep, such as the best, do not.
    pub after: usize,
    /// The names of the parts that older steps lose; see [`Store::slim`](crate::Store::slim).
    pub drop: Vec<String>,
}

impl Slim {
    /// Drops `optimizer` from all but the newest steps.
    pub fn after(after: usize) -> Self {
        Self { after, drop: vec!["optimizer".into()] }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.after == 0 {
            return Err(Error::invalid(
                "Slim.after is 0, and the newest step stays whole: 1 or more",
            ));
        }
        if self.drop.is_empty() {
            return Err(Error::invalid("Slim.drop is empty, so older steps would lose nothing"));
        }
        Ok(())
    }

    /// Makes a save write the parts into files of their own.
    pub(super) fn make_droppable(&self, state: &mut StateDict<'_>) {
        for part in &self.drop {
            state.droppable(part);
        }
    }
}
