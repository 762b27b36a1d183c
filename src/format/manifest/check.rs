//! Checks what every reader of a manifest relies on.

use super::{Chunk, FileEntry, Manifest, RankShare, TensorEntry};
use crate::format::lists::{Entry, LongDims};
use crate::format::{Dtype, content_hash, metrics, names};
use crate::limits::ALIGN;
use std::collections::HashSet;

/// Bytes of a file that a chunk holds.
#[derive(Clone, Default)]
struct Held {
    file: u32,
    /// Its tensor's number.
    tensor: u32,
    begin: u64,
    end: u64,
}

impl<T, S> Manifest<T, S> {
    /// Checks the list of files: unique names that stay in the directory, and a checksum for each checksum chunk.
    pub(super) fn check_files(&self) -> std::result::Result<(), String> {
        if !self.block_bytes.is_multiple_of(ALIGN as u64)
            || !(ALIGN as u64..=1 << 30).contains(&self.block_bytes)
        {
            return Err(format!("block_bytes is {}, not a multiple of 4096", self.block_bytes));
        }
        self.part_of.as_ref().map_or(Ok(()), RankShare::check)?;
        metrics::check(&self.metrics)?;
        self.check_nodes()?;
        let mut names = HashSet::new();
        for file in &self.files {
            self.check_file(file)?;
            if !names.insert(&file.name) {
                return Err(format!("two files are named {:?}", file.name));
            }
        }
        Ok(())
    }

    fn check_file(&self, file: &FileEntry) -> std::result::Result<(), String> {
        if !names::is_confined(&file.name) {
            return Err(format!(
                "file name {:?} is refused: a shard is a plain *.safetensors name in the checkpoint's own directory",
                file.name
            ));
        }
        let blocks = file.bytes.div_ceil(self.block_bytes);
        if file.crc32.len() as u64 != blocks {
            return Err(format!(
                "{:?} has {} blocks but {} checksums",
                file.name,
                blocks,
                file.crc32.len()
            ));
        }
        content_hash::check(&file.hashes, file.bytes)
            .map_err(|why| format!("{:?}: its {why}", file.name))
    }
}

impl Manifest {
    /// Checks all that readers rely on: names that stay in the directory, sizes that do not overflow, chunks that lie
    /// in their files and do not overlap. Chunks must cover their tensors, except in a [rank's share](RankShare).
    ///
    /// # Errors
    /// What is wrong, as a sentence.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.check_files()?;
        let mut names = HashSet::with_capacity(self.tensors.len());
        let mut long = LongDims::default();
        for tensor in &self.tensors {
            tensor.count_dims(&mut long)?; // of a manifest that was not read from a text
            if !names.insert(&tensor.name) {
                return Err(format!("two tensors are named {:?}", tensor.name));
            }
            self.check_tensor(tensor)?;
        }
        drop(names);
        self.check_disjoint()
    }

    /// Checks that no two chunks, all in files that exist, share a byte of a file.
    fn check_disjoint(&self) -> std::result::Result<(), String> {
        for of_file in self.held().chunk_by_mut(|one, other| one.file == other.file) {
            of_file.sort_unstable_by_key(|held| held.begin);
            if let Some(w) = of_file.windows(2).find(|w| w[0].end > w[1].begin) {
                return Err(format!(
                    "tensors {:?} and {:?} overlap at offset {} of {:?}",
                    self.tensors[w[0].tensor as usize].name,
                    self.tensors[w[1].tensor as usize].name,
                    w[1].begin,
                    self.files[w[0].file as usize].name
                ));
            }
        }
        Ok(())
    }

    /// What the chunks that are not empty hold, sorted by file, in linear time: most tensors have a chunk in each of
    /// thousands of files.
    fn held(&self) -> Vec<Held> {
        let each = || {
            (0..).zip(&self.tensors).flat_map(|(number, tensor)| {
                tensor.chunks.iter().filter_map(move |chunk| {
                    let bytes = tensor.chunk_bytes(chunk).filter(|&bytes| bytes > 0)?;
                    let Chunk { file, begin, .. } = *chunk;
                    Some(Held { file, tensor: number, begin, end: begin + bytes })
                })
            })
        };
        let mut next = vec![0; self.files.len() + 1];
        each().for_each(|held| next[held.file as usize + 1] += 1);
        (0..self.files.len()).for_each(|file| next[file + 1] += next[file]);
        let mut sorted = vec![Held::default(); next[self.files.len()]];
        for held in each() {
            let next = &mut next[held.file as usize];
            *next += 1;
            sorted[*next - 1] = held;
        }
        sorted
    }

    fn check_tensor(&self, tensor: &TensorEntry) -> std::result::Result<(), String> {
        let name = &tensor.name;
        let whole = tensor.dtype.nbytes(&tensor.shape).ok_or_else(|| {
            format!("tensor {name:?}: shape {:?} of {} overflows", tensor.shape, tensor.dtype)
        })?;
        let mut held = 0u64;
        for chunk in &tensor.chunks {
            if chunk.extent().is_none() && tensor.chunks.len() > 1 {
                return Err(format!(
                    "tensor {name:?}: it has several chunks, and one is the whole"
                ));
            }
            let bytes = tensor
                .chunk_bytes(chunk)
                .ok_or_else(|| format!("tensor {name:?}: a chunk reaches outside of its shape"))?;
            let file = self.files.get(chunk.file as usize).ok_or_else(|| {
                format!("tensor {name:?}: there is no file number {}", chunk.file)
            })?;
            if chunk.begin.checked_add(bytes).is_none_or(|end| end > file.bytes) {
                return Err(format!(
                    "tensor {name:?}: {bytes} bytes at offset {} do not fit in {:?} of {} bytes",
                    chunk.begin, file.name, file.bytes
                ));
            }
            held = held.saturating_add(bytes);
        }
        if tensor.object && (tensor.dtype, tensor.shape.len()) != (Dtype::U8, 1) {
            return Err(format!("{name:?} is an object, but not a byte string"));
        }
        self.check_cover(tensor, held, whole)
    }

    /// Checks that chunks which hold `held` of the `whole` bytes cover their tensor, each element once. In a rank's
    /// share, checks only that they hold no element twice.
    fn check_cover(
        &self,
        tensor: &TensorEntry,
        held: u64,
        whole: u64,
    ) -> std::result::Result<(), String> {
        let name = &tensor.name;
        // If only one rank saved, no other checkpoint has the rest.
        let may_lack = !tensor.object && self.part_of.as_ref().is_some_and(|of| of.ranks > 1);
        if tensor.chunks.is_empty() || held > whole || (held < whole && !may_lack) {
            return Err(format!("tensor {name:?}: its chunks hold {held} of {whole} bytes"));
        }
        match tensor.is_disjoint(held == whole) {
            Ok(true) => Ok(()),
            // If the bytes add up, there is a hole for each element that is held twice.
            Ok(false) => Err(format!("tensor {name:?}: its chunks overlap each other")),
            Err(why) => Err(format!("tensor {name:?}: its {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decode, sample};
    use super::*;
    use crate::error::Error;
    use smallvec::smallvec;

    /// The reason why a changed manifest is refused.
    fn refused(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = sample();
        change(&mut manifest);
        match decode(&manifest) {
            Err(Error::Format { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// What tests/suite/hostile_manifest.rs does not have: it changes names, ranges and shapes in the text.
    #[test]
    fn impossible_manifests_are_refused_with_the_reason() {
        fn share_of(rank: u32, ranks: u32) -> Option<RankShare> {
            Some(RankShare { rank, ranks, save: "a".into() })
        }
        type Change = fn(&mut Manifest);
        let cases: [(&str, Change); 8] = [
            ("two files", |m| m.files[1].name = m.files[0].name.clone()),
            ("0 of 80 bytes", |m| m.tensors[1].chunks.clear()),
            ("checksums", |m| m.files[0].crc32.clear()),
            ("block_bytes", |m| m.block_bytes = 0),
            ("not a byte string", |m| m.tensors[1].object = true),
            ("rank 2 of 2", |m| m.part_of = share_of(2, 2)),
            ("rank 0 of 0", |m| m.part_of = share_of(0, 0)),
            ("more than", |m| m.part_of = share_of(0, u32::MAX)),
        ];
        for (reason, change) in cases {
            assert!(refused(change).contains(reason), "{reason}");
        }
    }

    #[test]
    fn chunks_must_lie_in_their_tensor_and_cover_it() {
        let region = |offsets: &[u64], sizes: &[u64]| Chunk::region(0, 4096, (offsets, sizes));
        let refused_chunk = |chunk: Chunk| refused(|m| m.tensors[0].chunks = smallvec![chunk]);
        assert!(refused_chunk(region(&[5, 0], &[6, 20])).contains("outside"));
        assert!(refused_chunk(region(&[u64::MAX, 0], &[2, 20])).contains("outside"));
        assert!(refused_chunk(region(&[0], &[10])).contains("outside"));
        assert!(refused_chunk(region(&[0, 0], &[5, 20])).contains("400 of 800"));
        let twice =
            smallvec![region(&[0, 0], &[5, 20]), Chunk::region(0, 8192, (&[4, 0], &[5, 20]))];
        assert!(refused(|m| m.tensors[0].chunks = twice).contains("overlap each other"));
    }

    /// The sample as the share of rank 1 of 2. Its first tensor, of [10, 20], has these regions: first row, rows, first
    /// column, columns.
    fn share(regions: &[[u64; 4]]) -> Manifest {
        let mut manifest = sample();
        manifest.part_of = Some(RankShare { rank: 1, ranks: 2, save: "a".into() });
        let mut begin = 5000;
        let chunk = |&[row, rows, column, columns]: &[u64; 4]| {
            begin += 800;
            Chunk::region(0, begin, (&[row, column], &[rows, columns]))
        };
        manifest.tensors[0].chunks = regions.iter().map(chunk).collect();
        manifest
    }

    #[test]
    fn only_a_share_of_several_may_lack_regions() {
        for (regions, held, holes) in [
            (&[[5, 5, 0, 20]][..], 400, &[[0, 5, 0, 20]][..]),
            (&[[10, 0, 0, 20]], 0, &[[0, 10, 0, 20]]),
            (&[[0, 0, 0, 20], [2, 8, 0, 20]], 640, &[[0, 2, 0, 20]]),
            (&[[0, 5, 10, 10], [5, 5, 0, 10]], 400, &[[0, 5, 0, 10], [5, 5, 10, 10]]),
            (&[[0, 10, 0, 20]], 800, &[]),
        ] {
            let mut manifest = share(regions);
            let read = decode(&manifest).unwrap();
            assert_eq!(read.tensors[0].held_bytes(), held);
            let holes: Vec<(Vec<u64>, Vec<u64>)> =
                holes.iter().map(|[r, rs, c, cs]| (vec![*r, *c], vec![*rs, *cs])).collect();
            assert_eq!(read.tensors[0].holes(), holes);
            for part_of in [None, Some(RankShare { rank: 0, ranks: 1, save: "a".into() })] {
                manifest.part_of = part_of;
                match decode(&manifest) {
                    Ok(_) => assert_eq!(held, 800),
                    Err(error) => assert!(error.to_string().contains("of 800 bytes"), "{error}"),
                }
            }
        }
    }

    #[test]
    fn share_holds_no_element_twice_and_its_objects_are_complete() {
        let refused = |manifest: &Manifest| decode(manifest).unwrap_err().to_string();
        let twice = share(&[[0, 2, 0, 20], [1, 2, 0, 20]]);
        assert!(refused(&twice).contains("overlap each other"));
        assert!(refused(&share(&[[0, 10, 0, 20], [1, 0, 0, 20], [1, 1, 0, 1]])).contains("804 of"));
        assert!(refused(&share(&[[5, 6, 0, 20]])).contains("outside"));
        assert!(refused(&share(&[])).contains("0 of 800"));
        let mut object = share(&[[5, 5, 0, 20]]);
        let entry = &mut object.tensors[0];
        (entry.dtype, entry.shape, entry.object) = (Dtype::U8, smallvec![20], true);
        entry.chunks[0] = Chunk::region(0, entry.chunks[0].begin, (&[5], &[5]));
        assert!(refused(&object).contains("5 of 20 bytes"));
        // Too many regions that cross each other.
        let mut crossed = share(&[]);
        crossed.files[0].bytes = 1 << 30;
        crossed.files[0].crc32 = vec![0; 1 << 17];
        let entry = &mut crossed.tensors[0];
        entry.shape = smallvec![4000, 4000];
        entry.chunks = (0..2000u64)
            .map(|i| {
                let (begin, row) = (8192 + i * 16000, i % 2 == 0);
                let offsets = if row { [i, 0] } else { [0, i] };
                let sizes = if row { [1, 4000] } else { [4000, 1] };
                Chunk::region(0, begin, (&offsets, &sizes))
            })
            .collect();
        assert!(refused(&crossed).contains("more than can be checked"));
    }
}
