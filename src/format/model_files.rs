//! Which files of a directory are a model's weights, as `from_pretrained` chooses them: by their names alone. Such a
//! directory may hold the same weights in several formats and precisions (`variant="fp16"`), and files of an earlier save,
//! which must not be mixed. No I/O.

use super::names;
use std::collections::{BTreeMap, BTreeSet};

/// The names in the order in which each program looks for them: transformers, diffusers, PEFT.
const PROGRAMS: [&[&str]; 3] = [
    &[names::MODEL, names::MODEL_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"],
    &[
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin.index.json",
        "diffusion_pytorch_model.bin",
    ],
    &["adapter_model.safetensors", "adapter_model.bin"],
];

/// Several variants of the weights, and none without one.
#[derive(Debug, PartialEq, Eq)]
pub struct Ambiguous {
    /// The variants: `fp16`.
    pub variants: Vec<String>,
    /// Their files.
    pub files: Vec<String>,
}

/// The file of the weights, or the index of their files; `None` if no file has a known name. A variant counts only if
/// there is nothing else.
///
/// # Errors
/// [`Ambiguous`]: only variants, and several of them.
pub fn chosen<'a>(names: &'a [String]) -> Result<Option<&'a str>, Ambiguous> {
    let is_there = |known: &&&str| names.iter().any(|name| name == **known);
    if let Some(known) = PROGRAMS.iter().copied().flatten().find(is_there) {
        return Ok(Some(known));
    }
    let mut variants = BTreeMap::<String, Vec<(usize, &'a str)>>::new();
    for name in names {
        if let Some((rank, variant)) = variant_of(name) {
            variants.entry(variant.into()).or_default().push((rank, name));
        }
    }
    let mut found: Vec<(usize, &str)> = variants.values().flatten().copied().collect();
    if variants.len() < 2 {
        return Ok(found.into_iter().min().map(|(_, name)| name));
    }
    found.sort_unstable_by_key(|(_, name)| *name);
    let files = found.into_iter().map(|(_, name)| name.to_owned()).collect();
    Err(Ambiguous { variants: variants.into_keys().collect(), files })
}

/// The files of weights that no program takes, since it finds others first. Numbered files belong to their index.
pub fn superseded(names: &[String]) -> Vec<&str> {
    let mut found = Vec::new();
    for program in PROGRAMS {
        let mut there = program.iter().filter_map(|known| names.iter().find(|name| name == known));
        if there.next().is_none() {
            continue;
        }
        found.extend(there.map(String::as_str));
        let is_its_shard = |name: &&String| {
            let stem = names::numbered(name).map(|(stem, ..)| stem);
            stem.is_some_and(|stem| {
                program.iter().any(|known| known.starts_with(&format!("{stem}.")))
            })
        };
        found.extend(names.iter().filter(is_its_shard).map(String::as_str));
    }
    found
}

/// Files such as `model-00001-of-00003.safetensors`.
#[derive(Debug, PartialEq, Eq)]
pub struct NumberedSet<'a> {
    /// The name of its index, whether that is there or not.
    pub index: String,
    /// Those that are there, in the order given.
    pub files: Vec<&'a str>,
    /// Those that are not, the first thousand.
    pub missing: Vec<String>,
}

/// The sets of numbered files among these.
pub fn numbered_sets(names: &[String]) -> Vec<NumberedSet<'_>> {
    /// A file's name claims how many there are, so that may be huge.
    const LISTED_MAX: usize = 1000;
    let mut sets = BTreeMap::<(&str, &str, usize), (BTreeSet<usize>, Vec<&str>)>::new();
    for name in names {
        if let Some((stem, number, count)) = names::numbered(name) {
            let (_, ending) = name.rsplit_once('.').expect("a numbered name has an ending");
            let (numbers, files) = sets.entry((stem, ending, count)).or_default();
            numbers.insert(number);
            files.push(name);
        }
    }
    let set =
        |((stem, ending, count), (numbers, files)): ((&str, &str, usize), (BTreeSet<_>, _))| {
            let absent = (1..=count).filter(|number| !numbers.contains(number)).take(LISTED_MAX);
            let missing = absent.map(|number| format!("{stem}-{number:05}-of-{count:05}.{ending}"));
            NumberedSet {
                index: format!("{stem}.{ending}.index.json"),
                files,
                missing: missing.collect(),
            }
        };
    sets.into_iter().map(set).collect()
}

/// Whether this is the name of an index: a list of the files of a model.
pub fn is_index(name: &str) -> bool {
    name.ends_with(".json") && name.contains(".index.")
}

/// The rank of the name without the variant in it, and the variant; `None` for any other name, and for a shard.
fn variant_of(name: &str) -> Option<(usize, &str)> {
    let parts: Vec<&str> = name.split('.').collect();
    if parts.iter().any(|part| names::split_number(part).is_some()) {
        return None;
    }
    (1..parts.len().saturating_sub(1)).find_map(|number| {
        let plain = [&parts[..number], &parts[number + 1..]].concat().join(".");
        let rank = PROGRAMS.iter().copied().flatten().position(|known| *known == plain)?;
        Some((rank, parts[number]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(names: &[&str]) -> Result<Option<String>, Ambiguous> {
        let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
        chosen(&names).map(|name| name.map(str::to_owned))
    }

    #[test]
    fn first_name_that_a_program_looks_for_is_chosen() {
        for (expected, names) in [
            (Some("model.safetensors"), &["model.safetensors.index.json", "model.safetensors"][..]),
            (
                Some("model.safetensors.index.json"),
                &["model.safetensors.index.json", "model.fp16.safetensors"],
            ),
            (Some("pytorch_model.bin"), &["other.safetensors", "pytorch_model.bin"]),
            (Some("model.fp16.safetensors"), &["model.fp16.safetensors", "pytorch_model.fp16.bin"]),
            (
                Some("model.safetensors.index.fp16.json"),
                &["model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"],
            ),
            (None, &["x.safetensors", "model.safetensors.part"]),
        ] {
            assert_eq!(choice(names).unwrap().as_deref(), expected, "{names:?}");
        }
    }

    #[test]
    fn several_variants_are_ambiguous() {
        let error = choice(&["model.fp32.safetensors", "model.fp16.safetensors"]).unwrap_err();
        assert_eq!(error.variants, ["fp16", "fp32"]);
        assert_eq!(error.files, ["model.fp16.safetensors", "model.fp32.safetensors"]);
    }

    #[test]
    fn files_that_no_program_takes_are_superseded() {
        let names =
            ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "x.bin"];
        let names: Vec<String> = names.map(String::from).into();
        assert_eq!(superseded(&names), ["pytorch_model.bin", "model-00001-of-00002.safetensors"]);
        assert!(superseded(&names[1..2]).is_empty());
    }
    #[test]
    fn numbered_set_knows_its_index_and_what_is_missing() {
        let names =
            ["x-00002-of-00003.bin", "x-00001-of-00001.safetensors", "x.bin", "x-1-of-2.bin"];
        let names: Vec<String> = names.map(String::from).into();
        let [bin, safe] = <[_; 2]>::try_from(numbered_sets(&names)).unwrap();
        assert_eq!(bin.index, "x.bin.index.json");
        assert_eq!(bin.files, ["x-00002-of-00003.bin"]);
        assert_eq!(bin.missing, ["x-00001-of-00003.bin", "x-00003-of-00003.bin"]);
        assert_eq!((safe.files.len(), safe.missing.len()), (1, 0));
        let huge = vec!["x-00001-of-99999999999.bin".to_owned()];
        assert_eq!(numbered_sets(&huge)[0].missing.len(), 1000);
    }
}
