//! Which of a checkpoint's files are in this node's directory, where nodes share none.

use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, FaultKind};

impl Checkpoint {
    /// The numbers of the files, but those that are on other nodes alone.
    pub fn files_here(&self) -> impl Iterator<Item = usize> {
        let is_elsewhere = |file: &usize| {
            Fault::in_file(&self.faults, *file).is_some_and(|f| f.kind == FaultKind::Elsewhere)
        };
        (0..self.files.len()).filter(move |file| !is_elsewhere(file))
    }
}
