//! Lays tensors out in shards, and says which pieces fill which block.
//!
//! A shard is laid out on paper first: header, then tensors back to back, those divisible by the
//! larger powers of two before the others, so that each is aligned without a hole. Its file is then
//! cut into blocks at multiples of the block size, whatever lies there: small tensors are packed
//! into one block and large ones split over many by the same arithmetic.

use crate::error::{Error, Result};
use crate::format::header::{self, Placed};
use crate::format::{Chunk, TensorEntry, TensorInfo, names};
use std::ops::Range;

/// The safetensors library refuses headers of more than 100,000,000 bytes. Half of that leaves room
/// and keeps the first read of a shard short.
const HEADER_BYTES_MAX: u64 = 50_000_000;

/// What a layout depends on besides the tensors.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Which process this is; part of the shards' names.
    pub rank: u32,
    /// How many saves into the same directory came before.
    pub generation: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Largest shard, as far as whole tensors allow; 0 for no limit.
    pub shard_bytes: u64,
}

/// Where everything of a save goes.
#[derive(Debug)]
pub struct SavePlan {
    /// The files.
    pub shards: Vec<Shard>,
    /// All blocks of all files, in the order in which they are filled.
    pub blocks: Vec<Block>,
    /// Bytes of tensor data.
    pub tensor_bytes: u64,
}

/// One file.
#[derive(Debug)]
pub struct Shard {
    /// Its final name.
    pub name: String,
    /// Its first bytes: length, JSON, padding.
    pub header: Vec<u8>,
    /// Its tensors, by rising offset.
    pub tensors: Vec<Extent>,
    /// Its length.
    pub bytes: u64,
}

/// A tensor's bytes in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Index among the tensors given to [`plan`].
    pub tensor: usize,
    /// Byte offsets in the file.
    pub range: Range<u64>,
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
    /// Where it comes from.
    pub from: From,
    /// Which of that one's bytes.
    pub range: Range<usize>,
}

/// Where a [`Piece`] comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The shard's header.
    Header,
    /// The tensor of this index.
    Tensor(usize),
}

/// Lays out `tensors`, whose names are unique.
///
/// # Errors
/// [`Error::Invalid`] naming a tensor whose name stands twice or whose size overflows.
pub fn plan(tensors: &[TensorInfo], options: Options) -> Result<SavePlan> {
    check_names(tensors)?;
    let mut order = Vec::with_capacity(tensors.len());
    let mut tensor_bytes = 0u64;
    for (index, info) in tensors.iter().enumerate() {
        let nbytes = info.nbytes()?;
        tensor_bytes = tensor_bytes
            .checked_add(nbytes)
            .filter(|&sum| sum < 1 << 62)
            .ok_or_else(|| Error::invalid("the tensors add up to more than 2^62 bytes"))?;
        order.push((index, nbytes));
    }
    let shards: Vec<Shard> = split(tensors, &order, options.shard_bytes)
        .into_iter()
        .enumerate()
        .map(|(number, members)| {
            let name = names::shard(options.rank, number, options.generation);
            lay_out(name, tensors, members)
        })
        .collect();
    let blocks = shards.iter().enumerate().flat_map(|(s, f)| cut(s, f, options.block_bytes));
    Ok(SavePlan { blocks: blocks.collect(), shards, tensor_bytes })
}

fn check_names(tensors: &[TensorInfo]) -> Result<()> {
    let mut seen = std::collections::HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|info| !seen.insert(info.name.as_str())) {
        Some(twice) => Err(Error::invalid(format!("two tensors are named {:?}", twice.name))),
        None => Ok(()),
    }
}

/// Deals the tensors out to shards, in order, by header size and by `shard_bytes`.
fn split(
    tensors: &[TensorInfo],
    order: &[(usize, u64)],
    shard_bytes: u64,
) -> Vec<Vec<(usize, u64)>> {
    let mut shards = vec![Vec::new()];
    let (mut header, mut data) = (0u64, 0u64);
    for &(index, nbytes) in order {
        let entry = header::entry_bytes_max(&tensors[index]);
        let too_large = shard_bytes > 0 && data + nbytes + header + entry > shard_bytes;
        let last = shards.last_mut().expect("there is always one");
        if !last.is_empty() && (header + entry > HEADER_BYTES_MAX || too_large) {
            shards.push(vec![(index, nbytes)]);
            (header, data) = (entry, nbytes);
        } else {
            last.push((index, nbytes));
            (header, data) = (header + entry, data + nbytes);
        }
    }
    shards
}

fn lay_out(name: String, tensors: &[TensorInfo], mut members: Vec<(usize, u64)>) -> Shard {
    // A stable sort: tensors of one size class keep the state's order, so that those of one module
    // stay together and are read in one run.
    members.sort_by_key(|&(index, nbytes)| {
        std::cmp::Reverse(header::natural_alignment(nbytes, tensors[index].dtype))
    });
    let mut at = 0;
    let placed: Vec<Placed> = members
        .iter()
        .map(|&(index, nbytes)| {
            let begin = at;
            at += nbytes;
            let info = &tensors[index];
            Placed { info, begin, end: at, offsets: vec![0; info.shape.len()] }
        })
        .collect();
    let header = header::build(&placed);
    let start = header.len() as u64;
    let extents = members
        .iter()
        .zip(&placed)
        .map(|(&(tensor, _), p)| Extent { tensor, range: start + p.begin..start + p.end });
    Shard { name, tensors: extents.collect(), bytes: start + at, header }
}

fn cut(shard: usize, file: &Shard, block_bytes: u64) -> impl Iterator<Item = Block> {
    let bytes = file.bytes;
    (0..bytes.div_ceil(block_bytes)).map(move |number| {
        let offset = number * block_bytes;
        Block { shard, offset, len: (bytes - offset).min(block_bytes) as usize }
    })
}

impl SavePlan {
    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// What fills a block, in order, without gap.
    pub fn pieces(&self, block: &Block) -> Vec<Piece> {
        let shard = &self.shards[block.shard];
        let span = block.offset..block.offset + block.len as u64;
        let mut pieces = Vec::new();
        let mut add = |from, extent: &Range<u64>| {
            let (begin, end) = (span.start.max(extent.start), span.end.min(extent.end));
            if begin < end {
                let range = (begin - extent.start) as usize..(end - extent.start) as usize;
                pieces.push(Piece { from, range });
            }
        };
        add(From::Header, &(0..shard.header.len() as u64));
        let first = shard.tensors.partition_point(|t| t.range.end <= span.start);
        for extent in &shard.tensors[first..] {
            if extent.range.start >= span.end {
                break;
            }
            add(From::Tensor(extent.tensor), &extent.range);
        }
        pieces
    }

    /// The manifest's entries, in the order of the tensors given to [`plan`].
    pub fn entries(&self, tensors: &[TensorInfo]) -> Vec<TensorEntry> {
        let mut places = vec![(0u32, 0u64); tensors.len()];
        for (file, shard) in self.shards.iter().enumerate() {
            for extent in &shard.tensors {
                places[extent.tensor] = (file as u32, extent.range.start);
            }
        }
        let entry = |(info, (file, begin)): (&TensorInfo, (u32, u64))| TensorEntry {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            chunks: vec![Chunk { file, begin, offsets: None, sizes: None }],
            object: false,
        };
        tensors.iter().zip(places).map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Dtype;
    use proptest::prelude::*;

    fn options(block_bytes: u64, shard_bytes: u64) -> Options {
        Options { rank: 0, generation: 0, block_bytes, shard_bytes }
    }

    fn tensors(sizes: &[(Dtype, u64)]) -> Vec<TensorInfo> {
        let info = |(i, &(dtype, n)): (usize, &(Dtype, u64))| TensorInfo {
            name: format!("layer.{i}"),
            dtype,
            shape: vec![n],
        };
        sizes.iter().enumerate().map(info).collect()
    }

    fn any_sizes() -> impl Strategy<Value = Vec<(Dtype, u64)>> {
        let dtype = prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C128]);
        prop::collection::vec((dtype, prop_oneof![0..9u64, 0..9000u64]), 0..40)
    }

    proptest! {
        #[test]
        fn blocks_hold_every_byte_of_every_file_once_and_in_order(
            sizes in any_sizes(),
            block in prop::sample::select(vec![4096u64, 8192, 65536]),
            shard_bytes in prop::sample::select(vec![0u64, 10_000, 100_000]),
        ) {
            let tensors = tensors(&sizes);
            let plan = plan(&tensors, options(block, shard_bytes)).unwrap();
            let mut copied = vec![0u64; tensors.len()];
            for (s, shard) in plan.shards.iter().enumerate() {
                let mut at = 0;
                for block in plan.blocks.iter().filter(|b| b.shard == s) {
                    prop_assert_eq!(block.offset, at);
                    for piece in plan.pieces(block) {
                        if let From::Tensor(t) = piece.from {
                            let extent = shard.tensors.iter().find(|e| e.tensor == t).unwrap();
                            prop_assert_eq!(extent.range.start + piece.range.start as u64, at);
                            copied[t] += piece.range.len() as u64;
                        }
                        at += piece.range.len() as u64;
                    }
                    prop_assert_eq!(at, block.offset + block.len as u64);
                }
                prop_assert_eq!(at, shard.bytes);
            }
            let all: Vec<u64> = tensors.iter().map(|t| t.nbytes().unwrap()).collect();
            prop_assert_eq!(copied, all);
        }

        #[test]
        fn every_tensor_is_aligned_to_its_dtype(sizes in any_sizes()) {
            let tensors = tensors(&sizes);
            let plan = plan(&tensors, options(4096, 0)).unwrap();
            for extent in plan.shards.iter().flat_map(|s| &s.tensors) {
                let info = &tensors[extent.tensor];
                let natural = header::natural_alignment(info.nbytes().unwrap(), info.dtype);
                prop_assert_eq!(extent.range.start % natural, 0);
            }
        }

        #[test]
        fn shards_are_valid_safetensors_files(sizes in any_sizes()) {
            let tensors = tensors(&sizes);
            let plan = plan(&tensors, options(4096, 20_000)).unwrap();
            let mut seen = 0;
            for shard in &plan.shards {
                let mut file = shard.header.clone();
                file.resize(shard.bytes as usize, 0);
                seen += safetensors::SafeTensors::deserialize(&file).unwrap().len();
            }
            prop_assert_eq!(seen, tensors.len());
        }
    }

    #[test]
    fn an_empty_state_is_one_file_with_a_header() {
        let plan = plan(&[], options(4096, 0)).unwrap();
        assert_eq!((plan.shards.len(), plan.blocks.len()), (1, 1));
        assert_eq!(plan.shards[0].bytes, 4096);
    }

    #[test]
    fn headers_stay_below_what_safetensors_reads() {
        let many: Vec<TensorInfo> = (0..1000)
            .map(|i| TensorInfo {
                name: format!("{i:08}{}", "n".repeat(20_000)),
                dtype: Dtype::U8,
                shape: vec![1],
            })
            .collect();
        let plan = plan(&many, options(4096, 0)).unwrap();
        assert!(plan.shards.len() > 1);
        assert!(plan.shards.iter().all(|s| (s.header.len() as u64) < 100_000_000));
    }

    #[test]
    fn a_name_that_stands_twice_is_named() {
        let mut two = tensors(&[(Dtype::U8, 1), (Dtype::U8, 1)]);
        two[1].name = "layer.0".into();
        let error = plan(&two, options(4096, 0)).unwrap_err();
        assert!(error.to_string().contains("layer.0"));
    }
}
