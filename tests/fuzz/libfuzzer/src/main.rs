//! Runs the target that `RINGSTOW_FUZZ` names under libFuzzer.
#![no_main]

use fuzz_targets::Target;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("RINGSTOW_FUZZ").unwrap_or_default();
    Target::named(&name).unwrap_or_else(|| panic!("RINGSTOW_FUZZ = {name:?} names no target"))
});

fuzz_target!(|data: &[u8]| (TARGET.run)(data));
