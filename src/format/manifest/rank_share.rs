//! A rank's share of a tensor set, where each rank saved by itself.

use serde::{Deserialize, Serialize};

/// Ranks that may share a tensor set at most. A bound, because the missing ranks are listed.
pub(crate) const RANKS_MAX: u32 = 1 << 24;

/// Which share of a tensor set a manifest lists. Several ranks saved the set, each its share as a
/// checkpoint of its own. A share may have only regions of a sharded tensor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankShare {
    /// The rank whose share this is, from 0 on.
    pub rank: u32,
    /// Ranks that saved.
    pub ranks: u32,
    /// Identifies the save: the same text in all shares of one save, another text in every other save.
    pub save: String,
}

impl RankShare {
    /// Reads a manifest's share without keeping or checking anything else, the trailer checksum included.
    /// `None` also if the manifest is unreadable.
    pub(crate) fn noted_in(manifest: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Noted {
            part_of: Option<RankShare>,
        }
        serde_json::from_slice::<Noted>(manifest).ok()?.part_of
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let Self { rank, ranks, .. } = self;
        if rank >= ranks {
            return Err(format!("part_of is rank {rank} of {ranks}, which are counted from 0"));
        }
        if *ranks > RANKS_MAX {
            return Err(format!("part_of is of {ranks} ranks, more than {RANKS_MAX}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_share_is_read_from_damaged_manifests() {
        for (manifest, noted) in [
            (r#"{"part_of": {"rank": 1, "ranks": 2, "save": "a"}, "state": {}}"#, true),
            (r#"{"state": {"part_of": {"rank": 1, "ranks": 2, "save": "a"}}}"#, false),
            (r#"{"part_of": {"rank": 1"#, false),
            (r#"{"part_of": []}"#, false),
            (r#"{"part_of": {}}"#, false),
            ("", false),
        ] {
            let part_of = RankShare { rank: 1, ranks: 2, save: "a".into() };
            let expected = noted.then_some(part_of);
            assert_eq!(RankShare::noted_in(manifest.as_bytes()), expected, "{manifest}");
        }
    }
}
