//! The tensors of another program's files, put together from their headers.

use super::header::{Contents, read_header};
use super::{LISTED_MAX, listed_missing, uncommitted};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::model_index::ModelIndex;
use crate::format::safetensors_header::Sharding;
use crate::format::{Chunk, FileEntry, Manifest, Shape, TensorEntry};
use crate::pipeline::load::ShardFile;
use crate::store::read::index::NameIndex;
use serde_json::value::RawValue;
use smallvec::smallvec;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What the files read so far say about the checkpoint.
pub(super) struct Assembly<'a> {
    /// The index, and its file's name.
    index: Option<(&'a str, ModelIndex<'a>)>,
    files: Vec<FileEntry>,
    shards: Vec<ShardFile>,
    tensors: Vec<TensorEntry>,
    by_name: NameIndex,
    /// Complete tensors that the index lists in another file than this one.
    elsewhere: Vec<TensorEntry>,
}

impl<'a> Assembly<'a> {
    /// One file.
    pub fn of_file(path: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
        let mut found = Self::new(None);
        found.add(
            path.file_name().unwrap_or_default().to_string_lossy().into(),
            read_header(path)?,
        )?;
        found.finish(path)
    }

    /// Files of a directory, which `index` lists or which are all that there are.
    pub fn of_files(
        dir: &Path,
        names: Vec<String>,
        index: Option<(&'a str, ModelIndex<'a>)>,
    ) -> Result<(Manifest, Vec<ShardFile>)> {
        let mut found = Self::new(index);
        for name in names {
            let contents = read_header(&dir.join(&name))?;
            if contents.header.is_own {
                return Err(uncommitted(dir, &name));
            }
            found.add(name, contents)?;
        }
        found.finish(dir)
    }

    fn new(index: Option<(&'a str, ModelIndex<'a>)>) -> Self {
        let by_name = NameIndex::new(std::iter::empty());
        let (files, shards, tensors, elsewhere) = Default::default();
        Self { index, files, shards, tensors, by_name, elsewhere }
    }

    fn add(&mut self, name: String, contents: Contents) -> Result<()> {
        let Contents { path, header, data, bytes } = contents;
        let sharding = header.sharding.as_deref().map(Sharding::read).transpose();
        let sharding = sharding
            .map_err(|e| Error::format(&path, format!("its DCP_SHARDING_INFO: {e}")))?
            .unwrap_or_default();
        let wrong = |reason| Error::format(&path, reason);
        if self.files.is_empty() && self.index.is_none() && header.sharding.is_none() {
            self.take_whole(header.tensors, data).map_err(wrong)?;
            self.note_file(name, path, bytes);
            return Ok(());
        }
        self.tensors.reserve_exact(header.tensors.len());
        for mut tensor in header.tensors {
            let offsets = sharding.offsets(&tensor.name);
            let listed = self.index.as_ref().and_then(|(_, index)| index.file_of(&tensor.name));
            // A complete tensor that the index lists in another file is a copy.
            if offsets.is_none() && listed.is_some_and(|file| file != name) {
                let begin = data + tensor.chunks[0].begin;
                tensor.chunks = smallvec![Chunk::whole(self.files.len() as u32, begin)];
                self.elsewhere.push(tensor);
                continue;
            }
            self.add_chunk(tensor, data, offsets).map_err(wrong)?;
        }
        self.note_file(name, path, bytes);
        Ok(())
    }

    fn note_file(&mut self, name: String, path: PathBuf, bytes: u64) {
        let (other_path, crc32) = (path.clone(), Vec::new());
        self.shards.push(ShardFile { path, other_path, bytes, crc32 });
        self.files.push(FileEntry { name, bytes, crc32: Vec::new(), hashes: Vec::new() });
    }

    /// Takes the first file's list of tensors, all of them whole: another list would take the memory again.
    fn take_whole(
        &mut self,
        mut tensors: Vec<TensorEntry>,
        data: u64,
    ) -> std::result::Result<(), String> {
        for number in 0..tensors.len() {
            let begin = data + tensors[number].chunks[0].begin;
            tensors[number].chunks = smallvec![Chunk::whole(0, begin)];
            let name = tensors[number].name.as_str();
            if self.by_name.find(name, |known| &tensors[known].name).is_some() {
                return Err(format!("tensor {name:?} is listed twice"));
            }
            self.by_name.insert(number, name, |known| &tensors[known].name);
        }
        self.tensors = tensors;
        Ok(())
    }

    /// Adds a tensor of the current file as a chunk, and grows the tensor's shape to hold it.
    fn add_chunk(
        &mut self,
        mut found: TensorEntry,
        data: u64,
        offsets: Option<&[u64]>,
    ) -> std::result::Result<(), String> {
        let file = self.files.len() as u32;
        let TensorEntry { name, dtype, shape, chunks, .. } = &mut found;
        let begin = data + chunks[0].begin;
        let known = self.number_of(name);
        let mut chunk = Chunk::whole(file, begin);
        if let Some(offsets) = offsets {
            let fits = offsets.len() == shape.len();
            let ends: Option<Shape> =
                offsets.iter().zip(&*shape).map(|(o, s)| o.checked_add(*s)).collect();
            let Some(ends) = ends.filter(|_| fits) else {
                return Err(format!("tensor {name:?} of {shape:?} cannot begin at {offsets:?}"));
            };
            chunk = Chunk::region(file, begin, (offsets, shape));
            *shape = ends;
        }
        let Some(number) = known else {
            *chunks = smallvec![chunk];
            self.push(found);
            return Ok(());
        };
        let tensor = &mut self.tensors[number];
        if (tensor.dtype, tensor.shape.len()) != (*dtype, shape.len()) {
            return Err(format!(
                "tensor {name:?} is {dtype} of {} dimensions here, and {} of {} in another file",
                shape.len(),
                tensor.dtype,
                tensor.shape.len()
            ));
        }
        if tensor.chunks.last().is_some_and(|last| last.file == file) {
            return Err(format!("tensor {name:?} is listed twice"));
        }
        with_region(&mut tensor.chunks[0], &tensor.shape);
        with_region(&mut chunk, shape);
        tensor.chunks.push(chunk);
        for (size, end) in tensor.shape.iter_mut().zip(&*shape) {
            *size = (*end).max(*size);
        }
        Ok(())
    }

    fn number_of(&self, name: &str) -> Option<usize> {
        self.by_name.find(name, |number| &self.tensors[number].name)
    }

    /// An index of an earlier save lists tensors in files that do not have them. Then its places do not count: as for
    /// programs that read all listed files, one after the other, the last copy of a tensor does.
    fn heed_index(&mut self, dir: &Path) -> Result<()> {
        let Some((name, index)) = &self.index else { return Ok(()) };
        let lacks = |name: &str| self.number_of(name).is_none();
        let copies: BTreeSet<&str> = self.elsewhere.iter().map(|copy| &*copy.name).collect();
        let lacking = || index.tensors().map(|(name, _)| name).filter(|name| lacks(name));
        let missing: Vec<String> = lacking()
            .filter(|name| !copies.contains(name))
            .take(LISTED_MAX)
            .map(str::to_owned)
            .collect();
        if !missing.is_empty() {
            return Err(listed_missing(dir, name, "tensor(s)", &missing, ""));
        }
        if lacking().next().is_none() {
            return Ok(());
        }
        for copy in std::mem::take(&mut self.elsewhere) {
            match self.number_of(&copy.name) {
                Some(number) => {
                    let known = &mut self.tensors[number];
                    if known.chunks[0].file < copy.chunks[0].file {
                        *known = copy;
                    }
                }
                None => self.push(copy),
            }
        }
        Ok(())
    }

    fn push(&mut self, tensor: TensorEntry) {
        self.by_name.insert(self.tensors.len(), &tensor.name, |number| &self.tensors[number].name);
        self.tensors.push(tensor);
    }

    fn finish(mut self, path: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
        self.heed_index(path)?;
        for tensor in &mut self.tensors {
            check_coverage(path, tensor)?;
            if let [chunk] = tensor.chunks.as_mut_slice() {
                *chunk = Chunk::whole(chunk.file, chunk.begin);
            }
        }
        let state = RawValue::from_string("{}".into()).expect("an empty object is JSON");
        let block_bytes = Config::default().block_bytes;
        let mut manifest = Manifest::new(0, 1, block_bytes, self.files, self.tensors, state);
        manifest.format = "safetensors".into();
        Ok((manifest, self.shards))
    }
}

/// Notes the region of a chunk that is a tensor of this shape.
fn with_region(chunk: &mut Chunk, shape: &[u64]) {
    if chunk.extent().is_none() {
        *chunk = Chunk::region(chunk.file, chunk.begin, (&vec![0; shape.len()], shape));
    }
}

/// Checks that a tensor's chunks cover it.
fn check_coverage(path: &Path, tensor: &TensorEntry) -> Result<()> {
    let TensorEntry { name, shape, .. } = tensor;
    let whole = tensor.dtype.nbytes(shape).ok_or_else(|| {
        Error::format(path, format!("tensor {name:?}: shape {shape:?} overflows"))
    })?;
    if tensor.is_tiled() {
        return Ok(());
    }
    let held = tensor.held_bytes();
    if held >= whole {
        let reason = format!("tensor {name:?} of {shape:?}: its chunks overlap each other");
        return Err(Error::format(path, reason));
    }
    let hole = tensor.holes().first().map_or(String::new(), |(offsets, sizes)| {
        format!(", {sizes:?} at {offsets:?} among what is missing")
    });
    let reason = format!(
        "tensor {name:?} of {shape:?} has {held} of {whole} bytes{hole}; a file is missing: download it again"
    );
    Err(Error::MissingFiles { path: path.into(), reason })
}
