//! What each rank checks before it loads its own share of a checkpoint whose ranks saved each by itself. A rank compares
//! its share with that of rank 0, and rank 0 checks that all shares are there. So a load by n ranks reads 2 n
//! manifests, not n squared.

use crate::error::{Error, Result, numbered};
use crate::format::{RankShare, names};
use crate::store::layout::manifest;
use crate::sys::dir::look_at;
use std::path::Path;

/// Ranks that one error names.
const SHOWN_MAX: usize = 20;

/// Refuses to load the share of `rank` in `dir` if it is missing, or is not of the same save as rank 0's. Rank 0 refuses
/// if any rank's share is missing. Shares that do not name their save (older versions wrote them, or ranks that could
/// not know) are accepted if rank 0's does not either.
///
/// # Errors
/// [`Error::MissingShare`] names the share and says what to do; [`Error::Io`].
pub fn check_own_share(dir: &Path, rank: u32) -> Result<()> {
    let first = Share::read(dir, 0)?;
    let own = if rank == 0 { first.clone() } else { Share::read(dir, rank)? };
    let others = || match (rank, &first) {
        (0, Share::Of(share)) => missing(&absent(dir, share.ranks), share.ranks),
        _ => None,
    };
    match problem_of(rank, &own, &first).or_else(others) {
        None => Ok(()),
        Some(reason) => Err(Error::MissingShare { path: dir.into(), reason }),
    }
}

/// What a rank's directory holds.
#[derive(Clone, PartialEq)]
enum Share {
    /// Nothing that is committed. Links and pipes do not count.
    Absent,
    /// A share whose manifest does not name its save, or is damaged, which opening it reports.
    Unnamed,
    Of(RankShare),
}

impl Share {
    fn read(dir: &Path, rank: u32) -> Result<Self> {
        if !is_committed(dir, rank) {
            return Ok(Self::Absent);
        }
        let bytes = manifest::read_bytes(&dir.join(names::rank_dir(rank)))?;
        Ok(bytes.map_or(Self::Absent, |bytes| {
            RankShare::noted_in(&bytes).map_or(Self::Unnamed, Self::Of)
        }))
    }

    fn save(&self) -> Option<(u32, &str)> {
        match self {
            Self::Of(share) => Some((share.ranks, &share.save)),
            _ => None,
        }
    }

    fn described(&self) -> String {
        match self.save() {
            Some((ranks, save)) => format!("save {save} by {ranks} ranks"),
            None => "a save that its manifest does not name".into(),
        }
    }
}

/// What is wrong with the share of `rank`, compared with that of rank 0, and what to do; `None` if nothing is.
fn problem_of(rank: u32, own: &Share, first: &Share) -> Option<String> {
    let name = names::rank_dir(rank);
    match (own, first) {
        (Share::Absent, Share::Of(first)) if rank >= first.ranks => Some(format!(
            "{0} ranks saved it, each by itself: load it on {0} ranks, not on more",
            first.ranks
        )),
        (Share::Absent, Share::Of(first)) => missing(&[rank], first.ranks),
        (Share::Absent, _) | (Share::Unnamed, Share::Absent) => None,
        (Share::Of(own), _) if own.rank != rank => {
            Some(format!("{name} holds the share of rank {}: was it renamed? {REMEDY}", own.rank))
        }
        (Share::Of(own), Share::Absent) => missing(&[0], own.ranks),
        _ if own.save() == first.save() => None,
        _ => Some(format!(
            "its shares must be of one save, but {name} is of {}, and {} of {}. {REMEDY}",
            own.described(),
            names::rank_dir(0),
            first.described()
        )),
    }
}

const REMEDY: &str = "Resume from an earlier checkpoint, which ringstow.latest finds, or save again on all ranks. \
                      `ringstow ls` lists the shares that are there. To load one share alone, give its own directory";

fn missing(absent: &[u32], ranks: u32) -> Option<String> {
    let shown = &absent[..absent.len().min(SHOWN_MAX)];
    let more = if absent.len() > SHOWN_MAX { " and more" } else { "" };
    let first = names::rank_dir(*absent.first()?);
    Some(format!(
        "{ranks} ranks saved it, each by itself, and the committed share of {}{more} is missing ({first}). {REMEDY}",
        numbered("rank", shown)
    ))
}

/// The ranks without a committed share, as many as an error names and one more.
fn absent(dir: &Path, ranks: u32) -> Vec<u32> {
    (0..ranks).filter(|rank| !is_committed(dir, *rank)).take(SHOWN_MAX + 1).collect()
}

fn is_committed(dir: &Path, rank: u32) -> bool {
    let manifest = dir.join(names::rank_dir(rank)).join(names::MANIFEST);
    look_at(&manifest).is_ok_and(|found| found.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rank: u32, ranks: u32, save: &str) -> Share {
        Share::Of(RankShare { rank, ranks, save: save.into() })
    }

    #[test]
    fn share_of_a_rank_is_compared_with_that_of_rank_0() {
        let (first, unnamed, absent) = (of(0, 3, "a-1"), Share::Unnamed, Share::Absent);
        for (rank, own, first) in [
            (1, &of(1, 3, "a-1"), &first),
            (0, &first, &first),
            // These cannot be told apart from good ones.
            (1, &unnamed, &unnamed),
            (1, &unnamed, &absent),
            (1, &absent, &unnamed),
            (0, &absent, &absent),
        ] {
            assert_eq!(problem_of(rank, own, first), None);
        }
        let problem = |rank, own: &Share, first| problem_of(rank, own, first).unwrap();
        assert!(problem(1, &absent, &first).contains("of rank 1 is missing (rank00001)"));
        let lacks_first = problem(1, &of(1, 3, "a-1"), &absent);
        assert!(lacks_first.contains("of rank 0 is missing (rank00000)"));
        assert!(problem(3, &absent, &first).contains("load it on 3"));
        assert!(problem(2, &of(1, 3, "a-1"), &first).contains("share of rank 1: was it renamed"));
        let two = problem(1, &of(1, 3, "b-1"), &first);
        assert!(two.contains("is of save b-1 by 3 ranks, and rank00000 of save a-1 by 3 ranks"));
        // Also if the process groups of two saves were of different ranks.
        assert!(problem(1, &of(1, 4, "a-1"), &first).contains("by 4 ranks"));
        let own = problem(1, &unnamed, &first);
        assert!(own.contains("rank00001 is of a save that its manifest does not name"));
        let other = problem(1, &of(1, 3, "a-1"), &unnamed);
        assert!(other.contains("rank00000 of a save that its manifest does not name"));
    }
}
