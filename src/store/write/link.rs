//! Gives files of an earlier checkpoint a second name in a new one.

use crate::error::{Error, Result};
use crate::format::names;
use crate::pipeline::load::ShardFile;
use crate::store::layout::recycled::Access;
use crate::store::layout::stripes::Stripes;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::write::base::Candidate;
use crate::sys::{dir, file, inodes};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Where a save writes.
pub(in crate::store) struct Destination<'a> {
    pub stripes: &'a Stripes,
    pub rank: u32,
    pub generation: u64,
    /// Turns a shard's name into the file's.
    pub name: &'a dyn Fn(&str) -> String,
    /// Creates a file, as for [`NewFiles`](crate::store::write::save::NewFiles).
    pub create: fn(&Path, bool) -> io::Result<File>,
}

/// Where a candidate was linked, or why it could not be.
pub(in crate::store) type Linked = std::result::Result<PathBuf, String>;

/// Links the candidates, each under its own number. Calls `note` with each path where something may have been created.
///
/// # Errors
/// [`Error::Io`] if a link that is unfit cannot be removed, or no file can be created.
pub(in crate::store) fn link(
    base: &Checkpoint,
    candidates: &[Candidate],
    to: &Destination<'_>,
    mut note: impl FnMut(&Path),
) -> Result<Vec<Linked>> {
    let mut new_access: HashMap<&Path, Access> = HashMap::new();
    let mut linked = Vec::with_capacity(candidates.len());
    for (number, candidate) in candidates.iter().enumerate() {
        let bytes = base.manifest.files[candidate.file].bytes;
        let name = (to.name)(&names::shard(to.rank, number, to.generation));
        let from = &base.files[candidate.file];
        let mut outcome = Err("the checkpoint has no directory".to_owned());
        for dir in nearest(to.stripes, &from.path) {
            let path = dir.join(&name);
            if !new_access.contains_key(dir) {
                new_access.insert(dir, access_of_new(&path, to, &mut note)?);
            }
            let made = link_to(from, &path);
            // What has the name already is another process's, and stays.
            if !made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
                note(&path);
            }
            if let Err(error) = made {
                outcome = Err(error.to_string());
                continue;
            }
            outcome = match check(&path, bytes, &new_access[dir]) {
                Ok(()) => Ok(path),
                Err(reason) => dir::remove(&path).map(|()| Err(reason))?,
            };
            break;
        }
        linked.push(outcome);
    }
    Ok(linked)
}

/// Who may use a new file, which is created for this alone.
fn access_of_new(
    path: &Path,
    to: &Destination<'_>,
    note: &mut impl FnMut(&Path),
) -> Result<Access> {
    let file = (to.create)(path, false).map_err(|e| inodes::creating(path, e))?;
    note(path);
    let access = Access::of(&file).map_err(|e| Error::io("opening", path, e))?;
    dir::remove(path)?;
    Ok(access)
}

/// The directories of the new checkpoint, those beside a file's own directory first: they are on its file system.
fn nearest<'a>(stripes: &'a Stripes, from: &Path) -> Vec<&'a Path> {
    let beside = from.parent().and_then(Path::parent);
    let mut dirs: Vec<&Path> = stripes.dirs().collect();
    dirs.sort_by_key(|dir| dir.parent() != beside);
    dirs
}

/// Links a shard under one of its names: the base's save may be renaming it.
fn link_to(from: &ShardFile, to: &Path) -> io::Result<()> {
    let mut linked = Ok(());
    for from in [&from.path, &from.other_path, &from.path] {
        linked = match dir::link(from, to) {
            // A network file system did it, and its answer was lost.
            Err(error) if error.kind() != io::ErrorKind::NotFound && is_one_file(from, to) => {
                tracing::debug!(%error, "the link is there");
                Ok(())
            }
            linked => linked,
        };
        if !linked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            break;
        }
    }
    linked
}

fn is_one_file(one: &Path, other: &Path) -> bool {
    dir::has(one) && dir::has(other) && dir::is_same(one, other)
}

/// Why a linked file cannot be a shard of this checkpoint.
fn check(path: &Path, bytes: u64, new: &Access) -> std::result::Result<(), String> {
    let read = || {
        let file = file::open_read(path, false)?;
        Ok((file::look(&file)?, Access::of(&file)?))
    };
    let (found, access) = read().map_err(|error: io::Error| error.to_string())?;
    if !found.is_file() || found.len() != bytes {
        return Err(format!("one has {} bytes, not {bytes}", found.len()));
    }
    match access == *new {
        true => Ok(()),
        false => Err("owner, group, mode or ACL of one is not that of a new file".into()),
    }
}

/// Makes the content of a linked file durable: a copy of a checkpoint need not be.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn make_durable(path: &Path) -> Result<()> {
    let sync = || file::sync(&file::open_read(path, false)?);
    sync().map_err(|e| Error::io("syncing", path, e))
}
