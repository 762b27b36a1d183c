//! A checkpoint of ranks that saved each by itself, without a word between them: a directory in which
//! each rank has one of its own, `rank00003`, that holds its part. No rename commits the whole. It is there
//! if every rank's part is, and all are of the same save.

use crate::error::{Error, Result, some_of};
use crate::format::{Manifest, PartOf, names};
use crate::store::catalog::list::{Found, Status};
use crate::store::layout::stripes::{companion_of, same};
use crate::store::read::checkpoint::{listed, missing_ranks, read_manifest, read_text};
use crate::sys::dir::{directories, entries, file_names, has, is_dir};
use crate::sys::file;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// What the checkpoint at `dir` says that it is a part of: cheap, whatever it holds, since nothing else of its
/// manifest is kept. `None` for a whole, and for a damaged manifest: of that tells who opens it.
///
/// # Errors
/// [`Error::Incomplete`] if nothing is committed there; [`Error::Format`] for a manifest that is a link;
/// [`Error::Io`].
pub fn part_of(dir: &Path) -> Result<Option<PartOf>> {
    Ok(PartOf::noted_in(&read_text(dir)?))
}

/// The rank whose part a directory holds, going by its name.
pub(in crate::store) fn dir_rank(path: &Path) -> Option<u32> {
    names::dir_rank(path.file_name()?.to_str()?)
}

/// The directories in `dir` that are named after ranks, whatever is in them; links are not followed.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub(in crate::store) fn dirs(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = directories(dir)?;
    found.retain(|path| dir_rank(path).is_some());
    Ok(found)
}

/// The directories in `dir` in which a rank's part is, or was to be, by rank. None if `dir` is a checkpoint
/// itself, or holds others too.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub(in crate::store) fn parts(dir: &Path) -> Result<Vec<PathBuf>> {
    let itself = [names::MANIFEST, names::RETIRED, names::COMPANION];
    if itself.iter().any(|name| has(&dir.join(name))) {
        return Ok(Vec::new());
    }
    let paths = entries(dir)?.into_iter().map(|entry| entry.path());
    let (mut parts, others): (Vec<PathBuf>, Vec<PathBuf>) =
        paths.filter(|path| is_dir(path)).partition(|path| dir_rank(path).is_some());
    parts.retain(|path| holds_trace(path));
    // A directory of checkpoints, into which somebody saved by ranks once, stays one.
    if !parts.is_empty() && others.iter().any(|path| is_checkpoint(path, dir)) {
        return Ok(Vec::new());
    }
    parts.sort_by_key(|path| dir_rank(path));
    Ok(parts)
}

/// Whether what is in a directory is a checkpoint, or a whole. It looks no deeper, and not at a link back to the
/// directory: links could lead around in circles.
fn is_checkpoint(path: &Path, within: &Path) -> bool {
    let holds_parts = || dirs(path).is_ok_and(|parts| parts.iter().any(|part| holds_trace(part)));
    !same(path, within) && (holds_trace(path) || holds_parts())
}

/// Whether a directory of its own says that a checkpoint is, was or was to be there.
fn holds_trace(dir: &Path) -> bool {
    let found = file_names(dir).is_ok_and(|all| all.iter().any(|name| names::is_trace(name)));
    found && !companion_of(dir).is_ok_and(|of| of.is_some())
}

/// Whether the whole that these parts make up can be loaded, and why not.
pub(in crate::store) fn judge(dir: &Path, parts: &[Found]) -> (Status, Option<String>) {
    let incomplete = |problem: String| {
        (Status::Incomplete, Some(format!("{} is incomplete: {problem}", dir.display())))
    };
    if let Some(damaged) = parts.iter().find(|part| part.status == Status::Damaged) {
        return (Status::Damaged, damaged.problem.clone());
    }
    let paths: Vec<PathBuf> = parts.iter().map(|part| part.path.clone()).collect();
    if removal_was_interrupted(&paths) {
        let problem =
            "it was being removed, and what did that was killed; `ringstow prune` finishes it";
        return incomplete(problem.into());
    }
    let committed: Vec<(u32, &Found)> = parts
        .iter()
        .filter(|part| part.status == Status::Committed)
        .filter_map(|part| Some((dir_rank(&part.path)?, part)))
        .collect();
    let others = committed.iter().find_map(|(rank, part)| {
        part.part_of.as_ref().filter(|of| of.rank != *rank).map(|of| (part, of.rank))
    });
    if let Some((part, rank)) = others {
        let name = part.path.display();
        return incomplete(format!("{name} holds the part of rank {rank}: was it renamed?"));
    }
    let saves = saves(&committed);
    match problem_of(&saves) {
        None => (Status::Committed, None),
        Some(problem) => {
            let part = parts.iter().find(|part| part.status == Status::Incomplete);
            let why = part.and_then(|part| part.problem.as_ref());
            let why = why.map_or(String::new(), |why| format!(" ({why})"));
            incomplete(format!("{problem}{why}. {}", remedy(&saves)))
        }
    }
}

/// Ranks by the save that their committed parts are of, and by how many ranks that was; by `None` those that
/// do not say.
type Saves<'a> = BTreeMap<Option<(u32, &'a str)>, Vec<u32>>;

fn saves<'a>(committed: &[(u32, &'a Found)]) -> Saves<'a> {
    let mut saves = Saves::new();
    for (rank, part) in committed {
        let save = part.part_of.as_ref().map(|of| (of.ranks, of.save.as_str()));
        saves.entry(save).or_default().push(*rank);
    }
    saves
}

/// Why these are not all parts of one save.
fn problem_of(saves: &Saves<'_>) -> Option<String> {
    let mut each = saves.iter();
    match (each.next(), each.next()) {
        (None, _) => Some("no rank's part is committed".into()),
        (Some((None, ranks)), None) => Some(format!(
            "{} saved by itself, and of how many ranks is not known: the manifests do not say it (an older \
             ringstow wrote them, or there was no process group)",
            listed("rank", "ranks", ranks)
        )),
        (Some((Some((count, _)), ranks)), None) => {
            let missing = missing_ranks(*count, &ranks.iter().copied().collect::<HashSet<u32>>());
            (!missing.is_empty()).then(|| {
                format!(
                    "of {count} ranks that saved each by itself, no committed part is there of {}",
                    listed("rank", "ranks", &missing)
                )
            })
        }
        (Some(_), Some(_)) => {
            let groups: Vec<String> =
                saves.iter().map(|(save, ranks)| group(*save, ranks)).collect();
            Some(format!("its parts are of different saves: {}", groups.join("; ")))
        }
    }
}

fn group(save: Option<(u32, &str)>, ranks: &[u32]) -> String {
    let ranks = listed("rank", "ranks", ranks);
    match save {
        Some((count, _)) => format!("{ranks} of one by {count} ranks"),
        None => format!("{ranks} of one that does not say by how many"),
    }
}

fn remedy(saves: &Saves<'_>) -> String {
    const GO_BACK: &str = "Resume from an earlier checkpoint, or save again on all ranks";
    if saves.keys().eq([&None]) {
        return "If the part of every rank is there, dcp.load on as many ranks loads it; the next save says \
                how many they are"
            .into();
    }
    match surplus(saves) {
        Some(ranks) => {
            let names: Vec<String> = ranks.iter().map(|rank| names::rank_dir(*rank)).collect();
            format!(
                "{GO_BACK}; without {} it is whole: remove that, if it is of an earlier save",
                some_of(&names)
            )
        }
        None => GO_BACK.into(),
    }
}

/// The ranks beyond those of a save that is whole but for them.
fn surplus(saves: &Saves<'_>) -> Option<Vec<u32>> {
    let whole = |(save, ranks): (&Option<(u32, &str)>, &Vec<u32>)| {
        save.map(|(count, _)| count).filter(|count| ranks.len() == *count as usize)
    };
    let count = saves.iter().find_map(whole)?;
    let beyond: Vec<u32> =
        saves.values().flatten().copied().filter(|rank| *rank >= count).collect();
    let others: usize = saves.values().map(Vec::len).sum::<usize>() - count as usize;
    (beyond.len() == others).then_some(beyond)
}

/// Whether these parts are what the removal of a whole left that was killed. Parts of another save than those
/// that were being removed are somebody's data.
pub(in crate::store) fn removal_was_interrupted(parts: &[PathBuf]) -> bool {
    if !parts.iter().any(|part| has(&part.join(names::RETIRED))) {
        return false;
    }
    let (mut retired, mut stay) = (Vec::new(), Vec::new());
    for part in parts {
        match read_manifest(part) {
            Ok(manifest) => stay.push(save_of(&manifest)),
            Err(Error::Incomplete { .. }) => retired
                .extend(retired_manifest(part).map(|manifest| manifest.as_ref().and_then(save_of))),
            // Nobody can tell what belongs to it.
            Err(_) => return false,
        }
    }
    let first = retired.first();
    first.is_some_and(|first| {
        stay.is_empty()
            || (first.is_some() && retired.iter().chain(&stay).all(|save| save == first))
    })
}

/// Those of a whole's parts that are committed.
///
/// # Errors
/// [`Error::Incomplete`] if none is, nor being removed; those of [`read_manifest`] for one that cannot be
/// read, so that nobody can tell what belongs to it.
pub(in crate::store) fn committed<'a>(dir: &Path, parts: &'a [PathBuf]) -> Result<Vec<&'a Path>> {
    let mut committed = Vec::new();
    for part in parts {
        match read_manifest(part) {
            Ok(_) => committed.push(part.as_path()),
            Err(Error::Incomplete { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    if committed.is_empty() && !removal_was_interrupted(parts) {
        let reason =
            "no rank's part is committed; `ringstow prune` on it removes what was left".into();
        return Err(Error::Incomplete { path: dir.into(), reason });
    }
    Ok(committed)
}

fn save_of(manifest: &Manifest) -> Option<(u32, String)> {
    manifest.part_of.as_ref().map(|of| (of.ranks, of.save.clone()))
}

/// What a checkpoint's manifest said that is being removed: `Some(None)` if it cannot be read.
pub(in crate::store) fn retired_manifest(dir: &Path) -> Option<Option<Manifest>> {
    let path = dir.join(names::RETIRED);
    has(&path).then(|| file::read(&path).ok().and_then(|bytes| Manifest::decode(bytes, &path).ok()))
}
