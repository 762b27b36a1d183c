//! What a manifest is a part of, where ranks saved each by itself.

use serde::{Deserialize, Serialize};

/// As many ranks as a whole may be of: whoever lists those that are missing makes a list of them.
pub(crate) const RANKS_MAX: u32 = 1 << 24;

/// A whole that several ranks saved, each its own part as a checkpoint by itself. Of a tensor that was
/// sharded, a part may hold only some.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankShare {
    /// Whose part this is, from 0 on.
    pub rank: u32,
    /// Ranks that saved.
    pub ranks: u32,
    /// Which save it was: the same text in all parts of one, another in every other into the directory.
    pub save: String,
}

impl RankShare {
    /// What a manifest says that it is a part of, with nothing else of it kept or checked, nor its trailer checksum. `None`
    /// also where that cannot be read.
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
    fn who_only_asks_what_a_manifest_is_a_part_of_is_told_of_no_damage() {
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
