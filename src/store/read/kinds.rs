//! Which program wrote a checkpoint that is not ringstow's, by the names of its files. Reads no tensor.

use crate::error::{Error, Result};
use crate::format::model_files::is_index;
use crate::format::names::{self, DCP_MARK};
use crate::sys::dir::{self, file_names};
use crate::sys::file;
use std::path::{Path, PathBuf};

/// The kinds of other programs' checkpoints, and what each is.
pub const KINDS: [(&str, &str); 9] = [
    ("torch", "a file, by torch.save, such as Lightning's .ckpt"),
    ("dcp", "a directory with .metadata, by torch.distributed.checkpoint"),
    ("lightning", "a directory with .metadata and meta.pt, by Lightning's sharded strategies"),
    ("trainer", "a directory with trainer_state.json, by Transformers' Trainer"),
    ("accelerate", "a directory with random_states_0.pkl, by Accelerate's save_state"),
    ("deepspeed", "a directory with *_model_states.pt, or latest, by DeepSpeed"),
    ("megatron", "a directory with metadata.json, by Megatron-Core's torch_dist"),
    ("hf", "a directory of *.safetensors files, by Hugging Face's programs"),
    ("safetensors", "a *.safetensors file"),
];

/// How the names of files by `torch.save` end.
pub const TORCH_ENDINGS: [&str; 5] = [".pt", ".pth", ".bin", ".ckpt", ".tar"];

/// How the names of DeepSpeed's files with a model's state end.
const MODEL_STATES: &str = "_model_states.pt";

/// The kind of checkpoint of another program at a path, of [`KINDS`]; `None` if none is recognized, and for ringstow's own
/// checkpoints, with their manifest or without.
///
/// # Errors
/// [`Error::NotCommitted`] if a save of the program has not ended; [`Error::Unsupported`] for a format that is not read, and
/// for one file of a ringstow checkpoint; [`Error::Io`].
pub fn kind_of(path: &Path) -> Result<Option<&'static str>> {
    Ok(kind_and_names(path)?.0)
}

/// The same, and the names of the files in a directory of another program.
pub(in crate::store) fn kind_and_names(path: &Path) -> Result<(Option<&'static str>, Vec<String>)> {
    if !dir::is_dir(path) {
        return Ok((kind_of_file(path)?, Vec::new()));
    }
    if dir::is_file(&path.join(names::MANIFEST)) {
        return Ok((None, Vec::new())); // before the directory of thousands of ranks is listed
    }
    let names = file_names(path)?;
    Ok((kind_among(path, &names)?, names))
}

fn kind_among(path: &Path, names: &[String]) -> Result<Option<&'static str>> {
    let has = |name: &str| names.iter().any(|there| there == name);
    let any = |is_it: fn(&str) -> bool| names.iter().any(|name| is_it(name));
    let kind = if any(names::is_shard) {
        return Ok(None);
    } else if let Some(backend) = megatrons_backend(path).filter(|_| has("metadata.json")) {
        return megatron(path, &backend, has(DCP_MARK)).map(Some);
    } else if has("trainer_state.json") {
        "trainer"
    } else if deepspeed_among(path, names).is_some() {
        "deepspeed"
    } else if has(DCP_MARK) {
        if has("meta.pt") { "lightning" } else { "dcp" }
    } else if any(|name| is_numbered(name, "random_states_", ".pkl")) {
        "accelerate"
    } else if any(is_accelerates) {
        return Err(unfinished(path, "Accelerate's save_state", "random_states_0.pkl"));
    } else if any(is_trainers) {
        return Err(unfinished(path, "Transformers' Trainer", "trainer_state.json"));
    } else if any(is_weights) {
        "hf"
    } else {
        return Ok(None);
    };
    Ok(Some(kind))
}

fn kind_of_file(path: &Path) -> Result<Option<&'static str>> {
    if !dir::is_file(path) {
        return Ok(None);
    }
    if is_model_file(path)? {
        return Ok(Some("safetensors"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // A link may lead to a file in the cache of the hub, whose name has no ending.
    let head = file::read_start(&dir::real(path)?, 4);
    let head = head.map_err(|error| Error::io("reading", path, error))?;
    let is_zip = head == b"PK\x03\x04" && !name.ends_with(".npz");
    let is_torch = is_zip || TORCH_ENDINGS.iter().any(|ending| name.ends_with(ending));
    Ok(is_torch.then_some("torch"))
}

/// Whether a path is a safetensors file or the index of several.
///
/// # Errors
/// [`Error::Unsupported`] for a shard of a ringstow checkpoint.
pub(in crate::store) fn is_model_file(path: &Path) -> Result<bool> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if !(name.ends_with(".safetensors") || is_index(&name)) || !dir::is_file(path) {
        return Ok(false);
    }
    if !names::is_shard(&name) {
        return Ok(true);
    }
    let what = format!(
        "{} is one file of a ringstow checkpoint, which may hold only parts of tensors",
        path.display()
    );
    Err(Error::Unsupported { what, remedy: format!("load {}", directory_of(path).display()) })
}

pub(in crate::store) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The directory with DeepSpeed's files: the path, or the one that its file `latest` names; `None` if neither has any.
pub fn deepspeed_directory(path: &Path) -> Option<PathBuf> {
    deepspeed_among(path, &file_names(path).unwrap_or_default())
}

fn deepspeed_among(path: &Path, names: &[String]) -> Option<PathBuf> {
    let holds = |names: &[String]| names.iter().any(|name| name.ends_with(MODEL_STATES));
    if holds(names) {
        return Some(path.into());
    }
    let text = file::read_given(path.join("latest"), 1024).ok()?;
    let tag = std::str::from_utf8(&text).ok()?.trim();
    let is_name = !tag.contains('/') && !["", ".", ".."].contains(&tag);
    let is_tag = |inside: &PathBuf| file_names(inside).is_ok_and(|names| holds(&names));
    Some(path.join(tag)).filter(|inside| is_name && is_tag(inside))
}

/// The backend of a Megatron-Core checkpoint; `None` if the file is missing or another program's.
fn megatrons_backend(dir: &Path) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        sharded_backend: String,
    }
    let text = file::read_given(dir.join("metadata.json"), 1 << 20).ok()?;
    serde_json::from_slice::<Metadata>(&text).ok().map(|found| found.sharded_backend)
}

fn megatron(path: &Path, backend: &str, is_committed: bool) -> Result<&'static str> {
    if !["torch_dist", "torch_dcp"].contains(&backend) {
        let what = format!(
            "{} is a checkpoint of Megatron-Core with the backend '{backend}', and only torch_dist is read",
            path.display()
        );
        let remedy = "load it with Megatron, and save it with --dist-ckpt-format torch_dist".into();
        return Err(Error::Unsupported { what, remedy });
    }
    match is_committed {
        true => Ok("megatron"),
        false => Err(unfinished(path, "Megatron-Core", DCP_MARK)),
    }
}

fn unfinished(path: &Path, program: &str, last: &str) -> Error {
    let reason = format!(
        "it is of {program} and lacks {last}, which that writes last: the save was killed or is in progress. Resume from \
         an earlier checkpoint; ringstow.load reads single files of it"
    );
    Error::NotCommitted { path: path.into(), reason }
}

/// Whether a name is `stem`, a number and `ending`.
fn is_numbered(name: &str, stem: &str, ending: &str) -> bool {
    let number = name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(ending));
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_accelerates(name: &str) -> bool {
    ["optimizer", "scheduler", "sampler", "dl_state_dict"].iter().any(|stem| {
        name.strip_prefix(stem).is_some_and(|rest| rest == ".bin" || is_numbered(rest, "_", ".bin"))
    })
}

fn is_trainers(name: &str) -> bool {
    ["optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth"].contains(&name)
        || is_numbered(name, "rng_state_", ".pth")
}

/// Whether a file holds weights: by its ending, or by a name that Hugging Face's programs give files of `torch.save`.
fn is_weights(name: &str) -> bool {
    let plain = name.strip_suffix(".index.json").unwrap_or(name);
    let stem = plain.strip_prefix("diffusion_").unwrap_or(plain);
    name.ends_with(".safetensors")
        || (stem.starts_with("pytorch_model")
            && plain.ends_with(".bin")
            && ["pytorch_model.", "pytorch_model-"].iter().any(|begin| stem.starts_with(begin)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn programs_are_recognized_by_the_names_of_their_files() {
        for (kind, names) in [
            (Some("trainer"), &["trainer_state.json", "optimizer.pt"][..]),
            (Some("lightning"), &[".metadata", "meta.pt", "__0_0.distcp"]),
            (Some("dcp"), &[".metadata", "__0_0.distcp"]),
            (Some("accelerate"), &["random_states_0.pkl", "optimizer.bin"]),
            (Some("deepspeed"), &["mp_rank_00_model_states.pt"]),
            (Some("hf"), &["pytorch_model.fp16.bin"]),
            (Some("hf"), &["diffusion_pytorch_model-00001-of-00002.bin"]),
            (Some("hf"), &["pytorch_model.bin.index.json"]),
            (Some("hf"), &["x.safetensors", "config.json"]),
            (None, &["rank00000-0.safetensors", "optimizer.pt"]),
            (None, &["pytorch_model_fsdp.bin", "random_states_.pkl", "notes.txt"]),
        ] {
            let root = tempfile::tempdir().unwrap();
            names.iter().for_each(|name| fs::write(root.path().join(name), "x").unwrap());
            assert_eq!(kind_of(root.path()).unwrap(), kind, "{names:?}");
        }
    }

    #[test]
    fn unfinished_save_of_another_program_is_named() {
        for (program, name) in [("Accelerate", "scheduler_1.bin"), ("Trainer", "rng_state_3.pth")] {
            let root = tempfile::tempdir().unwrap();
            fs::write(root.path().join(name), "x").unwrap();
            let error = kind_of(root.path()).unwrap_err();
            assert!(matches!(&error, Error::NotCommitted { .. }), "{error:?}");
            assert!(error.to_string().contains(program), "{error}");
        }
    }

    #[test]
    fn backend_of_megatron_is_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        write("metadata.json", r#"{"sharded_backend": "zarr"}"#);
        assert!(matches!(kind_of(root.path()), Err(Error::Unsupported { .. })));
        write("metadata.json", r#"{"sharded_backend": "torch_dist"}"#);
        assert!(matches!(kind_of(root.path()), Err(Error::NotCommitted { .. })));
        write(DCP_MARK, "x");
        assert_eq!(kind_of(root.path()).unwrap(), Some("megatron"));
        write("metadata.json", "[]");
        assert_eq!(kind_of(root.path()).unwrap(), Some("dcp"));
    }
}
