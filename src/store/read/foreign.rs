//! Directories of safetensors files that another program wrote. Reads only their headers.
//!
//! PyTorch's `HuggingFaceStorageWriter` notes in each file which regions of the tensors it holds
//! (`DCP_SHARDING_INFO`). Files without that note hold complete tensors.

use crate::config::Config;
use crate::error::{Error, Result, some_of};
use crate::format::model_index::ModelIndex;
use crate::format::names::MODEL_INDEX as INDEX;
use crate::format::safetensors_header::{Header, Sharding};
use crate::format::{Chunk, FileEntry, Manifest, Shape, TensorEntry, names};
use crate::pipeline::load::ShardFile;
use crate::store::read::diagnose::{no_commit, no_manifest};
use crate::store::read::index::NameIndex;
use crate::sys::dir::{self, file_names};
use crate::sys::file;
use serde_json::value::RawValue;
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the largest header that the safetensors format allows. A list of tensors and files is never larger.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Reads the headers of the files in a directory without a manifest.
pub(in crate::store) fn read(dir: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
    let present = file_names(dir)?;
    if present.iter().any(|name| names::is_uncommitted(name)) {
        return Err(no_manifest(dir));
    }
    if let Some(shard) = present.iter().find(|name| names::is_shard(name)) {
        return Err(uncommitted(dir, shard));
    }
    let text = match present.iter().any(|name| name == INDEX) {
        true => Some(read_text(dir)?),
        false => None,
    };
    let read_index = |text| {
        ModelIndex::read(text).map_err(|why| {
            Error::format(
                dir.join(INDEX),
                format!("is not a list of tensors and their files: {why}"),
            )
        })
    };
    let index = text.as_deref().map(read_index).transpose()?;
    let names = match &index {
        Some(index) => listed_files(dir, index, &present)?,
        None => unlisted_files(dir, present)?,
    };
    if names.is_empty() {
        return Err(no_manifest(dir));
    }
    let mut found = Assembly::new(index);
    for name in names {
        found.add_file(dir, name)?;
    }
    found.finish(dir)
}

fn uncommitted(dir: &Path, shard: &str) -> Error {
    Error::NotCommitted { path: dir.into(), reason: no_commit(shard) }
}

/// The text of the index.
fn read_text(dir: &Path) -> Result<Vec<u8>> {
    let path = resolve(dir, INDEX)?;
    let (mut file, bytes) = open(&path)?;
    if bytes > HEADER_BYTES_MAX {
        return Err(Error::format(
            path,
            format!("has {bytes} bytes: too large for a list of tensors"),
        ));
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|e| Error::io("reading", &path, e))?;
    Ok(text)
}

/// The files that an index lists. Other files do not belong to the checkpoint.
fn listed_files(dir: &Path, index: &ModelIndex, present: &[String]) -> Result<Vec<String>> {
    let present: BTreeSet<&str> = present.iter().map(String::as_str).collect();
    let (mut listed, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for (_, file) in index.tensors() {
        if present.contains(file) {
            listed.insert(file);
        } else if missing.len() < LISTED_MAX {
            missing.insert(file);
        }
    }
    let owned = |names: BTreeSet<&str>| names.into_iter().map(str::to_owned).collect::<Vec<_>>();
    match missing.is_empty() {
        true => Ok(owned(listed)),
        false => Err(unlisted(dir, "file(s)", &owned(missing))),
    }
}

/// The files of a directory without an index, if no file of a numbered set is missing.
fn unlisted_files(dir: &Path, present: Vec<String>) -> Result<Vec<String>> {
    if let Some(part) = present.iter().find(|name| names::is_uncommitted_model(name)) {
        let reason = format!(
            "{part} belongs to an unfinished export or download; wait for it, or repeat it if it was killed"
        );
        return Err(Error::NotCommitted { path: dir.into(), reason });
    }
    let files = safetensors_files(dir, present)?;
    let missing = missing_numbers(&files);
    match missing.is_empty() {
        true => Ok(files),
        false => {
            let (n, some) = (missing.len(), some_of(&missing));
            let reason =
                format!("{n} file(s) of a numbered set are missing: {some}; download them again");
            Err(Error::MissingFiles { path: dir.into(), reason })
        }
    }
}

/// The files that are missing from sets such as `model-00001-of-00003.safetensors`.
fn missing_numbers(files: &[String]) -> Vec<String> {
    /// Most missing files of a set that are listed.
    const LISTED_MAX: usize = 100;
    let mut sets: BTreeMap<(&str, usize), BTreeSet<usize>> = BTreeMap::new();
    for (stem, index, count) in files.iter().filter_map(|name| names::numbered(name)) {
        sets.entry((stem, count)).or_default().insert(index);
    }
    let mut missing = Vec::new();
    for ((stem, count), there) in sets {
        // The file name claims the count, so it may be huge.
        let few = (1..=count).filter(|index| !there.contains(index)).take(LISTED_MAX);
        missing.extend(few.map(|index| format!("{stem}-{index:05}-of-{count:05}.safetensors")));
    }
    missing
}

/// All files named like safetensors files, except hidden ones.
fn safetensors_files(dir: &Path, mut present: Vec<String>) -> Result<Vec<String>> {
    present.retain(|name| name.ends_with(".safetensors") && !name.starts_with('.'));
    match present.iter().find(|name| !names::is_confined(name)) {
        Some(bad) => Err(Error::format(dir.join(bad), "has a refused name: rename it")),
        None => Ok(present),
    }
}

/// Most missing files and tensors that are counted: an index claims as many as it likes.
const LISTED_MAX: usize = 1000;

fn unlisted(dir: &Path, what: &str, missing: &[String]) -> Error {
    let (n, some) = (missing.len(), some_of(missing));
    let or_more = if n == LISTED_MAX { " or more" } else { "" };
    let reason =
        format!("{n}{or_more} {what} that {INDEX} lists are missing: {some}; download them again");
    Error::MissingFiles { path: dir.into(), reason }
}

/// The real path of a file. Follows links, since the hub's cache consists of links.
fn resolve(dir: &Path, name: &str) -> Result<PathBuf> {
    dir::real(&dir.join(name))
}

/// Opens a regular file, and returns it with its length in bytes.
fn open(path: &Path) -> Result<(File, u64)> {
    let opened = file::open_read(path, false).and_then(|file| {
        let bytes = file::look(&file)?.len();
        Ok((file, bytes))
    });
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Error::format(path, "is not a regular file"),
        _ => Error::io("opening", path, error),
    })
}

/// Reads a header, and checks that the file's length matches it. Returns where the data section begins, and the file's
/// length, too.
fn read_header(path: &Path) -> Result<(Header, u64, u64)> {
    let (mut file, bytes) = open(path)?;
    let failed = |e| Error::io("reading", path, e);
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(Error::format(
            path,
            format!("has {bytes} bytes: too short for a safetensors file"),
        ));
    }
    file.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length > bytes - 8 {
        let reason = format!(
            "is not a safetensors file, or is truncated: its header should have {length} bytes, the file has {bytes}"
        );
        return Err(Error::format(path, reason));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(failed)?;
    let header = Header::read(&text)
        .map_err(|why| Error::format(path, format!("has no valid safetensors header: {why}")))?;
    let data = 8 + length;
    let expected = data.saturating_add(header.data_bytes);
    if expected != bytes {
        let (at, expected, got) = (expected.min(bytes), expected.to_string(), bytes.to_string());
        return Err(Error::corrupt(path, at, "length in bytes", expected, got));
    }
    Ok((header, data, bytes))
}

/// What the files read so far say about the checkpoint.
struct Assembly<'a> {
    index: Option<ModelIndex<'a>>,
    files: Vec<FileEntry>,
    shards: Vec<ShardFile>,
    tensors: Vec<TensorEntry>,
    by_name: NameIndex,
}

impl<'a> Assembly<'a> {
    fn new(index: Option<ModelIndex<'a>>) -> Self {
        let by_name = NameIndex::new(std::iter::empty());
        Self { index, files: Vec::new(), shards: Vec::new(), tensors: Vec::new(), by_name }
    }

    fn add_file(&mut self, dir: &Path, name: String) -> Result<()> {
        let path = resolve(dir, &name)?;
        let (header, data, bytes) = read_header(&path)?;
        if header.is_own {
            return Err(uncommitted(dir, &name));
        }
        let sharding = header.sharding.as_deref().map(Sharding::read).transpose();
        let sharding = sharding
            .map_err(|e| Error::format(&path, format!("its DCP_SHARDING_INFO: {e}")))?
            .unwrap_or_default();
        self.tensors.reserve_exact(header.tensors.len());
        for tensor in header.tensors {
            let offsets = sharding.offsets(&tensor.name);
            // If the index lists a complete tensor in another file, this one is a copy.
            let elsewhere =
                |index: &ModelIndex| index.file_of(&tensor.name).is_some_and(|file| file != name);
            if offsets.is_none() && self.index.as_ref().is_some_and(elsewhere) {
                continue;
            }
            self.add_chunk(tensor, data, offsets).map_err(|reason| Error::format(&path, reason))?;
        }
        let (other_path, crc32) = (path.clone(), Vec::new());
        self.shards.push(ShardFile { path, other_path, bytes, crc32 });
        self.files.push(FileEntry { name, bytes, crc32: Vec::new(), hashes: Vec::new() });
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
        let known = self.by_name.find(name, |number| &self.tensors[number].name);
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
            self.by_name
                .insert(self.tensors.len(), &found.name, |number| &self.tensors[number].name);
            self.tensors.push(found);
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

    fn finish(mut self, dir: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
        if let Some(index) = &self.index {
            let there = |name: &str| self.by_name.find(name, |n| &self.tensors[n].name).is_some();
            let names = index.tensors().map(|(name, _)| name);
            let missing: Vec<String> =
                names.filter(|name| !there(name)).take(LISTED_MAX).map(str::to_owned).collect();
            if !missing.is_empty() {
                return Err(unlisted(dir, "tensor(s)", &missing));
            }
        }
        for tensor in &mut self.tensors {
            check_coverage(dir, tensor)?;
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
fn check_coverage(dir: &Path, tensor: &TensorEntry) -> Result<()> {
    let TensorEntry { name, shape, .. } = tensor;
    let whole = tensor
        .dtype
        .nbytes(shape)
        .ok_or_else(|| Error::format(dir, format!("tensor {name:?}: shape {shape:?} overflows")))?;
    if tensor.is_tiled() {
        return Ok(());
    }
    let held = tensor.held_bytes();
    if held >= whole {
        let reason = format!("tensor {name:?} of {shape:?}: its chunks overlap each other");
        return Err(Error::format(dir, reason));
    }
    let hole = tensor.holes().first().map_or(String::new(), |(offsets, sizes)| {
        format!(", {sizes:?} at {offsets:?} among what is missing")
    });
    let reason = format!(
        "tensor {name:?} of {shape:?} has {held} of {whole} bytes{hole}; a file is missing: download it again"
    );
    Err(Error::MissingFiles { path: dir.into(), reason })
}
