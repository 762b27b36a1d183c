//! Which tensors a checkpoint covers. One rank's share of what several ranks saved each by itself may hold only some
//! elements of a tensor; every other checkpoint covers all its tensors. Loads refuse tensors with missing elements.

use crate::error::{Error, Result, some_of};
use crate::format::TensorEntry;
use crate::store::read::checkpoint::Checkpoint;

impl Checkpoint {
    /// Checks that the checkpoint holds all elements of these tensors. Ignores names that it does not have.
    ///
    /// # Errors
    /// [`Error::MissingShare`] naming all tensors that it holds only in part.
    pub fn check_coverage<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<()> {
        match self.manifest().part_of {
            Some(_) => {
                let names: Vec<S> = names.into_iter().collect();
                self.check_entries(names.iter().filter_map(|name| self.tensor(name.as_ref())))
            }
            None => Ok(()),
        }
    }

    /// [`Checkpoint::check_coverage`] of entries.
    pub(in crate::store) fn check_entries<'a>(
        &self,
        entries: impl IntoIterator<Item = &'a TensorEntry>,
    ) -> Result<()> {
        let Some(part_of) = &self.manifest().part_of else { return Ok(()) };
        let lacking: Vec<String> = entries
            .into_iter()
            .map(|entry| (&entry.name, entry.held_bytes(), entry.nbytes()))
            .filter(|(_, held, whole)| held != whole)
            .map(|(name, held, whole)| format!("{held} of {whole} bytes of {name:?}"))
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let (rank, ranks, of) = (part_of.rank, part_of.ranks, some_of(&lacking));
        Err(Error::MissingShare {
            path: self.path().into(),
            reason: format!(
                "it is rank {rank}'s share of what {ranks} ranks saved each by itself (DCP's \
                 use_collectives=False), and holds only {of}: load it with dcp.load on {ranks} ranks that \
                 hold the same shards as those that saved, or save with collectives; what it holds whole \
                 can be loaded by name"
            ),
        })
    }
}
