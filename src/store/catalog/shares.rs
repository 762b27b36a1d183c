//! Whether the shares that ranks saved each by itself make up one checkpoint.

use crate::error::{numbered, some_of};
use crate::format::names;
use crate::store::catalog::found::{Found, Status};
use crate::store::layout::rank_dirs::removal_was_interrupted;
use crate::store::layout::session_note::missing_ranks;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Whether the checkpoint of these shares can be loaded, and if not, why.
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
            "it is being removed, or what removed it was killed; `ringstow prune` finishes that";
        return incomplete(problem.into());
    }
    let committed: Vec<(u32, &Found)> = parts
        .iter()
        .filter(|part| part.status == Status::Committed)
        .filter_map(|part| Some((names::rank_of_dir(&part.path)?, part)))
        .collect();
    let others = committed.iter().find_map(|(rank, part)| {
        part.part_of.as_ref().filter(|of| of.rank != *rank).map(|of| (part, of.rank))
    });
    if let Some((part, rank)) = others {
        let name = part.path.display();
        return incomplete(format!("{name} holds the share of rank {rank}: was it renamed?"));
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

/// The ranks with committed shares, by the save that each share is of (how many ranks saved, and the save's id).
/// Under `None`, the ranks whose manifests do not name a save.
type Saves<'a> = BTreeMap<Option<(u32, &'a str)>, Vec<u32>>;

fn saves<'a>(committed: &[(u32, &'a Found)]) -> Saves<'a> {
    let mut saves = Saves::new();
    for (rank, part) in committed {
        let save = part.part_of.as_ref().map(|of| (of.ranks, of.save.as_str()));
        saves.entry(save).or_default().push(*rank);
    }
    saves
}

/// Why these are not all shares of one save; `None` if they are.
fn problem_of(saves: &Saves<'_>) -> Option<String> {
    let mut each = saves.iter();
    match (each.next(), each.next()) {
        (None, _) => Some("no rank's share is committed".into()),
        (Some((None, ranks)), None) => Some(format!(
            "{} saved by itself, and the number of ranks is not known: the manifests do not record it (an older \
             ringstow wrote them, or there was no process group)",
            numbered("rank", ranks)
        )),
        (Some((Some((count, _)), ranks)), None) => {
            let missing = missing_ranks(*count, &ranks.iter().copied().collect::<HashSet<u32>>());
            (!missing.is_empty()).then(|| {
                format!(
                    "{count} ranks saved it, each by itself, and the committed share of {} is missing",
                    numbered("rank", &missing)
                )
            })
        }
        (Some(_), Some(_)) => {
            let groups: Vec<String> =
                saves.iter().map(|(save, ranks)| group(*save, ranks)).collect();
            Some(format!("its shares are of different saves: {}", groups.join("; ")))
        }
    }
}

fn group(save: Option<(u32, &str)>, ranks: &[u32]) -> String {
    let ranks = numbered("rank", ranks);
    match save {
        Some((count, _)) => format!("{ranks} of one by {count} ranks"),
        None => format!("{ranks} of one whose manifest does not record the number of ranks"),
    }
}

fn remedy(saves: &Saves<'_>) -> String {
    const GO_BACK: &str = "Resume from an earlier checkpoint, or save again on all ranks";
    if saves.keys().eq([&None]) {
        return "If the parts of all ranks are there, load it by dcp.load on that many ranks. A save with a process \
                group records the number"
            .into();
    }
    match surplus(saves) {
        Some(ranks) => {
            let names: Vec<String> = ranks.iter().map(|rank| names::rank_dir(*rank)).collect();
            format!(
                "{GO_BACK}. Or remove {} if an earlier save left it: the rest is a complete checkpoint",
                some_of(&names)
            )
        }
        None => GO_BACK.into(),
    }
}

/// The ranks that are too many: one save's shares are complete without them.
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
