//! Damage to a checkpoint's files: which tensors it hits, and which bytes can still be read.

use crate::error::{Error, Result};
use crate::format::{Chunk, FileEntry, Manifest, TensorEntry};
use crate::pipeline::report::Damage;
use crate::plan::load::Want;
use crate::store::read::checkpoint::Checkpoint;
use std::ops::Range;

/// A file that is missing, or of another length than the manifest says, or that cannot be opened.
#[derive(Debug, Clone)]
pub(in crate::store) struct Fault {
    /// Its number in the manifest.
    pub file: usize,
    /// The bytes that cannot be read; empty for a file that is too long.
    pub lost: Range<u64>,
    /// As in [`Damage`].
    pub what: &'static str,
    pub expected: String,
    pub got: String,
    /// How many bytes of the file exist.
    found: Option<u64>,
}

impl Fault {
    /// The fault of a file of `len` bytes, if that is not its length.
    pub fn of_length(file: usize, entry: &FileEntry, len: u64) -> Option<Self> {
        (len != entry.bytes).then(|| Self {
            file,
            lost: len.min(entry.bytes)..entry.bytes,
            what: "length in bytes",
            expected: entry.bytes.to_string(),
            got: len.to_string(),
            found: Some(len),
        })
    }

    pub fn of_missing(file: usize, entry: &FileEntry) -> Self {
        Self::of_whole(file, entry.bytes, "no such file".into())
    }

    /// The fault of a file that cannot be opened.
    pub fn of_whole(file: usize, bytes: u64, got: String) -> Self {
        let (what, expected) = ("the file", format!("{bytes} bytes"));
        Self { file, lost: 0..bytes, what, expected, got, found: None }
    }
}

/// The tensors' bytes by file and offset.
#[derive(Debug)]
pub(in crate::store) struct PlaceIndex {
    /// For each file, ranges with the tensor's number, sorted. No two overlap.
    files: Vec<Vec<(Range<u64>, usize)>>,
}

impl PlaceIndex {
    fn new(manifest: &Manifest) -> Self {
        let mut files = vec![Vec::new(); manifest.files.len()];
        for (number, entry) in manifest.tensors.iter().enumerate() {
            for want in wants_of(entry) {
                files[want.file].push((want.range, number));
            }
        }
        files.iter_mut().for_each(|places| places.sort_unstable_by_key(|(range, _)| range.start));
        Self { files }
    }

    /// Numbers of the tensors with bytes in a range of a file, by offset.
    fn tensors_in(&self, file: usize, range: &Range<u64>) -> impl Iterator<Item = usize> {
        let places = &self.files[file];
        let first = places.partition_point(|(place, _)| place.end <= range.start);
        let end = range.end;
        let hit = places[first..].iter().take_while(move |(place, _)| place.start < end);
        hit.map(|(_, number)| *number)
    }
}

/// The bytes of a tensor in the files.
pub(in crate::store) fn wants_of(entry: &TensorEntry) -> impl Iterator<Item = Want> {
    let want = |chunk: &Chunk| {
        let sizes = chunk.sizes.as_deref().unwrap_or(&entry.shape);
        let bytes = entry.dtype.nbytes(sizes).unwrap_or(0);
        Want { file: chunk.file as usize, range: chunk.begin..chunk.begin + bytes }
    };
    entry.chunks.iter().map(want).filter(|want| !want.range.is_empty())
}

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
                Error::Corrupt { path, what, expected, got, tensors, .. } => {
                    let offset = fault.lost.start;
                    Error::Corrupt { path, offset, what, expected, got, tensors }
                }
                error => error,
            },
        }
    }
}
