//! Damage to a checkpoint's files: which tensors it hits, and which bytes can still be read.

use crate::error::{Error, Result};
use crate::format::{TensorEntry, names};
use crate::pipeline::report::{Damage, DamagedTensor};
use crate::plan::load::Want;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, FaultKind, PlaceIndex, wants_of};
use std::collections::HashSet;
use std::io;
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
            is_refusal: matches!(fault.kind, FaultKind::Denied(_)),
        }
    }

    fn lost_chunks(&self, fault: &Fault) -> Range<u64> {
        let unit = self.manifest().block_bytes.max(1);
        match fault.lost.is_empty() {
            true => fault.lost.clone(),
            false => fault.lost.start / unit * unit..fault.lost.end,
        }
    }

    /// What can be read and checked of what is wanted, if the files have these faults, by rising number of the file.
    pub(in crate::store) fn readable_of(&self, want: &Want, faults: &[Fault]) -> Want {
        let lost = Fault::in_file(faults, want.file)
            .map_or(u64::MAX, |fault| self.lost_chunks(fault).start);
        let end = want.range.end.min(lost);
        Want { file: want.file, range: want.range.start.min(end)..end }
    }

    /// Checks that the bytes of a tensor exist.
    ///
    /// # Errors
    /// As for [`Checkpoint::check_files`].
    pub(in crate::store) fn check_faults(&self, entry: &TensorEntry) -> Result<()> {
        self.fault_of(entry).map_or(Ok(()), |fault| Err(self.error_of(fault)))
    }

    /// The first fault that takes bytes of a tensor.
    fn fault_of(&self, entry: &TensorEntry) -> Option<&Fault> {
        let is_lost = |want: &Want| &self.readable_of(want, &self.faults) != want;
        let lost = wants_of(entry).find(is_lost)?;
        Fault::in_file(&self.faults, lost.file)
    }

    /// What is wrong with a file of the manifest, by its number: `"no such file"`, `"a symbolic link"`. `None` if nothing
    /// is known to be. Does not read it.
    pub fn file_problem(&self, file: usize) -> Option<String> {
        let fault = Fault::in_file(&self.faults, file)?;
        Some(match fault.kind {
            FaultKind::Length => format!("{} of {} bytes", fault.got, fault.expected),
            _ => fault.got.clone(),
        })
    }

    /// Whether bytes of a tensor are known to be missing. Does not read it.
    pub fn is_lost(&self, tensor: &TensorEntry) -> bool {
        self.fault_of(tensor).is_some()
    }

    /// Checks that all files exist with their full length: after [`OpenOptions::damaged`](crate::OpenOptions::damaged), which does not.
    ///
    /// # Errors
    /// [`Error::MissingFiles`]; [`Error::Corrupt`] for a file of another length; [`Error::Format`] for a link and anything
    /// but a file; [`Error::Io`] for one that the system refuses.
    pub fn check_files(&self) -> Result<()> {
        let mut here = self.faults.iter().filter(|fault| fault.kind != FaultKind::Elsewhere);
        // A missing file may be on a disk that is not mounted: anything else is certain.
        let certain = here.clone().find(|fault| fault.kind != FaultKind::Missing);
        certain.or_else(|| here.next()).map_or(Ok(()), |fault| Err(self.error_of(fault)))
    }

    /// Says which node has a file, and how to load from it.
    fn elsewhere(&self, name: &str) -> String {
        let node = self.manifest().node_of(name);
        let [host, id] = node.map_or(["", ""], |node| [&node.host, &node.id]);
        format!(
            "{name} is on another node: {host}, whose directory has the id {id:?} in {}; load it with \
             ringstow.distributed on all nodes, or copy the files of all nodes into one directory",
            names::NODE
        )
    }

    fn error_of(&self, fault: &Fault) -> Error {
        match (fault.kind, &self.problem) {
            (FaultKind::Missing, Some(reason)) => {
                Error::MissingFiles { path: self.path().into(), reason: reason.clone() }
            }
            (FaultKind::Elsewhere, _) => Error::MissingFiles {
                path: self.path().into(),
                reason: self.elsewhere(&self.manifest().files[fault.file].name),
            },
            (FaultKind::NoFile, _) => Error::format(
                &self.files[fault.file].path,
                format!(
                    "is not a regular file but {}: ringstow refuses shards that are links or devices; copy the file \
                     there, or let the checkpoint's directory be the link",
                    fault.got
                ),
            ),
            (FaultKind::Denied(errno) | FaultKind::Unreadable(errno), _) => {
                let cause = io::Error::from_raw_os_error(errno);
                Error::io("opening", &self.files[fault.file].path, cause)
            }
            _ => match self.damage_of(fault).into() {
                // Exactly where the file ends, not where the checksum chunk begins.
                Error::Corrupt { path, what, expected, got, tensors, advice, .. } => {
                    let offset = fault.lost.start;
                    Error::Corrupt { path, offset, what, expected, got, tensors, advice }
                }
                error => error,
            },
        }
    }

    /// The numbers of the files, but those that are on other nodes alone.
    pub fn files_here(&self) -> impl Iterator<Item = usize> {
        let is_elsewhere = |file: &usize| {
            Fault::in_file(&self.faults, *file).is_some_and(|f| f.kind == FaultKind::Elsewhere)
        };
        (0..self.files.len()).filter(move |file| !is_elsewhere(file))
    }
}

/// The names of damaged tensors.
pub(in crate::store) fn names_of(damaged: &[DamagedTensor]) -> HashSet<&str> {
    damaged.iter().map(|tensor| tensor.name.as_str()).collect()
}
