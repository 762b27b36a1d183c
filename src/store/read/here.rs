//! Which of a checkpoint's files are in this node's directory, where nodes share none.

#[cfg(feature = "object-store")]
use crate::store::layout::node;
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

    /// The numbers of the files that this node sends to a store: those of its own ranks, and with `replicas` all that are
    /// here. All, if the ranks share one directory.
    #[cfg(feature = "object-store")]
    pub(in crate::store) fn files_to_send(&self, replicas: bool) -> Vec<usize> {
        let manifest = self.manifest();
        let here = self.path().parent().and_then(|run| node::read(run).ok().flatten());
        let is_own = |file: &usize| {
            let node = manifest.node_of(&manifest.files[*file].name);
            node.is_none_or(|node| here.as_ref().is_some_and(|here| here.id == node.id))
        };
        self.files_here().filter(|file| replicas || is_own(file)).collect()
    }
}
