//! The shards of a manifest, in the directories where they are.

use crate::error::{Error, GO_BACK, Result, numbered, some_of};
use crate::format::{FileEntry, Manifest, names};
use crate::pipeline::load::ShardFile;
use crate::store::layout::node::OwnRanks;
use crate::store::layout::stripes::Stripes;
use crate::store::read::diagnose::seen_late;
use crate::store::read::fault::Fault;
use crate::sys::{dir, file};
use std::fs::{FileType, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// The shards of a manifest, as they were found.
#[derive(Debug)]
pub(in crate::store) struct Shards {
    /// One for each file, under its own name if it is missing.
    pub files: Vec<ShardFile>,
    pub faults: Vec<Fault>,
    /// Which are missing, and what to do.
    pub problem: Option<String>,
}

/// Finds all shards of a manifest, and notes which are missing or of another length.
pub(in crate::store) fn find_shards<T, S>(
    dir: &Path,
    stripe: &[PathBuf],
    manifest: &Manifest<T, S>,
) -> Result<Shards> {
    /// So many may be missing. More than that, and more than there are, do not make a checkpoint: paths and reports of
    /// files that a manifest merely names would take far more memory than the manifest.
    const MISSING_MAX: usize = 1000;
    let stripes = Stripes::to_read(dir, stripe);
    let own = OwnRanks::of(dir, manifest);
    let (mut files, mut faults) = (Vec::with_capacity(manifest.files.len()), Vec::new());
    let mut missing = Vec::new();
    for (number, file) in manifest.files.iter().enumerate() {
        let (shard, fault) = match find_shard(&stripes, manifest, file) {
            Some((shard, There::File(len))) => (shard, Fault::of_length(number, file, len)),
            Some((shard, There::Other(kind))) => {
                (shard, Some(Fault::of_kind(number, file.bytes, kind)))
            }
            Some((shard, There::Refused(error))) => {
                let fault = Fault::of_error(number, file.bytes, &error);
                let refused = || Error::io("opening", &shard.path, error);
                let fault = Some(fault.ok_or_else(refused)?);
                (shard, fault)
            }
            None if !own.wrote(&file.name) => {
                (shard_in(dir, file), Some(Fault::of_elsewhere(number, file.bytes)))
            }
            None => {
                missing.push(file.name.as_str());
                if missing.len() == MISSING_MAX && !is_half_there(&stripes, manifest) {
                    break;
                }
                (shard_in(dir, file), Some(Fault::of_missing(number, file.bytes)))
            }
        };
        files.push(shard);
        faults.extend(fault);
    }
    let problem = (!missing.is_empty()).then(|| missing_shards(&stripes, manifest, &missing));
    if files.len() < manifest.files.len() {
        let reason = problem.unwrap_or_default();
        return Err(Error::MissingFiles { path: dir.into(), reason });
    }
    Ok(Shards { files, faults, problem })
}

/// Whether at least half of the files are there.
fn is_half_there<T, S>(stripes: &Stripes, manifest: &Manifest<T, S>) -> bool {
    let there =
        manifest.files.iter().filter(|file| find_shard(stripes, manifest, file).is_some()).count();
    there >= manifest.files.len() / 2
}

/// Says which files are missing and what to do.
fn missing_shards<T, S>(stripes: &Stripes, manifest: &Manifest<T, S>, missing: &[&str]) -> String {
    let mut ranks: Vec<u32> = missing.iter().filter_map(|name| names::shard_rank(name)).collect();
    ranks.dedup();
    let of = match manifest.world_size {
        1 => String::new(),
        n => format!(" (of {}, {n} ranks in all)", numbered("rank", &ranks)),
    };
    format!(
        "{} of {} files that its manifest lists are missing{of}: {}; {}{}",
        missing.len(), // at least: see `find_shards`
        manifest.files.len(),
        missing[..missing.len().min(20)].join(", "),
        how_to_find(stripes, manifest),
        seen_late(stripes.own())
    )
}

/// What to do about missing shards.
fn how_to_find<T, S>(stripes: &Stripes, manifest: &Manifest<T, S>) -> String {
    let restore = format!("restore them, or {GO_BACK}");
    if manifest.stripes.is_empty() {
        return restore;
    }
    let noted: Vec<String> = manifest.stripes.iter().map(|dir| format!("{dir:?}")).collect();
    let here = match (stripes.stripe_dirs().next(), stripes.left_out()) {
        (None, []) => "which is not configured here".to_owned(),
        (_, []) => "and they are not where it is configured here".to_owned(),
        (_, why) => format!("and here {}", why.join("; ")),
    };
    format!(
        "it was striped over {}, {here}: set `stripe` (Config.stripe, RINGSTOW_STRIPE or ringstow.toml) \
         to where these directories are now, or {restore}",
        some_of(&noted)
    )
}

/// Finds a committed shard: under its own name or, if the save has not renamed it yet or was killed before, under the
/// uncommitted name. Says what is there, too.
fn find_shard<T, S>(
    stripes: &Stripes,
    manifest: &Manifest<T, S>,
    file: &FileEntry,
) -> Option<(ShardFile, There)> {
    stripes.dirs().find_map(|dir| find_shard_in(dir, file)).or_else(|| {
        let (dir, refusal) =
            stripes.refused().filter(|_| !stripes.unseen(&manifest.stripes).is_empty())?;
        let refusal = io::Error::from_raw_os_error(refusal.raw_os_error()?);
        Some((shard_in(dir, file), There::Refused(refusal)))
    })
}

/// What has a shard's path.
enum There {
    /// A file of this length.
    File(u64),
    /// Something else.
    Other(FileType),
    /// The system does not say.
    Refused(io::Error),
}

fn find_shard_in(dir: &Path, file: &FileEntry) -> Option<(ShardFile, There)> {
    let mut shard = shard_in(dir, file);
    // Try its own name twice: a save may rename it between the first two tries.
    for _ in 0..3 {
        match dir::look_at(&shard.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                std::mem::swap(&mut shard.path, &mut shard.other_path);
            }
            Err(e) => return Some((shard, There::Refused(e))),
            Ok(found) if !found.is_file() => return Some((shard, There::Other(found.file_type()))),
            Ok(found) => {
                let len = length_of(&shard.path, &found, file.bytes);
                return Some((shard, len.map_or_else(There::Refused, There::File)));
            }
        }
    }
    None
}

/// The length of a shard that should be of this many bytes.
///
/// # Errors
/// The system's.
fn length_of(path: &Path, found: &Metadata, bytes: u64) -> io::Result<u64> {
    if found.len() == bytes {
        return Ok(bytes);
    }
    // A network file system may show the length that this host saw during the save, until the file is opened.
    Ok(file::look(&file::open_read(path, false)?)?.len())
}

/// A shard under its own name.
fn shard_in(dir: &Path, file: &FileEntry) -> ShardFile {
    let (path, other_path) = (dir.join(&file.name), dir.join(names::uncommitted(&file.name)));
    ShardFile { path, other_path, bytes: file.bytes, crc32: file.crc32.clone() }
}
