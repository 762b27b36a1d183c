//! What a fuzzer runs on arbitrary bytes. Each target parses them and checks what must hold: nothing panics, what was
//! read writes and reads back as the same, plans stay within their files, and reading takes at most four times the
//! input's size in memory and a constant.
//!
//! `make fuzz` runs the targets under libFuzzer (`libfuzzer/`, a package of its own that needs a nightly toolchain).
//! `tests/fuzz_corpus` runs them over their stored inputs, on stable Rust.

pub mod input;
pub mod memory;
mod targets;

use targets::*;

/// A function of bytes that panics if something does not hold.
#[derive(Debug)]
pub struct Target {
    /// Also the name of its directory in `corpus/`.
    pub name: &'static str,
    /// Runs it on one input.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "manifest", run: manifest::run },
    Target { name: "header", run: header::run },
    Target { name: "receipt", run: receipt::run },
    Target { name: "index", run: index::run },
    Target { name: "config", run: config::run },
    Target { name: "select", run: select::run },
    Target { name: "values", run: values::run },
    Target { name: "slices", run: slices::run },
    Target { name: "names", run: names::run },
    Target { name: "directory", run: directory::run },
];

impl Target {
    /// The target of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }
}
