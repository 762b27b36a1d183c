//! Safetensors files that another program wrote: one, those that an index lists, or a directory of them. Reads only their
//! headers.
//!
//! PyTorch's `HuggingFaceStorageWriter` notes in each file which regions of the tensors it holds
//! (`DCP_SHARDING_INFO`). Files without that note hold complete tensors.

mod assembly;
mod header;

use crate::error::{Error, Result, some_of};
use crate::format::model_files::{self, is_index};
use crate::format::model_index::ModelIndex;
use crate::format::{Manifest, names};
use crate::pipeline::load::ShardFile;
use crate::store::read::diagnose::{no_commit, no_manifest};
use crate::store::read::kinds::{self, directory_of};
use crate::sys::dir::{self, file_names};
use assembly::Assembly;
use std::collections::BTreeSet;
use std::path::Path;

/// Reads the headers of a model's files: a directory without a manifest, one file, or an index.
pub(in crate::store) fn read(path: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
    if dir::is_dir(path) {
        return read_directory(path);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let dir = directory_of(path);
    match is_index(&name) {
        true => read_listed(dir, &name, &file_names(dir)?),
        false => {
            warn_of_parts(path, &name);
            Assembly::of_file(path)
        }
    }
}

/// Warns if a file is one of several of a model: loads of it have only a part of the tensors.
fn warn_of_parts(path: &Path, name: &str) {
    if let Some((_, number, count)) = names::numbered(name).filter(|&(_, _, count)| count > 1) {
        tracing::warn!(
            "{}: reading file {number} of {count}, which holds a part of the model; give its directory to read all",
            path.display()
        );
    }
}

fn read_directory(dir: &Path) -> Result<(Manifest, Vec<ShardFile>)> {
    let present = file_names(dir)?;
    if present.iter().any(|name| names::is_uncommitted(name)) {
        return Err(no_manifest(dir));
    }
    if let Some(shard) = present.iter().find(|name| names::is_shard(name)) {
        return Err(uncommitted(dir, shard));
    }
    let chosen = weights_among(dir, &present)?;
    warn_of_others(dir, chosen, &present);
    let files = match chosen {
        Some(index) if is_index(index) => return read_listed(dir, index, &present),
        Some(file) if !file.ends_with(SAFETENSORS) => {
            let what =
                format!("{} holds a model's weights in {file}, by torch.save", dir.display());
            let remedy =
                "load it with ringstow.load in Python, or convert it (`ringstow convert OLD NEW`)";
            return Err(Error::Unsupported { what, remedy: remedy.into() });
        }
        Some(file) => vec![file.to_owned()],
        None => unlisted_files(dir, present)?,
    };
    if files.is_empty() {
        return Err(no_manifest(dir));
    }
    Assembly::of_files(dir, files, None)
}

fn read_listed(dir: &Path, name: &str, present: &[String]) -> Result<(Manifest, Vec<ShardFile>)> {
    let path = dir.join(name);
    let text = header::read_text(&path)?;
    let index = read_index(&path, &text)?;
    let files = listed_files(dir, name, &index, present)?;
    Assembly::of_files(dir, files, Some((name, index)))
}

/// The ending of the files that are read.
const SAFETENSORS: &str = ".safetensors";

/// The file of a model's weights in a directory, or the index of their files, as `from_pretrained` chooses it; `None` if no
/// file has a known name. With `warns` says which others are not read.
///
/// # Errors
/// [`Error::Invalid`] for several variants of the weights; [`Error::NotCommitted`] for an unfinished export or download;
/// [`Error::Io`].
pub fn weights_in(dir: &Path, warns: bool) -> Result<Option<String>> {
    let present = file_names(dir)?;
    let chosen = weights_among(dir, &present)?;
    if warns {
        warn_of_others(dir, chosen, &present);
    }
    Ok(chosen.map(str::to_owned))
}

/// The [kind](kinds::kind_of) of another program's checkpoint, and whether it is a directory of a model whose weights
/// `torch.save` wrote: a [`Checkpoint`](crate::Checkpoint) opens all other models.
///
/// # Errors
/// As for [`kinds::kind_of`] and [`weights_in`].
pub fn kind_and_weights(path: &Path) -> Result<(Option<&'static str>, bool)> {
    let (kind, present) = kinds::kind_and_names(path)?;
    Ok((kind, kind == Some("hf") && is_by_torch(path, &present)?))
}

/// Whether `torch.save` wrote the weights in a directory; not at all other paths.
///
/// # Errors
/// As for [`weights_in`].
pub fn has_weights_by_torch(path: &Path) -> Result<bool> {
    Ok(dir::is_dir(path) && is_by_torch(path, &file_names(path)?)?)
}

fn is_by_torch(dir: &Path, present: &[String]) -> Result<bool> {
    Ok(match weights_among(dir, present)? {
        Some(name) => name.contains(".bin"),
        None => !present.iter().any(|name| name.ends_with(SAFETENSORS)),
    })
}

fn weights_among<'a>(dir: &Path, present: &'a [String]) -> Result<Option<&'a str>> {
    let chosen = model_files::chosen(present).map_err(|found| {
        let model_files::Ambiguous { variants, files } = found;
        Error::invalid(format!(
            "{} holds weights in the variants {}, and none without one: give one of the files, such as {}; there are {}",
            dir.display(),
            variants.join(", "),
            dir.join(&files[0]).display(),
            some_of(&files)
        ))
    })?;
    // An index, and a file by torch.save, are whole whatever lies beside them.
    let is_whole = chosen.is_some_and(|name| is_index(name) || !name.ends_with(SAFETENSORS));
    match present.iter().find(|name| names::is_uncommitted_model(name)) {
        Some(part) if !is_whole => {
            let reason = format!(
                "{part} belongs to an unfinished export or download; wait for it, or repeat it if it was killed"
            );
            Err(Error::NotCommitted { path: dir.into(), reason })
        }
        _ => Ok(chosen),
    }
}

/// Whether a file is named like a safetensors file, and not hidden.
fn is_readable(name: &str) -> bool {
    name.ends_with(SAFETENSORS) && !name.starts_with('.')
}

/// Warns of safetensors files beside the weights that are read.
fn warn_of_others(dir: &Path, chosen: Option<&str>, present: &[String]) {
    let Some(chosen) = chosen else { return };
    let is_other = |name: &&String| {
        is_readable(name)
            && *name != chosen
            && !(is_index(chosen) && names::numbered(name).is_some())
    };
    let others: Vec<String> = present.iter().filter(is_other).cloned().collect();
    if !others.is_empty() {
        tracing::warn!(
            "{}: reading {chosen}, as from_pretrained does, and not {}; give the file itself to read one of these",
            dir.display(),
            some_of(&others)
        );
    }
}

/// The files that an index lists, such as `pytorch_model.bin.index.json` in `dir`, in the order of their names.
///
/// # Errors
/// [`Error::MissingFiles`] for files that are not there; [`Error::Format`] for a file that is no index, or lists files
/// outside its directory; [`Error::Io`].
pub fn files_of_index(dir: &Path, name: &str) -> Result<Vec<String>> {
    let path = dir.join(name);
    let text = header::read_text(&path)?;
    listed_files(dir, name, &read_index(&path, &text)?, &file_names(dir)?)
}

fn uncommitted(dir: &Path, shard: &str) -> Error {
    Error::NotCommitted { path: dir.into(), reason: no_commit(shard) }
}

fn read_index<'a>(path: &Path, text: &'a [u8]) -> Result<ModelIndex<'a>> {
    ModelIndex::read(text).map_err(|why| {
        Error::format(path, format!("is not a list of tensors and their files: {why}"))
    })
}

/// The files that an index lists. Other files do not belong to the checkpoint.
fn listed_files(
    dir: &Path,
    name: &str,
    index: &ModelIndex,
    present: &[String],
) -> Result<Vec<String>> {
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
    if missing.is_empty() {
        return Ok(owned(listed));
    }
    let ending = Path::new(missing.first().expect("one is missing")).extension();
    // Files of a numbered set: a variant, or another model's file, says nothing about the index.
    let is_other = |other: &&str| {
        Path::new(other).extension() == ending
            && names::numbered(other).is_some()
            && !listed.contains(other)
    };
    let others = owned(present.into_iter().filter(is_other).collect());
    let newer = match others.is_empty() {
        true => String::new(),
        false => format!(
            ". If {} are the newer weights, the index is of an earlier save: move it away",
            some_of(&others)
        ),
    };
    Err(listed_missing(dir, name, "file(s)", &owned(missing), &newer))
}

/// Most missing files and tensors that are counted: an index claims as many as it likes.
const LISTED_MAX: usize = 1000;

fn listed_missing(dir: &Path, index: &str, what: &str, missing: &[String], newer: &str) -> Error {
    let (n, some) = (missing.len(), some_of(missing));
    let or_more = if n == LISTED_MAX { " or more" } else { "" };
    let reason = format!(
        "{n}{or_more} {what} that {index} lists are missing: {some}; download them again{newer}"
    );
    Error::MissingFiles { path: dir.into(), reason }
}

/// The files of a directory without an index, if no file of a numbered set is missing.
fn unlisted_files(dir: &Path, mut present: Vec<String>) -> Result<Vec<String>> {
    present.retain(|name| is_readable(name));
    if let Some(bad) = present.iter().find(|name| !names::is_confined(name)) {
        return Err(Error::format(dir.join(bad), "has a refused name: rename it"));
    }
    let sets = model_files::numbered_sets(&present);
    let missing: Vec<String> = sets.into_iter().flat_map(|set| set.missing).collect();
    if missing.is_empty() {
        return Ok(present);
    }
    let (n, some) = (missing.len(), some_of(&missing));
    let reason = format!("{n} file(s) of a numbered set are missing: {some}; download them again");
    Err(Error::MissingFiles { path: dir.into(), reason })
}
