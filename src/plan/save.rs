//! Lays tensors out in shards, and finds the pieces that fill each block.
//!
//! A shard is a header, then tensors back to back. Tensors whose sizes larger powers of two divide come first, so that
//! each is aligned without padding. The file is then cut into blocks at multiples of the block size: one block may
//! hold many small tensors, and a large tensor may take many blocks.
//!
//! A lane is a sequence of files, of which one is written at a time. Each tensor belongs to one lane, and the blocks of
//! the lanes take turns.

use super::deal::{Member, deal, groups, order, split, total};
use super::turns::in_turns;
use super::unchanged::{self, LinkedFile, Unchanged};
use crate::error::{Error, Result};
use crate::format::header::{self, Header, Placed, Reader};
use crate::format::part::Part;
use crate::format::{Chunk, Item, TensorEntry, names};
use serde::{Serialize, Serializer};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Everything besides the tensors that a layout depends on.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Which process this is; part of the shards' names.
    pub rank: u32,
    /// How many saves into the same directory came before.
    pub generation: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Largest shard, as far as whole tensors allow; 0 for no limit.
    pub shard_bytes: u64,
    /// Number of lanes: files that are written at the same time.
    pub lanes: usize,
    /// Parts whose tensors get files of their own, so that these files can go before the others.
    pub apart: &'a [Part],
}

/// Where everything of a save goes.
#[derive(Debug)]
pub struct SavePlan {
    /// The files.
    pub shards: Vec<Shard>,
    /// All blocks of all files, in the order of filling: the lanes take turns.
    pub blocks: Vec<Block>,
    /// Files of an earlier checkpoint, which are numbered after the shards.
    pub linked: Vec<LinkedFile>,
    /// Bytes of tensor data, linked or not.
    pub tensor_bytes: u64,
    /// Whether the tensor chunks are hashed, besides the checksums.
    pub is_hashed: bool,
    /// Whether other processes write other blocks of the same files, which have their length already.
    pub is_share: bool,
}

/// One file.
#[derive(Debug)]
pub struct Shard {
    /// Its final name.
    pub name: String,
    /// Its first bytes; [`Shard::write_header`] writes them.
    pub header: Header,
    /// Its items, by rising offset.
    pub items: Vec<ItemRange>,
    /// Its length.
    pub bytes: u64,
    /// The lane that it belongs to.
    pub lane: usize,
}

/// An item's bytes in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemRange {
    /// Index among the items given to [`plan`].
    pub item: usize,
    /// Byte offsets in the file.
    pub range: Range<u64>,
    /// Which of the item's bytes is the first; 0 unless the plan is a share of a file.
    pub from: u64,
}

/// A run of a file that is filled, checksummed and written at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Index in [`SavePlan::shards`].
    pub shard: usize,
    /// Byte offset in the file, a multiple of the block size.
    pub offset: u64,
    /// Bytes; less than the block size only for a file's last block.
    pub len: usize,
}

/// Something to copy into a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The source of the bytes.
    pub from: PieceSource,
    /// Which of its bytes.
    pub range: Range<usize>,
}

/// The source of a [`Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceSource {
    /// The shard's header.
    Header,
    /// The item of this index.
    Item(usize),
}

/// Lays out `items`. Several may be regions of one tensor. Each region then has its own file, since a safetensors file
/// cannot have the same name twice.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) naming a duplicate tensor, a size that overflows, or a region outside of its tensor.
pub fn plan(items: &[Item], options: Options<'_>) -> Result<SavePlan> {
    plan_changed(items, options, Unchanged::default())
}

/// [`plan`] for a save that need not write all: leaves out the items of linked files, and keeps those that have changed and
/// those that have not in files of their own.
///
/// # Errors
/// As for [`plan`].
pub fn plan_changed(
    items: &[Item],
    options: Options<'_>,
    unchanged: Unchanged,
) -> Result<SavePlan> {
    let name = |number, _| names::shard(options.rank, number, options.generation);
    plan_files(items, options, name, (Reader::Any, unchanged))
}

/// [`plan`] for the weights of a model, in files with the names and headers of Hugging Face's programs.
///
/// # Errors
/// As for [`plan`].
pub fn plan_model(items: &[Item], block_bytes: u64, shard_bytes: u64) -> Result<SavePlan> {
    let options =
        Options { rank: 0, generation: 0, block_bytes, shard_bytes, lanes: 1, apart: &[] };
    plan_files(items, options, names::model_shard, (Reader::Model, Unchanged::default()))
}

/// [`plan_model`] with the number of each item's file, from 1. Every file is numbered, even if there is only one.
///
/// # Errors
/// As for [`plan`]; [`Error::Invalid`] if a file's header is too long for its tensors.
pub fn plan_numbered(items: &[Item], numbers: &[u32], block_bytes: u64) -> Result<SavePlan> {
    let order = order(items)?;
    let tensor_bytes = total(&order)?;
    let count = numbers.iter().copied().max().unwrap_or(1);
    let mut files: BTreeMap<u32, Vec<Member>> = BTreeMap::new();
    for member in order {
        let number = numbers.get(member.item).filter(|&&number| number > 0);
        let number =
            *number.ok_or_else(|| Error::invalid("each tensor needs a file number from 1"))?;
        files.entry(number).or_default().push(member);
    }
    let mut shards = Vec::with_capacity(files.len());
    for (number, members) in files {
        let name = names::numbered_model_shard(number as usize, count as usize);
        if split(items, &members, 0, Reader::Model)?.len() > 1 {
            return Err(Error::invalid(format!(
                "{name} would hold too many tensors: spread them over more files"
            )));
        }
        shards.push(lay_out(name, items, 0, members, Reader::Model));
    }
    let blocks = interleave(&shards, block_bytes);
    Ok(SavePlan::of(blocks, shards, tensor_bytes))
}

/// `name` gets the number of a file, from 0, and the number of files.
fn plan_files(
    items: &[Item],
    options: Options<'_>,
    name: impl Fn(usize, usize) -> String,
    (reader, unchanged): (Reader, Unchanged),
) -> Result<SavePlan> {
    let mut order = order(items)?;
    let tensor_bytes = total(&order)?;
    order.sort_by_key(|member| member.layer);
    let is_linked = unchanged.is_linked();
    let mut files: Vec<(usize, Vec<Member>)> = Vec::new();
    for group in groups(order, items, options.apart) {
        let [changed, same] = unchanged.split(group, &is_linked);
        for (members, file_bytes) in
            [(changed, options.shard_bytes), (same, unchanged::file_bytes(options.shard_bytes))]
        {
            for (lane, members) in deal(members, options.lanes).into_iter().enumerate() {
                let of_lane = split(items, &members, file_bytes, reader)?;
                files.extend(of_lane.into_iter().map(|members| (lane, members)));
            }
        }
    }
    // A save of no tensors has one file.
    let is_there = |(_, members): &(usize, Vec<Member>)| !members.is_empty();
    if items.is_empty() {
        files.truncate(1)
    } else {
        files.retain(is_there)
    }
    let count = files.len();
    let shards: Vec<Shard> = files
        .into_iter()
        .zip(unchanged.numbers())
        .map(|((lane, members), number)| lay_out(name(number, count), items, lane, members, reader))
        .collect();
    let blocks = interleave(&shards, options.block_bytes);
    Ok(SavePlan { linked: unchanged.linked, ..SavePlan::of(blocks, shards, tensor_bytes) })
}

fn lay_out(
    name: String,
    items: &[Item],
    lane: usize,
    mut members: Vec<Member>,
    reader: Reader,
) -> Shard {
    // A stable sort: tensors of one alignment keep the state's order, so that a load reads the tensors of a module
    // in one run.
    members.sort_by_key(|member| {
        let dtype = items[member.item].info.dtype;
        Reverse(header::natural_alignment(member.nbytes, dtype))
    });
    let mut at = 0;
    let extent = |member: Member| {
        let begin = at;
        at += member.nbytes;
        ItemRange { item: member.item, range: begin..at, from: 0 }
    };
    let mut extents: Vec<ItemRange> = members.into_iter().map(extent).collect();
    // Offsets in the header count from the data section, so they do not depend on the header's length.
    let header = Header::new(reader, extents.len(), |n| placed(items, &extents[n], 0));
    for extent in &mut extents {
        extent.range.start += header.bytes();
        extent.range.end += header.bytes();
    }
    Shard { name, items: extents, bytes: header.bytes() + at, header, lane }
}

/// An item's place in the data section, which starts at `start`.
fn placed<'a>(items: &'a [Item], extent: &ItemRange, start: u64) -> Placed<'a> {
    let Range { start: begin, end } = extent.range;
    Placed { item: &items[extent.item], begin: begin - start, end: end - start }
}

impl Shard {
    /// Writes the header's bytes from an offset on. `items` are those given to [`plan`].
    pub fn write_header(&self, items: &[Item], from: u64, to: &mut [u8]) {
        let start = self.header.bytes();
        self.header.write(from, to, |n| placed(items, &self.items[n], start));
    }

    /// The whole header.
    pub fn header_bytes(&self, items: &[Item]) -> Vec<u8> {
        let mut bytes = vec![0; self.header.bytes() as usize];
        self.write_header(items, 0, &mut bytes);
        bytes
    }
}

fn cut(shard: usize, file: &Shard, block_bytes: u64) -> impl Iterator<Item = Block> {
    let bytes = file.bytes;
    (0..bytes.div_ceil(block_bytes)).map(move |number| {
        let offset = number * block_bytes;
        Block { shard, offset, len: (bytes - offset).min(block_bytes) as usize }
    })
}

/// The blocks of all files: those of one lane in order, the lanes by turns.
fn interleave(shards: &[Shard], block_bytes: u64) -> Vec<Block> {
    let numbered = shards.iter().enumerate();
    let blocks = numbered.flat_map(|(number, shard)| cut(number, shard, block_bytes)).collect();
    in_turns(blocks, |block: &Block| shards[block.shard].lane)
}

impl SavePlan {
    /// A plan that writes all of its files by itself.
    pub(super) fn of(blocks: Vec<Block>, shards: Vec<Shard>, tensor_bytes: u64) -> Self {
        let (linked, is_hashed, is_share) = (Vec::new(), false, false);
        Self { shards, blocks, linked, tensor_bytes, is_hashed, is_share }
    }

    /// Bytes of all blocks: those of all files that are not linked, unless the plan is a share of them.
    pub fn file_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.len as u64).sum()
    }

    /// The pieces that fill a block, in order, without gaps.
    pub fn pieces(&self, block: &Block) -> Vec<Piece> {
        let shard = &self.shards[block.shard];
        let span = block.offset..block.offset + block.len as u64;
        let first = shard.items.partition_point(|item| item.range.end <= span.start);
        let count = shard.items[first..].partition_point(|item| item.range.start < span.end);
        let mut pieces = Vec::with_capacity(count + 1);
        let mut add = |from, extent: &Range<u64>, skipped: u64| {
            let (begin, end) = (span.start.max(extent.start), span.end.min(extent.end));
            if begin < end {
                let at = |offset: u64| (offset - extent.start + skipped) as usize;
                pieces.push(Piece { from, range: at(begin)..at(end) });
            }
        };
        add(PieceSource::Header, &(0..shard.header.bytes()), 0);
        for extent in &shard.items[first..first + count] {
            add(PieceSource::Item(extent.item), &extent.range, extent.from);
        }
        debug_assert_eq!(pieces.iter().map(|piece| piece.range.len()).sum::<usize>(), block.len);
        pieces
    }

    /// The manifest's entries, in the order of the items given to [`plan`]. The regions of one tensor share an entry.
    pub fn entries<'a>(&self, items: &'a [Item]) -> Entries<'a> {
        let mut places = vec![(0, 0); items.len()];
        for (file, shard) in self.shards.iter().enumerate() {
            for extent in &shard.items {
                places[extent.item] = (file as u32, extent.range.start);
            }
        }
        for (file, linked) in (self.shards.len() as u32..).zip(&self.linked) {
            linked.items.iter().for_each(|&(item, begin)| places[item] = (file, begin));
        }
        Entries { items, places }
    }
}

/// The manifest's entries, each made on demand: those of a million tensors take 200 MB.
#[derive(Debug)]
pub struct Entries<'a> {
    items: &'a [Item],
    /// For each item, the number of its file and the offset of its first byte there.
    places: Vec<(u32, u64)>,
}

impl Entries<'_> {
    /// The entries.
    pub fn iter(&self) -> impl Iterator<Item = TensorEntry> {
        // A whole tensor is one chunk; only regions must be collected.
        let mut regions: HashMap<&str, Vec<usize>> = HashMap::new();
        for (number, item) in
            self.items.iter().enumerate().filter(|(_, item)| item.region.is_some())
        {
            regions.entry(&item.info.name).or_default().push(number);
        }
        self.items.iter().enumerate().filter_map(move |(number, item)| {
            let chunks = match item.region {
                None => [self.chunk(number)].into(),
                // All regions of a tensor share the entry of the first.
                Some(_) => {
                    let regions = regions.remove(item.info.name.as_str())?;
                    regions.into_iter().map(|number| self.chunk(number)).collect()
                }
            };
            Some(TensorEntry {
                name: item.info.name.clone(),
                dtype: item.info.dtype,
                shape: item.tensor_shape().into(),
                chunks,
                object: item.object,
            })
        })
    }

    fn chunk(&self, number: usize) -> Chunk {
        let (item, (file, begin)) = (&self.items[number], self.places[number]);
        match &item.region {
            None => Chunk::whole(file, begin),
            Some(region) => Chunk::region(file, begin, (&region.offsets, &item.info.shape)),
        }
    }
}

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.iter())
    }
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
