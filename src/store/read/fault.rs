//! What can be wrong with a checkpoint's files, and where its tensors' bytes are in them.

use crate::error::is_bad_medium;
use crate::format::{Chunk, FileEntry, Manifest, TensorEntry};
use crate::plan::load::Want;
use crate::sys::file::{is_link, is_no_file};
use std::fs::FileType;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;

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
    pub kind: FaultKind,
}

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum FaultKind {
    Missing,
    /// It is on another node, and nothing is wrong with it.
    Elsewhere,
    Length,
    /// A link, a directory, a FIFO or a device has its name.
    NoFile,
    /// This process may not open it, by this error number.
    Denied(i32),
    /// It is on a bad medium, by this error number.
    Unreadable(i32),
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
            kind: FaultKind::Length,
        })
    }

    pub fn of_missing(file: usize, bytes: u64) -> Self {
        Self::of_whole(file, bytes, "no such file".into(), FaultKind::Missing)
    }

    /// That a file is not here, since this node does not have it.
    pub fn of_elsewhere(file: usize, bytes: u64) -> Self {
        Self::of_whole(file, bytes, "it is on another node".into(), FaultKind::Elsewhere)
    }

    /// The fault of something other than a file that has its name. Never followed or read: a link leads to what is not
    /// the checkpoint's.
    pub fn of_kind(file: usize, bytes: u64, found: FileType) -> Self {
        let got = match found {
            link if link.is_symlink() => "a symbolic link",
            dir if dir.is_dir() => "a directory",
            fifo if fifo.is_fifo() => "a FIFO",
            _ => "a device or socket",
        };
        Self::of_whole(file, bytes, got.into(), FaultKind::NoFile)
    }

    /// The fault of a file that could not be opened; `None` if the error says nothing about the file, such as too many
    /// open files.
    pub fn of_error(file: usize, bytes: u64, error: &io::Error) -> Option<Self> {
        if is_link(error) || is_no_file(error) {
            let got = if is_link(error) { "a symbolic link" } else { "not a regular file" };
            return Some(Self::of_whole(file, bytes, got.into(), FaultKind::NoFile));
        }
        let (errno, got) = (error.raw_os_error()?, error.to_string());
        if error.kind() == io::ErrorKind::PermissionDenied {
            let fault = Self::of_whole(file, bytes, got, FaultKind::Denied(errno));
            let (what, expected) = ("permission to read the file", "granted".into());
            return Some(Self { what, expected, ..fault });
        }
        is_bad_medium(error).then(|| Self::of_whole(file, bytes, got, FaultKind::Unreadable(errno)))
    }

    /// The fault of a file, in a list by rising number of the file.
    pub fn in_file(faults: &[Self], file: usize) -> Option<&Self> {
        let found = faults.binary_search_by_key(&file, |fault| fault.file).ok()?;
        Some(&faults[found])
    }

    fn of_whole(file: usize, bytes: u64, got: String, kind: FaultKind) -> Self {
        let (what, expected) = ("the file", format!("a file of {bytes} bytes"));
        Self { file, lost: 0..bytes, what, expected, got, kind }
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
        let sizes = chunk.sizes().unwrap_or(&entry.shape);
        let bytes = entry.dtype.nbytes(sizes).unwrap_or(0);
        Want { file: chunk.file as usize, range: chunk.begin..chunk.begin + bytes }
    };
    entry.chunks.iter().map(want).filter(|want| !want.range.is_empty())
}
