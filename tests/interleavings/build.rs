//! Copies the files of `src/` in which threads meet, with shuttle's locks and atomics in place of the standard ones.

use std::path::Path;
use std::{env, fs};

const FILES: [&str; 3] = ["pool/free_slots.rs", "engine/queue/wake.rs", "pipeline/in_flight.rs"];

fn main() {
    let out = env::var("OUT_DIR").expect("cargo sets it");
    for file in FILES {
        let path = Path::new("../../src").join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let text =
            fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        // An included file has no lines that describe it as a whole.
        let lines = text.lines().filter(|line| !line.starts_with("//!"));
        let text: Vec<String> =
            lines.map(|line| line.replace("std::sync", "shuttle::sync")).collect();
        assert!(text.iter().any(|line| line.contains("shuttle::sync")), "{file} has no locks");
        let to = Path::new(&out).join(path.file_name().expect("it is a file"));
        fs::write(to, text.join("\n")).expect("the build's directory can be written to");
    }
}
