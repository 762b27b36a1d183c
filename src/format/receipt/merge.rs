//! Merges the receipts of all ranks: one after the other, without decoding any of them as a whole.

use super::Receipt;
use super::packed::{self, Packed, Tensor};
use crate::error::{Error, Result};
use crate::format::lists;
use crate::format::manifest::{Chunk, FileEntry, TensorEntry};
use hashbrown::HashTable;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

/// The receipts of all ranks, put together.
#[derive(Debug)]
pub struct Merged {
    /// Bytes of a checksum chunk.
    pub block_bytes: u64,
    /// All shards, by rank.
    pub files: Vec<FileEntry>,
    /// All tensors, in the order in which the ranks first name them.
    pub tensors: Vec<TensorEntry>,
    /// The parts that all ranks have set apart.
    pub apart: Vec<String>,
    /// What each rank wrote, by rank.
    pub writes: Vec<Write>,
}

/// Which write of its rank a receipt is from.
#[derive(Debug)]
pub struct Write {
    /// The rank.
    pub rank: u32,
    /// As [`Receipt::session`].
    pub session: String,
    /// As [`Receipt::write`].
    pub write: String,
    /// As [`Receipt::mark`].
    pub mark: String,
    /// Its files among [`Merged::files`].
    pub files: Range<usize>,
}

/// See [`Receipt::mark`].
pub(super) fn mark(files: &[FileEntry], session: &str, write: &str) -> String {
    let (mut hasher, mut words) = (crc32fast::Hasher::new(), Vec::new());
    for file in files {
        hasher.update(file.name.as_bytes());
        hasher.update(&file.bytes.to_le_bytes());
        words.clear();
        words.extend(file.crc32.iter().flat_map(|crc32| crc32.to_le_bytes()));
        hasher.update(&words);
    }
    format!("{:08x} {session} {write}", hasher.finalize())
}

/// [`merge_packed`] of receipts that are not encoded.
///
/// # Errors
/// As for [`merge_packed`].
pub fn merge(receipts: &[Receipt]) -> Result<Merged> {
    merge_packed(&receipts.iter().map(Receipt::encode).collect::<Vec<_>>())
}

/// Merges the encoded receipts of all ranks, in any order. A region that several ranks wrote counts once.
///
/// Does not check that the regions cover their tensors: the manifest does.
///
/// # Errors
/// [`Error::Invalid`] for bytes that [`Receipt::decode`] refuses, for two receipts of one rank, for a receipt with a
/// chunk in a file that it does not list, and for ranks that disagree on the block size, on the parts that they set
/// apart, or on a tensor's dtype or shape.
pub fn merge_packed(receipts: &[impl AsRef<[u8]>]) -> Result<Merged> {
    let mut receipts = (0..).zip(receipts).map(open).collect::<Result<Vec<_>>>()?;
    receipts.sort_by_key(|receipt| receipt.rank);
    check_ranks(&receipts)?;
    let mut merging = Merging::new(receipts.first());
    for receipt in receipts {
        merging.take(&receipt).map_err(|reason| {
            Error::invalid(format!("the receipt of rank {} is refused: {reason}", receipt.rank))
        })?;
    }
    merging.merged.tensors.iter_mut().for_each(drop_repeated);
    Ok(merging.merged)
}

fn open((place, bytes): (usize, &impl AsRef<[u8]>)) -> Result<Packed<'_>> {
    let bytes = bytes.as_ref();
    Packed::open(bytes).map_err(|reason| {
        let what = format!("the {} bytes at place {place} are not a rank's receipt", bytes.len());
        Error::invalid(format!("{what}: {reason}"))
    })
}

fn check_ranks(receipts: &[Packed<'_>]) -> Result<()> {
    for pair in receipts.windows(2) {
        let (one, other) = (&pair[0], &pair[1]);
        if one.rank == other.rank {
            let rank = one.rank;
            return Err(Error::invalid(format!(
                "two processes saved as rank {rank}: give each a rank of its own"
            )));
        }
        if one.block_bytes != other.block_bytes {
            return Err(Error::invalid(format!(
                "rank {} saved in blocks of {} bytes, rank {} of {}: give all ranks the same \
                 Config.block_bytes",
                one.rank, one.block_bytes, other.rank, other.block_bytes
            )));
        }
        // A rank that sets nothing apart would keep the others' part from being freed.
        if one.apart != other.apart {
            return Err(Error::invalid(format!(
                "rank {} set {:?} apart, rank {} {:?}: set the same parts apart on all ranks, in the same order",
                one.rank, one.apart, other.rank, other.apart
            )));
        }
    }
    Ok(())
}

/// A merge in progress.
struct Merging<'a> {
    merged: Merged,
    /// The rank that named each tensor first.
    first_ranks: Vec<u32>,
    /// The numbers of the tensors, by their names.
    by_name: HashTable<usize>,
    random: RandomState,
    /// The names, dtypes and shapes in the receipt before, and the numbers of its tensors. Most ranks have the same.
    before: &'a [u8],
    numbers: Vec<usize>,
}

impl<'a> Merging<'a> {
    fn new(first: Option<&Packed<'a>>) -> Self {
        let merged = Merged {
            block_bytes: first.map_or(0, |first| first.block_bytes),
            files: Vec::new(),
            tensors: Vec::new(),
            apart: first.iter().flat_map(|first| &first.apart).map(|&part| part.into()).collect(),
            writes: Vec::new(),
        };
        let (first_ranks, by_name, numbers) = (Vec::new(), HashTable::new(), Vec::new());
        Self { merged, first_ranks, by_name, random: RandomState::new(), before: &[], numbers }
    }

    /// Adds a receipt. Fails with a sentence.
    fn take(&mut self, receipt: &Packed<'a>) -> std::result::Result<(), String> {
        let first_file = self.merged.files.len();
        let files = receipt.read_files(&mut self.merged.files)?;
        let own = first_file..self.merged.files.len();
        let (session, write) = (receipt.session, receipt.write);
        self.merged.writes.push(Write {
            rank: receipt.rank,
            session: session.into(),
            write: write.into(),
            mark: mark(&self.merged.files[own.clone()], session, write),
            files: own,
        });
        if self.before != receipt.tensors {
            self.numbers.clear();
            packed::tensors(receipt.tensors, |tensor| {
                let number = self.number(tensor, receipt.rank)?;
                self.numbers.push(number);
                Ok(())
            })?;
            self.before = receipt.tensors;
        }
        let first_file = u32::try_from(first_file).map_err(|_| "there are too many files")?;
        receipt.each_chunk(self.numbers.len(), |tensor, mut chunk| {
            let tensor = &mut self.merged.tensors[self.numbers[tensor]];
            // Otherwise the number would mean another rank's file.
            if chunk.file >= files {
                let (name, file) = (&tensor.name, chunk.file);
                return Err(format!("it has tensor {name:?} in file number {file} of {files}"));
            }
            chunk.file = chunk.file.checked_add(first_file).ok_or("there are too many files")?;
            push(tensor, chunk);
            Ok(())
        })
    }

    /// The number of a tensor, a new one if no rank before has named it.
    fn number(&mut self, tensor: Tensor<'_>, rank: u32) -> std::result::Result<usize, String> {
        let (known, hash) = (&self.merged.tensors, |name: &str| self.random.hash_one(name));
        let is_it = |&number: &usize| known[number].name == tensor.name;
        match self.by_name.find(hash(tensor.name), is_it) {
            Some(&number) => {
                check_same(&known[number], self.first_ranks[number], &tensor, rank)?;
                Ok(number)
            }
            None => {
                let number = known.len();
                let rehash = |&number: &usize| hash(&known[number].name);
                self.by_name.insert_unique(hash(tensor.name), number, rehash);
                lists::push(&mut self.merged.tensors, tensor.entry());
                self.first_ranks.push(rank);
                Ok(number)
            }
        }
    }
}

fn check_same(
    known: &TensorEntry,
    rank: u32,
    new: &Tensor<'_>,
    its_rank: u32,
) -> std::result::Result<(), String> {
    if (known.dtype, &known.shape, known.object) == (new.dtype, &new.shape, new.object) {
        return Ok(());
    }
    let kind = |object, dtype, shape: &[u64]| match object {
        true => "an object".to_owned(),
        false => format!("{dtype} {shape:?}"),
    };
    Err(format!(
        "tensor {:?} is {} on rank {rank} and {} on rank {its_rank}",
        known.name,
        kind(known.object, known.dtype, &known.shape),
        kind(new.object, new.dtype, &new.shape)
    ))
}

/// Adds a chunk, unless it is a replica of the whole tensor.
fn push(tensor: &mut TensorEntry, chunk: Chunk) {
    let is_whole = |chunk: &Chunk| chunk.extent().is_none();
    if tensor.chunks.first().is_some_and(is_whole) {
        return;
    }
    if is_whole(&chunk) {
        tensor.chunks.clear();
    }
    tensor.chunks.push(chunk);
}

/// Keeps the first of the chunks with the same offsets and sizes: the others are replicas.
fn drop_repeated(tensor: &mut TensorEntry) {
    // Those of ranks in a row, without any replicas.
    if tensor.chunks.windows(2).all(|pair| pair[0].offsets() < pair[1].offsets()) {
        return;
    }
    let boxes = std::mem::take(&mut tensor.chunks);
    let mut seen = HashSet::with_capacity(boxes.len());
    let first = boxes.iter().map(|chunk| seen.insert(chunk.extent()));
    let first: Vec<bool> = first.collect();
    tensor.chunks =
        boxes.into_iter().zip(first).filter(|(_, first)| *first).map(|(c, _)| c).collect();
}
