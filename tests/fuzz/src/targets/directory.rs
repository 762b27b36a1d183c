//! A directory of arbitrary files under the names that ringstow looks for. Each entry is a byte for the name, two for
//! the length, then the content.

use super::manifest::sealed;
use crate::input::Input;
use crate::memory;
use ringstow::{Checkpoint, Config, OpenOptions, Value};
use std::fs;
use std::path::Path;

const NAMES: [&str; 13] = [
    "manifest.json",
    "manifest.json", // likelier than the others
    "manifest.json.retired",
    "manifest.json.part",
    "rank00000-0.safetensors",
    "rank00000-0.safetensors.part",
    "rank00001-0.safetensors",
    "model.safetensors.index.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "companion.json",
    ".metadata",
    "rank00000.done.part",
];

pub fn run(data: &[u8]) {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let dir = root.path().join("step-1");
    fs::create_dir(&dir).unwrap();
    let (mut input, mut size) = (Input(data), 0);
    while !input.0.is_empty() {
        let name = NAMES[input.below(NAMES.len())];
        let len = usize::from(input.byte()) << 8 | usize::from(input.byte());
        let content = input.bytes(len);
        let bytes = match name.starts_with("manifest.json") {
            true => sealed(content),
            false => content.to_vec(),
        };
        size += bytes.len();
        fs::write(dir.join(name), bytes).unwrap();
    }
    look(&dir, size);
}

/// Everything that looks into a directory returns, and in little memory.
fn look(dir: &Path, size: usize) {
    // Paths and messages.
    const CONSTANT: usize = 256 << 10;
    memory::bounded(size, CONSTANT, || drop(Checkpoint::open(dir)));
    memory::bounded(size, CONSTANT, || drop(OpenOptions::new().foreign(true).open(dir)));
    memory::bounded(size, CONSTANT, || drop(ringstow::latest(dir)));
    memory::bounded(size, CONSTANT, || drop(ringstow::latest(dir.parent().unwrap())));
    memory::bounded(size, CONSTANT, || {
        drop(ringstow::Store::found().unwrap().list(dir.parent().unwrap()))
    });
    memory::bounded(size, CONSTANT, || {
        drop(ringstow::internals::store::prune_plan(dir, &Config::default()))
    });
    let Ok(opened) = OpenOptions::new().damaged(true).open(dir) else { return };
    let info = opened.info();
    assert_eq!(info.tensors, opened.tensors().len());
    for tensor in opened.tensors() {
        assert_eq!(opened.tensor(&tensor.name), Some(tensor));
    }
    let _ = opened.state().map(|state| state.get("step").map(Value::as_int));
}
