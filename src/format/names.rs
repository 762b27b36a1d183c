//! Names of files in a checkpoint's directory.

/// The manifest: its presence is the commit.
pub const MANIFEST: &str = "manifest.json";

/// The manifest's name before the commit renames it.
pub const UNCOMMITTED_MANIFEST: &str = "manifest.json.part";

/// The beginning of a [`given_up`] name.
const GIVEN_UP: &str = "given-up";

/// The manifest's name while its checkpoint is being removed, until the shards are gone.
pub const REMOVAL_MARK: &str = "manifest.json.retired";

/// The last file that PyTorch writes into its own checkpoints. Under DCP ringstow writes a dummy beside its manifest, for
/// programs that check that the file exists.
pub const DCP_MARK: &str = ".metadata";

/// The [`DCP_MARK`] until it is renamed.
pub const UNCOMMITTED_DCP_MARK: &str = ".metadata.part";

/// Bytes in every [`DCP_MARK`] that ringstow wrote.
pub const DCP_MARK_WORDS: &[u8] = b"ringstow.dcp._mark";

/// Bytes near the beginning of every [`DCP_MARK`] that PyTorch wrote.
pub const DCP_TORCH_WORDS: &[u8] = b"torch.distributed.checkpoint.metadata";

/// PyTorch's name for rank 0's [`DCP_MARK`] if each rank saves by itself.
pub const DCP_RANK_MARK: &str = "__0.metadata";

/// The file in a directory of checkpoints that identifies it, where ranks on other nodes do not see it.
pub const NODE: &str = ".ringstow-node.json";

/// The file in a directory of checkpoints that says which run they are of.
pub const RUN: &str = ".ringstow-run.json";

/// Directory beside the checkpoints for recycled files.
pub const RECYCLED_DIR: &str = ".ringstow-spares";

/// The marker of a stripe directory, which names the checkpoint that its shards belong to.
pub const STRIPE_MARKER: &str = "companion.json";

/// The marker's name before it is renamed into place.
pub const UNCOMMITTED_STRIPE_MARKER: &str = "companion.json.part";

/// Ending of every uncommitted file. Readers of safetensors ignore such files.
pub const UNCOMMITTED_SUFFIX: &str = ".part";

/// Prefix of the tensors in shards that hold what safetensors cannot express.
pub const RESERVED_PREFIX: &str = "__ringstow__.";

/// Name of a shard: `rank00000-0.safetensors`. Later saves into the same directory add the generation, so that they never
/// write over files of an earlier one: `rank00000-0.g1.safetensors`.
pub fn shard(rank: u32, index: usize, generation: u64) -> String {
    match generation {
        0 => format!("rank{rank:05}-{index}.safetensors"),
        g => format!("rank{rank:05}-{index}.g{g}.safetensors"),
    }
}

/// Name of file number `index`, from 0, of `count` files with a model's weights, as Hugging Face's programs name them.
pub fn model_shard(index: usize, count: usize) -> String {
    match count {
        1 => MODEL.into(),
        _ => numbered_model_shard(index + 1, count),
    }
}

/// Name of the file with this number, from 1, of `count` files with a model's weights.
pub fn numbered_model_shard(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Name of a shard that was promoted. There `id` tells its checkpoint from others, as if that were its generation.
pub fn promoted(name: &str, id: u64) -> String {
    let stem = || name.strip_suffix(".safetensors").unwrap_or(name);
    format!("{}.g{id}.safetensors", without_generation(name).unwrap_or_else(stem))
}

/// Ids of promoted checkpoints begin here: no directory comes to so many saves.
pub const PROMOTED_MIN: u64 = 1 << 51;

/// Whether a shard was promoted, by any of its names.
pub fn is_promoted(name: &str) -> bool {
    let shard = committed(name);
    is_shard(shard) && generation(shard) >= PROMOTED_MIN
}

/// Directory beside the checkpoints for the journals of promotions.
pub const JOURNALS: &str = ".ringstow-promotions";

/// The journal of a promotion, in its directory.
pub const JOURNAL: &str = "journal.jsonl";

/// The file of a model that has only one.
pub const MODEL: &str = "model.safetensors";

/// The index of a model with several files: which weights are in which file.
pub const MODEL_INDEX: &str = "model.safetensors.index.json";

/// What an export creates first on a file system that other hosts may use, so that no other host exports into the same
/// directory. It stays with the model.
pub const MODEL_CLAIM: &str = ".ringstow-model";

/// Whether this is a file that an unfinished export left behind.
pub fn is_uncommitted_model(name: &str) -> bool {
    let Some(part) = name.strip_suffix(UNCOMMITTED_SUFFIX) else { return false };
    // Several ranks write to names that are unique to one export.
    let name = split_unique(name).map_or(part, |(name, _)| name);
    let is_numbered =
        || name.starts_with("model-") && is_confined(name) && numbered(name).is_some();
    name == MODEL_INDEX || name == MODEL || is_numbered()
}

/// Splits the name of one of several files, such as `model-00002-of-00003.safetensors`, into their common name
/// (`model`), the file's number from 1, and the number of files. Files by `torch.save` end in `.bin`.
pub fn numbered(name: &str) -> Option<(&str, usize, usize)> {
    split_number(name.strip_suffix(".safetensors").or_else(|| name.strip_suffix(".bin"))?)
}

/// As [`numbered`], of a name without its ending.
pub fn split_number(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let number = |text: &str| match text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    };
    Some((stem, number(index)?, number(count)?))
}

/// Name of a shard until its checkpoint is committed.
pub fn uncommitted(name: &str) -> String {
    format!("{name}{UNCOMMITTED_SUFFIX}")
}

/// Name of a shard while one of several ranks writes it. `write` is unique to this write, so that no other process ever
/// uses the name. The coordinator renames the file to [`uncommitted`].
pub fn uncommitted_write(name: &str, write: &str) -> String {
    format!("{name}.{write}{UNCOMMITTED_SUFFIX}")
}

/// The shard and the write in a [`uncommitted_write`] name.
pub fn split_write(name: &str) -> Option<(&str, &str)> {
    split_unique(name).filter(|(shard, _)| is_shard(shard))
}

/// The name and the unique text, of sixteen hex digits, in an uncommitted file's name.
fn split_unique(name: &str) -> Option<(&str, &str)> {
    let (name, unique) = name.strip_suffix(UNCOMMITTED_SUFFIX)?.rsplit_once('.')?;
    let is_hex = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (unique.len() == 16 && unique.bytes().all(is_hex)).then_some((name, unique))
}

/// Whether this is the name of a label of a run or a node before it is renamed into place.
pub fn is_uncommitted_label(name: &str) -> bool {
    split_unique(name).is_some_and(|(name, _)| matches!(name, RUN | NODE))
}

/// The name of a shard once it is committed, from any of its names.
pub fn committed(name: &str) -> &str {
    let part = || name.strip_suffix(UNCOMMITTED_SUFFIX).unwrap_or(name);
    split_write(name).map_or_else(part, |(shard, _)| shard)
}

/// A manifest's name before the commit renames it, where other hosts may save to the directory as well: no other save
/// has the same `unique` text.
pub fn unique_manifest(unique: &str) -> String {
    format!("{MANIFEST}.{unique}{UNCOMMITTED_SUFFIX}")
}

/// A marker's name before it is renamed into place, where other hosts may save as well.
pub fn unique_stripe_marker(unique: &str) -> String {
    format!("{STRIPE_MARKER}.{unique}{UNCOMMITTED_SUFFIX}")
}

/// Whether this is a marker's name before it is renamed into place.
pub fn is_uncommitted_stripe_marker(name: &str) -> bool {
    name == UNCOMMITTED_STRIPE_MARKER
        || split_unique(name).is_some_and(|(name, _)| name == STRIPE_MARKER)
}

/// The file that marks that a rank has written its shards, for diagnosis if others have not. Removed at the commit.
pub fn done(rank: u32) -> String {
    format!("rank{rank:05}.done{UNCOMMITTED_SUFFIX}")
}

/// The rank in a [`done`] name.
pub fn done_rank(name: &str) -> Option<u32> {
    name.strip_prefix("rank")?.strip_suffix(UNCOMMITTED_SUFFIX)?.strip_suffix(".done")?.parse().ok()
}

/// The file by which a rank says that it has given up the save of this session. Removed with the save.
pub fn given_up(session: &str) -> String {
    format!("{GIVEN_UP}.{session}{UNCOMMITTED_SUFFIX}")
}

/// The session in a [`given_up`] name.
pub fn given_up_session(name: &str) -> Option<&str> {
    split_unique(name).filter(|(name, _)| *name == GIVEN_UP).map(|(_, session)| session)
}

/// Name of the recycled file of a shard. A shard of the same rank and number in another checkpoint writes over it.
/// `None` if `name` is not a [`shard`] name.
pub fn recycled(name: &str) -> Option<String> {
    Some(format!("{}.spare", without_generation(name)?))
}

/// A [`shard`] name without its generation and ending: `rank00000-0`. `None` for any other name.
fn without_generation(name: &str) -> Option<&str> {
    let stem = is_shard(name).then(|| name.strip_suffix(".safetensors"))??;
    Some(stem.split_once(".g").map_or(stem, |(stem, _)| stem))
}

/// Whether this is a [`recycled`] name.
pub fn is_recycled(name: &str) -> bool {
    name.strip_suffix(".spare").is_some_and(|stem| is_shard(&format!("{stem}.safetensors")))
}

/// The rank in a [`shard`] name.
pub fn shard_rank(name: &str) -> Option<u32> {
    is_shard(name).then(|| name.strip_prefix("rank")?.split_once('-')?.0.parse().ok()).flatten()
}

/// Whether this is a [`shard`] name: a file that ringstow may remove.
pub fn is_shard(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors").and_then(|s| s.strip_prefix("rank")) else {
        return false;
    };
    let Some((rank, rest)) = stem.split_once('-') else { return false };
    let (index, generation) = rest.split_once(".g").unwrap_or((rest, "1"));
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    rank.len() >= 5 && number(rank) && number(index) && number(generation)
}

/// The generation in a [`shard`] name; numbers beyond 64 bits count as the largest.
pub fn generation(name: &str) -> u64 {
    let stem = name.trim_end_matches(".safetensors");
    stem.split_once(".g").map_or(0, |(_, number)| number.parse().unwrap_or(u64::MAX - 1))
}

/// Whether this is a file that an unfinished save left behind.
pub fn is_uncommitted(name: &str) -> bool {
    [UNCOMMITTED_MANIFEST, UNCOMMITTED_DCP_MARK].contains(&name)
        || done_rank(name).is_some()
        || name.strip_suffix(UNCOMMITTED_SUFFIX).is_some_and(is_shard)
        || split_unique(name).is_some_and(|(name, _)| {
            [MANIFEST, STRIPE_MARKER, GIVEN_UP].contains(&name) || is_shard(name)
        })
}

/// Whether a cancellation and a rank that were both killed may leave this in a stripe directory without a marker. No
/// committed checkpoint has files of these names.
pub fn is_left_unmarked(name: &str) -> bool {
    is_uncommitted_stripe_marker(name) || split_write(name).is_some()
}

/// Whether this looks like the name of a rank checkpoint's directory: `rank00003`.
pub fn is_rank_dir(name: &str) -> bool {
    name.strip_prefix("rank")
        .is_some_and(|digits| digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// The rank in a [`rank_dir`] name. `None` for any other, such as `rank000003`.
pub fn dir_rank(name: &str) -> Option<u32> {
    let rank: u32 = name.strip_prefix("rank")?.parse().ok()?;
    (rank_dir(rank) == name).then_some(rank)
}

/// The rank in a path whose last part is a [`rank_dir`] name.
pub fn rank_of_dir(path: &std::path::Path) -> Option<u32> {
    dir_rank(path.file_name()?.to_str()?)
}

/// Name of a rank checkpoint's directory, below the checkpoint's.
pub fn rank_dir(rank: u32) -> String {
    format!("rank{rank:05}")
}

/// How the name of a directory begins that is to be renamed.
pub const UNNAMED_PREFIX: &str = ".ringstow-";

/// Whether a directory of this name waits for the rename that gives it a checkpoint's name, or for its removal:
/// `.ringstow-checkpoint-1000`. Integrations of trainers use such names.
pub fn is_unnamed(path: &std::path::Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".ringstow"))
}

/// Whether a directory is never a step by itself: it holds one rank's share, or [has no name yet](is_unnamed).
pub fn is_never_a_step(path: &std::path::Path) -> bool {
    rank_of_dir(path).is_some() || is_unnamed(path)
}

/// Whether a file of this name shows that its directory holds a checkpoint, or the rest of one.
pub fn is_trace(name: &str) -> bool {
    [MANIFEST, REMOVAL_MARK].contains(&name) || is_uncommitted(name) || is_shard(name)
}

/// Whether a manifest may list this name: a safetensors file in the directory itself.
pub fn is_confined(name: &str) -> bool {
    name.ends_with(".safetensors") && is_plain(name)
}

/// Whether this is the name of a file in the directory itself, and of none that programs hide.
pub fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 200
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_recognized_and_foreign_ones_are_not() {
        for own in [shard(0, 0, 0), shard(7, 12, 3), shard(123_456, 0, 0)] {
            assert!(is_shard(&own), "{own}");
            assert!(is_confined(&own));
            assert_eq!(generation(&own), if own.contains(".g3.") { 3 } else { 0 });
            assert!(is_uncommitted(&uncommitted(&own)) && !is_shard(&uncommitted(&own)));
        }
        assert!(is_uncommitted(&done(3)) && done_rank(&done(3)) == Some(3));
        let (session, given_up) = ("0123456789abcdef", given_up("0123456789abcdef"));
        assert!(is_uncommitted(&given_up) && given_up_session(&given_up) == Some(session));
        let (name, write) = (shard(7, 12, 3), "00ff00ff00ff00ff");
        assert_eq!(split_write(&uncommitted_write(&name, write)), Some((&*name, write)));
        assert!(
            is_uncommitted(&uncommitted_write(&name, write))
                && is_uncommitted(&unique_manifest(write))
        );
        assert!(
            !is_uncommitted(&unique_manifest("00FF"))
                && !is_uncommitted("notes.json.00ff00ff00ff00ff.part")
        );
        for one in [name.clone(), uncommitted(&name), uncommitted_write(&name, write)] {
            assert_eq!(committed(&one), name);
        }
        for other in [
            uncommitted(&name),
            uncommitted_write(&name, "00FF"),
            uncommitted_write("model", write),
        ] {
            assert_eq!(split_write(&other), None, "{other}");
        }
        assert_eq!(shard_rank(&shard(7, 12, 3)), Some(7));
        assert_eq!(recycled(&shard(7, 12, 3)).as_deref(), Some("rank00007-12.spare"));
        assert_eq!(recycled(&shard(7, 12, 0)), recycled(&shard(7, 12, 9)));
        assert!(is_recycled("rank00007-12.spare") && !is_recycled("notes.spare"));
        assert_eq!(recycled("model.safetensors"), None);
        assert!(!is_uncommitted("rank00007-12.spare") && !is_uncommitted(REMOVAL_MARK));
        for foreign in ["model.safetensors", "rank0-0.safetensors", "rank00000.safetensors"] {
            assert!(!is_shard(foreign), "{foreign}");
        }
        assert!(is_uncommitted(UNCOMMITTED_MANIFEST) && !is_uncommitted("notes.part"));
        assert!(is_uncommitted(UNCOMMITTED_DCP_MARK) && !is_uncommitted(DCP_MARK));
        assert!(
            is_trace(REMOVAL_MARK)
                && is_trace(&uncommitted(&shard(0, 0, 0)))
                && !is_trace(DCP_MARK)
        );
    }

    #[test]
    fn rank_directory_has_one_name() {
        assert_eq!(dir_rank("rank00003"), Some(3));
        assert_eq!(dir_rank(&rank_dir(123_456)), Some(123_456));
        for other in ["rank000003", "rank3", "rank+0003", "rank99999999999", "step-3", "rank"] {
            assert_eq!(dir_rank(other), None, "{other}");
        }
    }

    #[test]
    fn model_files_have_hugging_face_names() {
        assert_eq!(model_shard(0, 1), "model.safetensors");
        assert_eq!(model_shard(1, 12), "model-00002-of-00012.safetensors");
        for own in [&*model_shard(0, 1), &*model_shard(99_999, 100_000), MODEL_INDEX] {
            assert!(is_uncommitted_model(&uncommitted(own)) && !is_uncommitted_model(own), "{own}");
            assert!(is_uncommitted_model(&uncommitted_write(own, "00ff00ff00ff00ff")), "{own}");
        }
        assert_eq!(numbered("my-model-00002-of-00012.safetensors"), Some(("my-model", 2, 12)));
        for other in ["model-2-of-3.safetensors", "model-00002-of-00003", "model.safetensors"] {
            assert_eq!(numbered(other), None, "{other}");
        }
        for foreign in ["model-x-of-y.safetensors.part", "my-model.safetensors.part", "model.part"]
        {
            assert!(!is_uncommitted_model(foreign), "{foreign}");
        }
    }

    #[test]
    fn names_that_leave_the_directory_are_not_confined() {
        for bad in [
            "../x.safetensors",
            "/x.safetensors",
            "a/b.safetensors",
            "..",
            "",
            "x.bin",
            ".hidden.safetensors",
            "a\0.safetensors",
        ] {
            assert!(!is_confined(bad), "{bad:?}");
        }
    }
}
