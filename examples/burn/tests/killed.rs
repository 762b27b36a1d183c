//! The trainer, killed at many moments of its saves, and the short program of the page.

#[path = "../examples/burn_short.rs"]
mod short;
#[path = "../../../tests/common/trainer.rs"]
mod trainer;

use std::path::Path;
use std::process::{Command, Output};

fn train(dir: &Path, seam: Option<String>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringstow-burn-example"))
        .arg(dir)
        .args(["8", "2"]) // steps, and from one save to the next
        .envs(seam.map(|seam| ("RINGSTOW_TEST_SEAM", seam)))
        .output()
        .unwrap()
}

#[test]
fn a_run_that_is_killed_at_any_moment_ends_with_the_bits_of_one_that_is_not() {
    trainer::assert_kills_change_no_bit(train);
}

// No other test of this file depends on the current directory.
#[test]
fn the_page_has_the_short_program_and_it_runs() {
    trainer::assert_page_runs(Path::new(env!("CARGO_MANIFEST_DIR")), "burn", short::main);
}
