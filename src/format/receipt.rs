//! A rank's receipt of what it wrote, and how the receipts of all ranks make a checkpoint.

use super::lists;
use super::manifest::{FileEntry, TensorEntry};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// What a rank wrote: some hundred bytes per tensor and eight per checksum chunk. The trainer sends it to
/// the coordinator as bytes, by any means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Which process wrote it.
    pub rank: u32,
    /// The session that it wrote for: a text that no other session has.
    pub session: String,
    /// Identifies this write: another write of the same rank has another text, and other files.
    pub write: String,
    /// Bytes of a checksum chunk.
    pub block_bytes: u64,
    /// Its shards under their final names; they are durable under names that only this write uses.
    #[serde(deserialize_with = "lists::entries")]
    pub files: Vec<FileEntry>,
    /// The tensors in them; chunks number the files in the order of `files`.
    #[serde(deserialize_with = "lists::entries")]
    pub tensors: Vec<TensorEntry>,
    /// The parts whose tensors have files of their own: see [`StateDict::apart`](crate::StateDict::apart).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<String>,
}

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
}

impl Receipt {
    /// Distinguishes this write from any other: the CRC-32 of the names, lengths and checksums of its files,
    /// in hex, then session and write. The rank stores it beside the files.
    pub fn mark(&self) -> String {
        let mut hasher = crc32fast::Hasher::new();
        for file in &self.files {
            hasher.update(file.name.as_bytes());
            hasher.update(&file.bytes.to_le_bytes());
            file.crc32.iter().for_each(|crc32| hasher.update(&crc32.to_le_bytes()));
        }
        format!("{:08x} {} {}", hasher.finalize(), self.session, self.write)
    }

    /// Encodes it, to be sent to the coordinator.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be written as JSON, which would be a bug.
    pub fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|e| Error::invalid(format!("the receipt cannot be written: {e}")))
    }

    /// Decodes what [`Receipt::encode`] returned.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the bytes are not a receipt.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|e| {
            Error::invalid(format!("these {} bytes are not a rank's receipt: {e}", bytes.len()))
        })
    }
}

/// Merges the receipts of all ranks. A region that several ranks wrote counts once.
///
/// Does not check that the regions cover their tensors: the manifest does.
///
/// # Errors
/// [`Error::Invalid`] for two receipts of one rank, for a receipt with a chunk in a file that it does not list,
/// and for ranks that disagree on the block size, on the parts that they set apart, or on a tensor's dtype or shape.
pub fn merge(mut receipts: Vec<Receipt>) -> Result<Merged> {
    receipts.sort_by_key(|receipt| receipt.rank);
    check_ranks(&receipts)?;
    let mut merged = Merged {
        block_bytes: receipts.first().map_or(0, |receipt| receipt.block_bytes),
        files: Vec::new(),
        tensors: Vec::new(),
        apart: receipts.first().map_or_else(Vec::new, |receipt| receipt.apart.clone()),
    };
    let mut numbers: HashMap<String, (usize, u32)> = HashMap::new();
    for receipt in receipts {
        let (first_file, files) = (merged.files.len() as u32, receipt.files.len());
        merged.files.extend(receipt.files);
        for mut tensor in receipt.tensors {
            // Otherwise the number would mean another rank's file.
            if let Some(chunk) = tensor.chunks.iter().find(|chunk| chunk.file as usize >= files) {
                return Err(Error::invalid(format!(
                    "the receipt of rank {} has tensor {:?} in file number {} of {files}",
                    receipt.rank, tensor.name, chunk.file
                )));
            }
            tensor.chunks.iter_mut().for_each(|chunk| chunk.file += first_file);
            match numbers.get(&tensor.name) {
                Some(&(number, rank)) => {
                    let known = &mut merged.tensors[number];
                    check_same(known, rank, &tensor, receipt.rank)?;
                    known.chunks.append(&mut tensor.chunks);
                }
                None => {
                    numbers.insert(tensor.name.clone(), (merged.tensors.len(), receipt.rank));
                    merged.tensors.push(tensor);
                }
            }
        }
    }
    merged.tensors.iter_mut().for_each(drop_repeated);
    Ok(merged)
}

fn check_ranks(receipts: &[Receipt]) -> Result<()> {
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

fn check_same(known: &TensorEntry, rank: u32, new: &TensorEntry, its_rank: u32) -> Result<()> {
    if (known.dtype, &known.shape, known.object) == (new.dtype, &new.shape, new.object) {
        return Ok(());
    }
    let kind = |entry: &TensorEntry| match entry.object {
        true => "an object".to_owned(),
        false => format!("{} {:?}", entry.dtype, entry.shape),
    };
    Err(Error::invalid(format!(
        "tensor {:?} is {} on rank {rank} and {} on rank {its_rank}",
        known.name,
        kind(known),
        kind(new)
    )))
}

/// Keeps the first of the chunks with the same offsets and sizes: the others are replicas.
fn drop_repeated(tensor: &mut TensorEntry) {
    if tensor.chunks.len() < 2 {
        return;
    }
    if let Some(whole) = tensor.chunks.iter().position(|chunk| chunk.offsets.is_none()) {
        tensor.chunks = [tensor.chunks.swap_remove(whole)].into();
        return;
    }
    let boxes = std::mem::take(&mut tensor.chunks);
    let mut seen = HashSet::with_capacity(boxes.len());
    let first = boxes.iter().map(|chunk| seen.insert((&chunk.offsets, &chunk.sizes)));
    let first: Vec<bool> = first.collect();
    tensor.chunks =
        boxes.into_iter().zip(first).filter(|(_, first)| *first).map(|(c, _)| c).collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Chunk, Dtype};

    fn receipt(rank: u32, tensors: Vec<TensorEntry>) -> Receipt {
        let name = crate::format::names::shard(rank, 0, 0);
        let files = vec![FileEntry { name, bytes: 4096, crc32: vec![0] }];
        let (session, write, apart) = ("s".into(), "w".into(), Vec::new());
        Receipt { rank, session, write, block_bytes: 4096, files, tensors, apart }
    }

    fn tensor(name: &str, shape: &[u64], boxes: &[(u64, u64)]) -> TensorEntry {
        let chunk = |&(offset, size): &(u64, u64)| Chunk {
            file: 0,
            begin: 0,
            offsets: Some([offset].into()),
            sizes: Some([size].into()),
        };
        let chunks = boxes.iter().map(chunk).collect();
        TensorEntry {
            name: name.into(),
            dtype: Dtype::U8,
            shape: shape.into(),
            chunks,
            object: false,
        }
    }

    #[test]
    fn regions_of_all_ranks_are_merged_and_replicas_count_once() {
        let one = receipt(1, vec![tensor("w", &[4], &[(2, 2)]), tensor("r", &[1], &[(0, 1)])]);
        let zero = receipt(0, vec![tensor("w", &[4], &[(0, 2)]), tensor("r", &[1], &[(0, 1)])]);
        let merged = merge(vec![one, zero]).unwrap();
        let names: Vec<&str> = merged.files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["rank00000-0.safetensors", "rank00001-0.safetensors"]);
        let [w, r] = &merged.tensors[..] else { panic!("two tensors") };
        let places: Vec<_> =
            w.chunks.iter().map(|c| (c.file, c.offsets.as_deref().unwrap())).collect();
        assert_eq!(places, [(0, &[0][..]), (1, &[2][..])]);
        assert_eq!((r.chunks.len(), r.chunks[0].file), (1, 0));
    }

    #[test]
    fn disagreeing_ranks_are_named() {
        let of = |shape: &[u64]| vec![tensor("w", shape, &[(0, 1)])];
        let error = merge(vec![receipt(0, of(&[4])), receipt(1, of(&[5]))]).unwrap_err();
        assert!(error.to_string().contains("U8 [4] on rank 0 and U8 [5] on rank 1"), "{error}");
        let error = merge(vec![receipt(3, of(&[4])), receipt(3, of(&[4]))]).unwrap_err();
        assert!(error.to_string().contains("rank 3"), "{error}");
        let other = Receipt { block_bytes: 8192, ..receipt(1, Vec::new()) };
        let error = merge(vec![receipt(0, Vec::new()), other]).unwrap_err();
        assert!(error.to_string().contains("block_bytes"), "{error}");
        let other = Receipt { apart: vec!["opt".into()], ..receipt(1, Vec::new()) };
        let error = merge(vec![receipt(0, Vec::new()), other]).unwrap_err();
        assert!(error.to_string().contains("rank 0 set [] apart, rank 1 [\"opt\"]"), "{error}");
    }

    #[test]
    fn chunk_in_a_file_that_the_receipt_does_not_list_is_refused() {
        for file in [1, u32::MAX] {
            let mut astray = tensor("w", &[4], &[(0, 4)]);
            astray.chunks[0].file = file;
            let receipts = vec![receipt(0, vec![astray.clone()]), receipt(1, Vec::new())];
            let error = merge(receipts).unwrap_err().to_string();
            assert!(error.contains("rank 0") && error.contains(&file.to_string()), "{error}");
            assert!(merge(vec![receipt(0, Vec::new()), receipt(1, vec![astray])]).is_err());
        }
    }

    #[test]
    fn receipt_round_trips() {
        let sent = receipt(2, vec![tensor("w", &[4], &[(0, 4)])]);
        assert_eq!(Receipt::decode(&sent.encode().unwrap()).unwrap(), sent);
        assert!(Receipt::decode(b"{}").is_err());
    }
}
