//! Which of a checkpoint's files are in this node's directory, where nodes share none.

#[cfg(feature = "object-store")]
use crate::format::{Manifest, names};
#[cfg(feature = "object-store")]
use crate::store::layout::node;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, FaultKind};
#[cfg(feature = "object-store")]
use std::collections::HashSet;

impl Checkpoint {
    /// The numbers of the files, but those that are on other nodes alone.
    pub fn files_here(&self) -> impl Iterator<Item = usize> {
        let is_elsewhere = |file: &usize| {
            Fault::in_file(&self.faults, *file).is_some_and(|f| f.kind == FaultKind::Elsewhere)
        };
        (0..self.files.len()).filter(move |file| !is_elsewhere(file))
    }

    /// The numbers of the files that this node sends to a store: those of its own ranks, and with `replicas` all that are
    /// here. All, if the ranks share one directory.
    #[cfg(feature = "object-store")]
    pub(in crate::store) fn files_to_send(&self, replicas: bool) -> Vec<usize> {
        let Manifest { nodes, files, .. } = self.manifest();
        if replicas || nodes.is_empty() {
            return self.files_here().collect();
        }
        let here = node::of_checkpoint(self.path());
        let own = nodes.iter().find(|node| here.as_ref().is_some_and(|here| here.id == node.id));
        let ranks: HashSet<u32> = own.into_iter().flat_map(|node| node.ranks.clone()).collect();
        let is_own = |file: &usize| {
            names::shard_rank(&files[*file].name).is_some_and(|rank| ranks.contains(&rank))
        };
        self.files_here().filter(is_own).collect()
    }
}
