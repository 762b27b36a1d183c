//! Damage to a checkpoint's files: which tensors it hits, and which bytes can still be read.

use crate::error::{Error, Result};
use crate::format::TensorEntry;
use crate::pipeline::report::{Damage, DamagedTensor};
use crate::plan::load::Want;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, PlaceIndex, wants_of};
use std::collections::HashSet;
use std::ops::Range;

impl Checkpoint {
    fn by_place(&self) -> &PlaceIndex {
        self.by_place.get_or_init(|| PlaceIndex::new(self.manifest()))
    }

    /// Names of the tensors with bytes in a range of a file, each once.
    pub(in crate::store) fn names_in(&self, file: usize, range: &Range<u64>) -> Vec<String> {
        let mut numbers: Vec<usize> = self.by_place().tensors_in(file, range).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.into_iter().map(|number| self.tensors()[number].name.clone()).collect()
    }

    /// The damage that a fault is, from the first checksum chunk that can no longer be checked.
    pub(in crate::store) fn damage_of(&self, fault: &Fault) -> Damage {
        let lost = self.lost_chunks(fault);
        Damage {
            file: self.files[fault.file].path.clone(),
            offset: lost.start,
            bytes: lost.end - lost.start,
            what: fault.what.into(),
            expected: fault.expected.clone(),
            got: fault.got.clone(),
            tensors: self.names_in(fault.file, &lost),
        }
    }

    fn lost_chunks(&self, fault: &Fault) -> Range<u64> {
        let unit = self.manifest().block_bytes.max(1);
        match fault.lost.is_empty() {
            true => fault.lost.clone(),
            false => fault.lost.start / unit * unit..fault.lost.end,
        }
    }

    /// What can be read and checked of what is wanted, if the files have these faults.
    pub(in crate::store) fn readable_of(&self, want: &Want, faults: &[Fault]) -> Want {
        let fault = faults.iter().find(|fault| fault.file == want.file);
        let lost = fault.map_or(u64::MAX, |fault| self.lost_chunks(fault).start);
        let end = want.range.end.min(lost);
        Want { file: want.file, range: want.range.start.min(end)..end }
    }

    /// Checks that the bytes of a tensor exist.
    ///
    /// # Errors
    /// As for [`Checkpoint::check_files`].
    pub(in crate::store) fn check_faults(&self, entry: &TensorEntry) -> Result<()> {
        let mut wants = wants_of(entry);
        let is_lost = |want: &Want| &self.readable_of(want, &self.faults) != want;
        let Some(lost) = wants.find(is_lost) else { return Ok(()) };
        let fault = self.faults.iter().find(|fault| fault.file == lost.file);
        fault.map_or(Ok(()), |fault| Err(self.error_of(fault)))
    }

    /// Checks that all files exist with their full length.
    ///
    /// # Errors
    /// [`Error::MissingFiles`]; [`Error::Corrupt`] for a file of another length; otherwise as for [`Fault::of_whole`].
    pub(in crate::store) fn check_files(&self) -> Result<()> {
        if let Some(fault) = self.faults.iter().find(|fault| fault.found.is_some()) {
            return Err(self.error_of(fault));
        }
        self.faults.first().map_or(Ok(()), |fault| Err(self.error_of(fault)))
    }

    fn error_of(&self, fault: &Fault) -> Error {
        match (fault.found, &self.problem) {
            (None, Some(reason)) => {
                Error::MissingFiles { path: self.path().into(), reason: reason.clone() }
            }
            _ => match self.damage_of(fault).into() {
                // Exactly where the file ends, not where the checksum chunk begins.
                Error::Corrupt { path, what, expected, got, tensors, is_last, .. } => {
                    let offset = fault.lost.start;
                    Error::Corrupt { path, offset, what, expected, got, tensors, is_last }
                }
                error => error,
            },
        }
    }
}

/// The names of damaged tensors.
pub(in crate::store) fn names_of(damaged: &[DamagedTensor]) -> HashSet<&str> {
    damaged.iter().map(|tensor| tensor.name.as_str()).collect()
}
