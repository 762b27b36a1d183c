//! The Rust programs of the docs are programs of `examples/`, which compile; here they run.
#![cfg(unix)]

#[path = "../../examples/background.rs"]
mod background;
#[path = "../../examples/load_part.rs"]
mod load_part;
#[path = "../../examples/manager.rs"]
mod manager;
#[path = "../../examples/quickstart.rs"]
mod quickstart;
#[path = "../../examples/stream.rs"]
mod stream;
#[path = "../../examples/tiers.rs"]
mod tiers;

use crate::common::{is_alone, scratch};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The blocks of a page that are marked as Rust.
fn rust_blocks(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let blocks = text.split("\n```rust\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn files(dir: &str, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(dir)).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
}

/// An example without what a page omits: its first comment, and what makes `main` visible here.
fn program(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.replace("#[allow(missing_docs)]\npub fn main", "fn main");
    let body = text.lines().skip_while(|line| line.starts_with("//!") || line.is_empty());
    body.map(|line| format!("{line}\n")).collect()
}

#[test]
fn rust_blocks_are_examples_word_for_word() {
    let folders = ["examples", "examples/candle/examples", "examples/burn/examples"];
    let programs = folders.iter().flat_map(|folder| files(folder, "rs"));
    let examples: Vec<String> = programs.map(|path| program(&path)).collect();
    let pages = files("docs", "md").into_iter().chain([root().join("README.md")]);
    for page in pages {
        for block in rust_blocks(&page) {
            assert!(
                examples.contains(&block),
                "{}: nothing compiles this block, because it is not a file of examples/:\n{block}",
                page.display()
            );
        }
    }
    assert!(rust_blocks(&root().join("docs/rust.md")).len() > 1, "the guide has programs");
}

#[test]
fn the_pages_programs_run() {
    if !is_alone("readme::the_pages_programs_run") {
        return;
    }
    let dir = scratch();
    std::env::set_current_dir(dir.path()).unwrap();
    manager::main().unwrap();
    manager::main().unwrap();
    quickstart::main().unwrap();
    quickstart::main().unwrap();
    load_part::main().unwrap();
    stream::main().unwrap();
    tiers::main().unwrap();
    tiers::main().unwrap();
    background::main().unwrap();
    for (step, value) in [(5, 5.0), (10, 10.0)] {
        let loaded = ringstow::load(format!("background/step-{step}")).unwrap();
        let weight: &[f32] = loaded.tensor("weight").unwrap().as_slice().unwrap();
        assert!(weight.iter().all(|w| *w == value), "the weight of step {step} is as it was");
    }
}
