//! Why a path holds no committed checkpoint: what is there instead, and what reads it. Runs only where an error is
//! about to be shown, since it looks into many files.

use crate::error::Error;
use crate::format::names;
use crate::store::layout::session_note::unfinished_ranks;
use crate::store::layout::stripe_marker::stripe_owner;
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::dcp_mark;
use crate::store::read::kinds::{self, KINDS, TORCH_ENDINGS};
use crate::sys::dir::{self, directories, file_names};
use crate::sys::file;
use crate::sys::file_system::FileSystem;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const GO_BACK: &str = "Resume from an earlier checkpoint; `ringstow prune` removes what was left";

/// Adds to an error about a directory that is missing, or is not a directory, what is there and what reads it.
/// Other errors pass unchanged.
pub(in crate::store) fn explain(dir: &Path, error: Error) -> Error {
    let kind = match &error {
        Error::Io { path, cause, .. } if path == dir => cause.kind(),
        _ => return error,
    };
    match kind {
        io::ErrorKind::NotADirectory => error.hinted(kind_of_file(dir)),
        io::ErrorKind::NotFound => error.hinted(nothing_saved(dir)),
        _ => error,
    }
}

fn nothing_saved(path: &Path) -> String {
    let parent = path.parent().unwrap_or(path);
    match newest_in(parent) {
        Some(newest) => format!(
            "no checkpoint was saved there, or it was removed; {} holds others, such as {}{}",
            parent.display(),
            newest.display(),
            seen_late(parent)
        ),
        None => format!("no checkpoint was saved there, or it was removed{}", seen_late(parent)),
    }
}

/// What to do if another host has just saved what this one does not see; empty if no other host can. `dir` need not
/// exist.
pub(in crate::store) fn seen_late(dir: &Path) -> String {
    let existing =
        dir.ancestors().map(|dir| if dir == Path::new("") { Path::new(".") } else { dir });
    match existing.map(FileSystem::of).find_map(std::result::Result::ok) {
        Some(system) if system.is_shared() => format!(
            ". It is on {}, where this host may see late what another one has saved: load again in a minute; with DCP, \
             ringstow.dcp.latest waits until every rank sees the checkpoint",
            system.name
        ),
        _ => String::new(),
    }
}

/// The error for a directory without a manifest: says what is in the directory and what reads that.
pub(in crate::store) fn no_manifest(dir: &Path) -> Error {
    let mut error = without_manifest(dir);
    if let Error::NoCheckpoint { reason, .. } | Error::NotCommitted { reason, .. } = &mut error {
        reason.push_str(&seen_late(dir));
    }
    error
}

/// The error for a directory whose manifest is another program's; `None` if it is not.
pub(in crate::store) fn not_ringstows(dir: &Path) -> Option<Error> {
    let below = || match newest_in(dir) {
        Some(newest) => format!("; it holds checkpoints, such as {}", newest.display()),
        None => "; nothing was saved here".into(),
    };
    let reason = || format!("its {} is another program's{}", names::MANIFEST, below());
    let error = || Error::NoCheckpoint { path: dir.into(), reason: reason() };
    manifest::is_another_programs(dir).then(error)
}

fn without_manifest(dir: &Path) -> Error {
    let path = dir.to_path_buf();
    if let Ok(Some(checkpoint)) = stripe_owner(dir) {
        let reason =
            format!("it holds shards of {checkpoint}, which is striped over it: give that path");
        return Error::NoCheckpoint { path, reason };
    }
    let parts = rank_dirs::parts(dir).unwrap_or_default();
    if let Some(first) = parts.first() {
        let is_committed = |part: &PathBuf| dir::is_file(&part.join(names::MANIFEST));
        let Some(first) = parts.iter().find(|part| is_committed(part)) else {
            let reason = format!(
                "it is of ranks that save each by itself, such as {}, and none has committed its part: a save is \
                 in progress or was killed. {GO_BACK}",
                first.display()
            );
            return Error::NotCommitted { path, reason };
        };
        let reason = format!(
            "it is of ranks that saved each by itself (DCP's use_collectives=False), and each rank's share \
             is a checkpoint of its own: load it with dcp.load on as many ranks, or open one share, such as {}",
            first.display()
        );
        return Error::NoCheckpoint { path, reason };
    }
    let names = file_names(dir).unwrap_or_default();
    let uncommitted = names.iter().filter(|name| names::is_uncommitted(name)).count();
    if names.iter().any(|name| name == names::REMOVAL_MARK) {
        let reason =
            "it is being removed, or what removed it was killed; `ringstow prune` finishes that"
                .into();
        return Error::NotCommitted { path, reason };
    }
    if names.iter().any(|name| names::is_uncommitted(name) && names::is_promoted(name)) {
        let reason = format!(
            "it has no {}: a checkpoint is being copied here, or the copy was ended before its commit. The same `ringstow \
             promote` goes on with it; `ringstow prune` removes what was sent",
            names::MANIFEST
        );
        return Error::NotCommitted { path, reason };
    }
    if uncommitted > 0 {
        let what = unfinished_ranks(dir, &names)
            .unwrap_or_else(|| format!("it has {uncommitted} uncommitted file(s)"));
        let reason = format!(
            "it has no {}: a save is in progress or was killed before its commit; {what}. {GO_BACK}",
            names::MANIFEST
        );
        return Error::NotCommitted { path, reason };
    }
    if let Some(newest) = newest_in(dir) {
        let newest = newest.display();
        let reason = format!(
            "it is a directory of checkpoints, such as {newest}: give the path of one. `latest` gives the path of \
             the newest, `ringstow ls` lists them"
        );
        return Error::NoCheckpoint { path, reason };
    }
    if let Some(shard) = names.iter().find(|name| names::is_shard(name)) {
        return Error::NotCommitted { path, reason: no_commit(shard) };
    }
    if let Some(file) = unfinished_dcp(&names) {
        let reason = format!(
            "it holds {file} of torch.distributed.checkpoint and no {}, which that writes last: a save or conversion \
             is in progress or was killed, and nothing can read it. Resume from an earlier checkpoint; remove this \
             directory once nothing writes there",
            names::DCP_MARK
        );
        return Error::NotCommitted { path, reason };
    }
    Error::NoCheckpoint { path, reason: kind_of_directory(dir, &names) }
}

/// A data file of DCP's own writer, if there is no metadata: neither one for all ranks, nor one for each.
fn unfinished_dcp(names: &[String]) -> Option<&String> {
    let has_metadata = names.iter().any(|name| name.ends_with(names::DCP_MARK));
    names.iter().find(|name| name.ends_with(".distcp")).filter(|_| !has_metadata)
}

/// Describes a directory without files of an unfinished save.
fn kind_of_directory(dir: &Path, names: &[String]) -> String {
    let manifest = names::MANIFEST;
    let first = |is_it: fn(&str) -> bool| names.iter().find(|name| is_it(name));
    let dcp = |name: &str| name.ends_with(".distcp");
    if first(dcp).is_some()
        || (first(|name| name == names::DCP_MARK).is_some()
            && !dcp_mark::is_ours(dir).unwrap_or(false))
    {
        return "it is a checkpoint of torch.distributed.checkpoint's own format: load it with ringstow.load in Python, \
                with dcp.load without ringstow's reader, or convert it (`ringstow convert OLD NEW`)"
            .into();
    }
    if let Some(file) = first(|name| name.ends_with(".safetensors")) {
        return format!(
            "it has no {manifest} but safetensors files of another program, such as {file}, without checksums: read them with \
             ringstow.load or ringstow.open (in Rust OpenOptions::foreign), or convert them (`ringstow convert OLD \
             NEW`)"
        );
    }
    if let Ok(Some(kind)) = kinds::kind_of(dir)
        && kind != "hf"
    {
        let what = KINDS.iter().find(|(known, _)| *known == kind).map_or(kind, |(_, what)| what);
        return format!(
            "it is {what}: load it with ringstow.load in Python, or convert it (`ringstow convert OLD NEW`)"
        );
    }
    if let Some(file) = first(is_torch_name) {
        return format!(
            "it has no {manifest} but files of torch.save, such as {file}: load one of them with ringstow.load in \
             Python, or convert them one by one (`ringstow convert OLD NEW`)"
        );
    }
    let is_empty = dir::entries(dir).is_ok_and(|entries| entries.is_empty());
    match is_empty {
        true => format!("it is empty, so it has no {manifest}; nothing was saved here"),
        false => format!("it has no {manifest}; nothing was saved here, or another format was"),
    }
}

/// Describes ringstow's shards without a manifest; `shard` is one of them.
pub(in crate::store) fn no_commit(shard: &str) -> String {
    format!(
        "{shard} is a shard of ringstow's, but there is no {}, whose presence is the commit; restore it from a \
         copy or go back to an earlier checkpoint",
        names::MANIFEST
    )
}

/// Describes a file, and says what reads it.
fn kind_of_file(path: &Path) -> String {
    let parent = path.parent().unwrap_or(path);
    if manifest::is_committed(parent) {
        return format!("it is a file of the checkpoint {}: give that path", parent.display());
    }
    let begin = first_bytes(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_zip = begin.starts_with(b"PK\x03\x04");
    if is_zip && name.ends_with(".npz") {
        return "it is a file of numpy.savez: read it with numpy.load".into();
    }
    if is_zip || (begin.starts_with(b"\x80") && is_torch_name(&name)) {
        return "it is a file of torch.save: load it with ringstow.load in Python, or convert it (`ringstow convert FILE \
                NEW`)"
            .into();
    }
    if name.ends_with(".safetensors") || begin.get(8) == Some(&b'{') {
        return "it is a safetensors file: load it with ringstow.load in Python, or open it with OpenOptions::foreign in \
                Rust"
            .into();
    }
    "it is a file without tensors: a checkpoint is a directory, a safetensors file or the index of several, or in Python a file \
     of torch.save"
        .into()
}

fn is_torch_name(name: &str) -> bool {
    TORCH_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// The first bytes of a regular file, or of the one that a link leads to; none if it cannot be read.
fn first_bytes(path: &Path) -> Vec<u8> {
    const BYTES: u64 = 256;
    let real = dir::real(path).unwrap_or_default();
    file::read_start(&real, BYTES).unwrap_or_default()
}

/// The checkpoint directly below a directory that was committed last, going by the manifests' times.
fn newest_in(dir: &Path) -> Option<PathBuf> {
    let dated = |holder: PathBuf| {
        let at = dir::look(&holder.join(names::MANIFEST)).ok()?.modified().ok()?;
        Some((at, holder))
    };
    let found = directories(dir).ok()?.into_iter().filter_map(|path| {
        let part = || dated(rank_dirs::parts(&path).ok()?.into_iter().next()?);
        let (at, holder) = dated(path.clone()).or_else(part)?;
        Some((at, path, holder))
    });
    let mut newest_first: Vec<(SystemTime, PathBuf, PathBuf)> = found.collect();
    newest_first.sort_by(|one, other| other.cmp(one));
    let committed = newest_first.into_iter().find(|(_, _, holder)| manifest::is_committed(holder));
    committed.map(|(_, path, _)| path)
}
