//! The trainer, killed at many moments of its saves, and the short program of the page.

#[path = "../examples/candle_short.rs"]
mod short;

use std::path::Path;
use std::process::{Command, Output};

fn train(dir: &Path, seam: Option<String>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringstow-candle-example"))
        .args(["--steps", "8", "--every", "2", "--width", "32", "--dir"])
        .arg(dir)
        .envs(seam.map(|seam| ("RINGSTOW_TEST_SEAM", seam)))
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap()
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The lines that say a step's loss.
fn losses(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with("step ")).map(String::from).collect()
}

#[test]
fn a_run_that_is_killed_at_any_moment_ends_with_the_bits_of_one_that_is_not() {
    let root = tempfile::tempdir().unwrap();
    let whole = root.path().join("whole");
    let expected = train(&whole, None);
    assert_success(&expected);
    let (mut kills, mut resumed) = (0, 0);
    // The seam ends the process by SIGKILL before its n-th system call. Four saves, and the removals after them, make some
    // hundred.
    for call in (1..).step_by(29) {
        let dir = root.path().join(format!("killed-{call}"));
        let died = train(&dir, Some(format!("kill:{call}")));
        if died.status.success() {
            break; // there is no such call
        }
        kills += 1;
        let again = train(&dir, None);
        assert_success(&again);
        resumed += u32::from(String::from_utf8_lossy(&again.stdout).starts_with("resumed from"));
        let last = losses(&again);
        assert!(losses(&expected).ends_with(&last), "killed before call {call}: {last:?}");
        let diff = ringstow::diff(whole.join("step-00000008"), dir.join("step-00000008")).unwrap();
        assert!(diff.is_equal(), "killed before call {call}: {diff:?}");
    }
    assert!(kills >= 8, "the process was killed {kills} times");
    assert!(resumed >= 4, "{resumed} runs resumed from a checkpoint");
}

#[test]
fn the_page_has_the_short_program_and_it_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("../../docs/trainers/candle.md")).unwrap();
    let program = std::fs::read_to_string(root.join("examples/candle_short.rs")).unwrap();
    let block = page.split("```rust\n").nth(1).unwrap().split("```").next().unwrap();
    let program = program
        .split_once("\n\n")
        .map(|(_, program)| program.replace("#[allow(missing_docs)]\npub fn", "fn"));
    assert_eq!(Some(block.to_owned()), program);
    // Runs it twice, the second time from its own checkpoint. No other test of this file depends on the current directory.
    let dir = tempfile::tempdir().unwrap();
    std::env::set_current_dir(dir.path()).unwrap();
    short::main().unwrap();
    short::main().unwrap();
    assert_eq!(ringstow::steps("run").unwrap().last().unwrap().step, Some(40));
}
