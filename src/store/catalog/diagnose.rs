//! What lies at a path that holds no committed checkpoint, and what reads it. Only failures ask: a successful open
//! never comes here.

use crate::error::Error;
use crate::format::names;
use crate::store::catalog::rank_dirs;
use crate::store::layout::stripes::companion_of;
use crate::store::read::dcp_mark;
use crate::store::write::session::unfinished;
use crate::sys::dir::{self, directories, file_names};
use crate::sys::file;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const GO_BACK: &str = "Resume from an earlier checkpoint; `ringstow prune` removes what was left";

/// The error for a path that is no directory, with what is there and what reads it.
pub(in crate::store) fn no_directory(path: &Path) -> Error {
    let error = io::Error::from_raw_os_error(nix::libc::ENOTDIR);
    Error::io("opening", path, error).hinted(kind_of_file(path))
}

/// The error for a path that cannot be looked at.
pub(in crate::store) fn not_there(path: &Path, error: io::Error) -> Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    let error = Error::io("opening", path, error);
    if !is_missing {
        return error;
    }
    let parent = path.parent().unwrap_or(path);
    match newest_in(parent) {
        Some(newest) => error.hinted(format!(
            "no checkpoint was saved there, but {} holds others, such as {}",
            parent.display(),
            newest.display()
        )),
        None => error.hinted("no checkpoint was saved there".into()),
    }
}

/// The error for a directory without a manifest, with what is in it and what reads that.
pub(in crate::store) fn no_manifest(dir: &Path) -> Error {
    let path = dir.to_path_buf();
    if let Ok(Some(checkpoint)) = companion_of(dir) {
        let reason =
            format!("it holds shards of {checkpoint}, which is striped over it: open that");
        return Error::Incomplete { path, reason };
    }
    if let Some(first) = rank_dirs::parts(dir).unwrap_or_default().first() {
        let reason = format!(
            "it is of ranks that saved each by itself (DCP's use_collectives=False), and each rank's part \
             is a checkpoint of its own: load it with dcp.load on as many ranks, or open a part, such as {}",
            first.display()
        );
        return Error::Incomplete { path, reason };
    }
    let names = file_names(dir).unwrap_or_default();
    let parts = names.iter().filter(|name| names::is_part(name)).count();
    let manifest = names::MANIFEST;
    let reason = if names.iter().any(|name| name == names::RETIRED) {
        "it was being removed, and what did that was killed; `ringstow prune` finishes it".into()
    } else if parts == 0 {
        kind_of_directory(dir, &names)
    } else {
        match unfinished(dir, &names) {
            Some(ranks) => format!(
                "it has no {manifest}: a save is under way or was killed before its commit, and {ranks}. {GO_BACK}"
            ),
            None => format!(
                "it has no {manifest} but {parts} uncommitted file(s): a save is under way or was killed before \
                 its commit. {GO_BACK}"
            ),
        }
    };
    Error::Incomplete { path, reason }
}

/// What a directory is in which nothing of an unfinished save is.
fn kind_of_directory(dir: &Path, names: &[String]) -> String {
    let manifest = names::MANIFEST;
    let first = |is_it: fn(&str) -> bool| names.iter().find(|name| is_it(name));
    let dcp = |name: &str| name.ends_with(".distcp");
    if let Some(newest) = newest_in(dir) {
        let newest = newest.display();
        return format!(
            "it is a directory of checkpoints, such as {newest}: load one of these. `latest` gives the path of \
             the newest, `ringstow ls` lists them"
        );
    }
    if let Some(shard) = first(names::is_shard) {
        return no_commit(shard);
    }
    if first(dcp).is_some()
        || (first(|name| name == names::DCP_MARK).is_some() && !dcp_mark::is_ours(dir))
    {
        return "it is a checkpoint of torch.distributed.checkpoint's own format: load it with dcp.load without \
                ringstow's reader, or convert it (`ringstow convert OLD NEW`)"
            .into();
    }
    if let Some(file) = first(|name| name.ends_with(".safetensors")) {
        return format!(
            "it has no {manifest} but safetensors files of another program, such as {file}: read them with \
             ringstow.open (in Rust Checkpoint::open_foreign), or convert them (`ringstow convert OLD NEW`)"
        );
    }
    if let Some(file) = first(is_torch_name) {
        return format!(
            "it has no {manifest} but files of torch.save, such as {file}: read them with torch.load, or convert \
             them one by one (`ringstow convert OLD NEW`)"
        );
    }
    let is_empty = dir::entries(dir).is_ok_and(|entries| entries.is_empty());
    match is_empty {
        true => format!("it is empty, so it has no {manifest}; nothing was saved here"),
        false => format!("it has no {manifest}; nothing was saved here, or another format was"),
    }
}

/// What shards of ringstow's are without a manifest; `shard` is one of them.
pub(in crate::store) fn no_commit(shard: &str) -> String {
    format!(
        "{shard} is a shard of ringstow's, but there is no {}, whose presence is the commit; restore it from a \
         copy or go back to an earlier checkpoint",
        names::MANIFEST
    )
}

/// What a file is, and what reads it.
fn kind_of_file(path: &Path) -> String {
    let parent = path.parent().unwrap_or(path);
    if dir::has(&parent.join(names::MANIFEST)) {
        return format!("it is a file of the checkpoint {}: open that", parent.display());
    }
    let begin = first_bytes(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_zip = begin.starts_with(b"PK\x03\x04");
    if is_zip && name.ends_with(".npz") {
        return "it is a file of numpy.savez: read it with numpy.load".into();
    }
    if is_zip || (begin.starts_with(b"\x80") && is_torch_name(&name)) {
        return "it is a file of torch.save: read it with torch.load, or convert it (`ringstow convert FILE NEW`)"
            .into();
    }
    if name.ends_with(".safetensors") || begin.get(8) == Some(&b'{') {
        return "it is a safetensors file: read it with safetensors' load_file, or open its directory with \
                ringstow.open (in Rust Checkpoint::open_foreign)"
            .into();
    }
    "it is a file: a checkpoint is a directory".into()
}

fn is_torch_name(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt", ".tar"].iter().any(|ending| name.ends_with(ending))
}

/// The first bytes of a regular file, or of the one that a link leads to; none if it cannot be read.
fn first_bytes(path: &Path) -> Vec<u8> {
    const BYTES: u64 = 256;
    let real = dir::real(path).unwrap_or_default();
    file::read_start(&real, BYTES).unwrap_or_default()
}

/// The checkpoint directly in a directory that was committed last, going by its files' times.
fn newest_in(dir: &Path) -> Option<PathBuf> {
    let committed = |path: &Path| -> Option<SystemTime> {
        let at = |path: &Path| dir::look(&path.join(names::MANIFEST)).ok()?.modified().ok();
        at(path).or_else(|| at(rank_dirs::parts(path).ok()?.first()?))
    };
    let found = directories(dir).ok()?.into_iter();
    let timed = found.filter_map(|path| Some((committed(&path)?, path)));
    timed.max().map(|(_, path)| path)
}
