//! What can be wrong with a checkpoint's files, and where its tensors' bytes are in them.

use crate::format::{Chunk, FileEntry, Manifest, TensorEntry};
use crate::plan::load::Want;
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
    pub found: Option<u64>,
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
    pub fn new(manifest: &Manifest) -> Self {
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
    pub fn tensors_in(&self, file: usize, range: &Range<u64>) -> impl Iterator<Item = usize> {
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
