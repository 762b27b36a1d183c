//! Directories of safetensors files that another program wrote. Reads only their headers.
//!
//! PyTorch's `HuggingFaceStorageWriter` notes in each file which regions of the tensors it holds
//! (`DCP_SHARDING_INFO`). Files without that note hold complete tensors.

use crate::config::Config;
use crate::error::{Error, Result, some_of};
use crate::format::cover;
use crate::format::cover::Extent;
use crate::format::names::MODEL_INDEX as INDEX;
use crate::format::{Chunk, Dtype, FileEntry, Manifest, TensorEntry, names};
use crate::pipeline::load::ShardFile;
use crate::store::read::diagnose::{no_commit, no_manifest};
use crate::sys::dir::{self, file_names};
use crate::sys::file;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde_json::value::RawValue;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the largest header that the safetensors format allows. A list of tensors and files is never larger.
const HEADER_BYTES_MAX: u64 = 100_000_000;

#[derive(Deserialize)]
struct WeightMap {
    /// The file of each tensor.
    weight_map: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

/// Reads the headers of the files in a directory without a manifest.
pub(in crate::store) fn read(dir: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
    let present = file_names(dir)?;
    if present.iter().any(|name| names::is_uncommitted(name)) {
        return Err(no_manifest(dir));
    }
    if let Some(shard) = present.iter().find(|name| names::is_shard(name)) {
        return Err(uncommitted(dir, shard));
    }
    let index = match present.iter().any(|name| name == INDEX) {
        true => Some(read_index(dir)?),
        false => None,
    };
    let names = match &index {
        Some(index) => listed_files(dir, index, &present)?,
        None => unlisted_files(dir, present)?,
    };
    if names.is_empty() {
        return Err(no_manifest(dir));
    }
    let mut found = Assembly { index, ..Assembly::default() };
    for name in names {
        found.add_file(dir, name)?;
    }
    found.finish(dir)
}

fn uncommitted(dir: &Path, shard: &str) -> Error {
    Error::NotCommitted { path: dir.into(), reason: no_commit(shard) }
}

fn read_index(dir: &Path) -> Result<WeightMap> {
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
    serde_json::from_slice(&text)
        .map_err(|e| Error::format(path, format!("is not a list of tensors and their files: {e}")))
}

/// The files that an index lists. Other files do not belong to the checkpoint.
fn listed_files(dir: &Path, index: &WeightMap, present: &[String]) -> Result<Vec<String>> {
    let listed: BTreeSet<&String> = index.weight_map.values().collect();
    if let Some(bad) = listed.iter().find(|name| !names::is_confined(name)) {
        let reason = format!(
            "refused file name {bad:?}: it must be a plain *.safetensors name in the directory itself"
        );
        return Err(Error::format(dir.join(INDEX), reason));
    }
    let missing: Vec<String> =
        listed.iter().filter(|name| !present.contains(name)).map(|name| (*name).clone()).collect();
    match missing.is_empty() {
        true => Ok(listed.into_iter().cloned().collect()),
        false => Err(unlisted(dir, "file(s)", &missing)),
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

fn unlisted(dir: &Path, what: &str, missing: &[String]) -> Error {
    let (n, some) = (missing.len(), some_of(missing));
    let reason = format!("{n} {what} that {INDEX} lists are missing: {some}; download them again");
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

/// A safetensors file's header.
struct Header {
    metadata: Metadata,
    /// Byte offset of the data section.
    data: u64,
    /// The file's length.
    bytes: u64,
}

/// Reads a header, and checks that the file's length matches it.
fn read_header(path: &Path) -> Result<Header> {
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
    let metadata: Metadata = serde_json::from_slice(&text)
        .map_err(|e| Error::format(path, format!("has no valid safetensors header: {e}")))?;
    let (data, expected) = (8 + length, 8 + length + metadata.data_len() as u64);
    if expected != bytes {
        return Err(Error::Corrupt {
            path: path.into(),
            offset: expected.min(bytes),
            what: "length in bytes".into(),
            expected: expected.to_string(),
            got: bytes.to_string(),
            tensors: Box::default(),
            is_last: false,
        });
    }
    Ok(Header { metadata, data, bytes })
}

/// What the files read so far say about the checkpoint.
#[derive(Default)]
struct Assembly {
    index: Option<WeightMap>,
    files: Vec<FileEntry>,
    shards: Vec<ShardFile>,
    tensors: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
}

impl Assembly {
    fn add_file(&mut self, dir: &Path, name: String) -> Result<()> {
        let path = resolve(dir, &name)?;
        let Header { metadata, data, bytes } = read_header(&path)?;
        let notes = metadata.metadata().clone().unwrap_or_default();
        if notes.contains_key("ringstow") {
            return Err(uncommitted(dir, &name));
        }
        let saved: HashMap<String, Saved> = match notes.get("DCP_SHARDING_INFO") {
            None => HashMap::new(),
            Some(text) => serde_json::from_str(text)
                .map_err(|e| Error::format(&path, format!("its DCP_SHARDING_INFO: {e}")))?,
        };
        let mut tensors: Vec<(String, &TensorInfo)> = metadata.tensors().into_iter().collect();
        tensors.sort_by(|(a, x), (b, y)| (x.data_offsets, a).cmp(&(y.data_offsets, b)));
        for (tensor, info) in tensors {
            let offsets = saved.get(&tensor).map(|saved| saved.saved_offsets.as_slice());
            // If the index lists a complete tensor in another file, this one is a copy.
            let elsewhere =
                |index: &WeightMap| index.weight_map.get(&tensor).is_some_and(|file| *file != name);
            if offsets.is_none() && self.index.as_ref().is_some_and(elsewhere) {
                continue;
            }
            self.add_chunk(tensor, info, data, offsets)
                .map_err(|reason| Error::format(&path, reason))?;
        }
        let (other_path, crc32) = (path.clone(), Vec::new());
        self.shards.push(ShardFile { path, other_path, bytes, crc32 });
        self.files.push(FileEntry { name, bytes, crc32: Vec::new() });
        Ok(())
    }

    /// Adds a chunk of the current file, and grows the tensor's shape to hold it.
    fn add_chunk(
        &mut self,
        name: String,
        info: &TensorInfo,
        data: u64,
        offsets: Option<&[u64]>,
    ) -> std::result::Result<(), String> {
        let dtype = Dtype::from_safetensors(info.dtype)
            .ok_or_else(|| format!("tensor {name:?} is of unknown type {}", info.dtype))?;
        let sizes: Vec<u64> = info.shape.iter().map(|&size| size as u64).collect();
        let offsets = offsets.map_or_else(|| vec![0; sizes.len()], <[u64]>::to_vec);
        let ends: Option<Vec<u64>> = (offsets.len() == sizes.len())
            .then(|| offsets.iter().zip(&sizes).map(|(o, s)| o.checked_add(*s)).collect())
            .flatten();
        let Some(ends) = ends else {
            return Err(format!("tensor {name:?} of {sizes:?} cannot begin at {offsets:?}"));
        };
        let index = *self.by_name.entry(name).or_insert_with_key(|name| {
            let shape = smallvec![0; ends.len()];
            let (name, chunks) = (name.clone(), SmallVec::new());
            self.tensors.push(TensorEntry { name, dtype, shape, chunks, object: false });
            self.tensors.len() - 1
        });
        let tensor = &mut self.tensors[index];
        if (tensor.dtype, tensor.shape.len()) != (dtype, ends.len()) {
            return Err(format!(
                "tensor {:?} is {dtype} of {} dimensions here, and {} of {} in another file",
                tensor.name,
                ends.len(),
                tensor.dtype,
                tensor.shape.len()
            ));
        }
        for (size, end) in tensor.shape.iter_mut().zip(ends) {
            *size = end.max(*size);
        }
        let begin = data + info.data_offsets.0 as u64;
        let (offsets, sizes) = (Some(offsets.into()), Some(sizes.into()));
        tensor.chunks.push(Chunk { file: self.files.len() as u32, begin, offsets, sizes });
        Ok(())
    }

    fn finish(mut self, dir: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
        if let Some(index) = &self.index {
            let there = |name: &&String| self.by_name.contains_key(*name);
            let mut missing: Vec<String> =
                index.weight_map.keys().filter(|name| !there(name)).cloned().collect();
            if !missing.is_empty() {
                missing.sort_unstable();
                return Err(unlisted(dir, "tensor(s)", &missing));
            }
        }
        for tensor in &mut self.tensors {
            check_coverage(dir, tensor)?;
            if let [chunk] = tensor.chunks.as_mut_slice() {
                (chunk.offsets, chunk.sizes) = (None, None);
            }
        }
        let state = RawValue::from_string("{}".into()).expect("an empty object is JSON");
        let block_bytes = Config::default().block_bytes;
        let mut manifest = Manifest::new(0, 1, block_bytes, self.files, self.tensors, state);
        (manifest.format, manifest.created_unix_ms) = ("safetensors".into(), 0);
        Ok((manifest, self.shards))
    }
}

/// Checks that a tensor's chunks cover it.
fn check_coverage(dir: &Path, tensor: &TensorEntry) -> Result<()> {
    let name = &tensor.name;
    let boxes: Vec<Extent> = tensor
        .chunks
        .iter()
        .filter_map(|chunk| Some((chunk.offsets.as_deref()?, chunk.sizes.as_deref()?)))
        .collect();
    let whole = tensor.dtype.nbytes(&tensor.shape).ok_or_else(|| {
        Error::format(dir, format!("tensor {name:?}: shape {:?} overflows", tensor.shape))
    })?;
    let held: u64 = boxes.iter().filter_map(|(_, sizes)| tensor.dtype.nbytes(sizes)).sum();
    let tiled = cover::tiles(&tensor.shape, &boxes)
        .map_err(|why| Error::format(dir, format!("tensor {name:?}: {why}")))?;
    if tiled {
        return Ok(());
    }
    let shape = &tensor.shape;
    if held >= whole {
        let reason = format!("tensor {name:?} of {shape:?}: its chunks overlap each other");
        return Err(Error::format(dir, reason));
    }
    let holes = cover::survey(shape, &boxes).unwrap_or_default().holes;
    let hole = holes.first().map_or(String::new(), |(offsets, sizes)| {
        format!(", {sizes:?} at {offsets:?} among what is missing")
    });
    let reason = format!(
        "tensor {name:?} of {shape:?} has {held} of {whole} bytes{hole}; a file is missing: download it again"
    );
    Err(Error::MissingFiles { path: dir.into(), reason })
}
