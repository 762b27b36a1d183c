//! For the examples of trainers: kills one at many moments of its saves, and runs the short program of its page.
//! Included by path, since the examples are crates of their own.

use std::error::Error;
use std::path::Path;
use std::process::Output;

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The lines that say a step's loss.
fn losses(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with("step ")).map(String::from).collect()
}

/// Runs a trainer of eight steps without a kill, then killed before each 29th system call and resumed. Each end must have the
/// same bits. `train` runs it in a directory, with this value of `RINGSTOW_TEST_SEAM` if there is one.
pub fn assert_kills_change_no_bit(train: impl Fn(&Path, Option<String>) -> Output) {
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
        let diff = ringstow::Store::found()
            .unwrap()
            .diff(whole.join("step-00000008"), dir.join("step-00000008"), false)
            .unwrap();
        assert!(diff.is_equal(), "killed before call {call}: {diff:?}");
    }
    assert!(kills >= 8, "the process was killed {kills} times");
    assert!(resumed >= 4, "{resumed} runs resumed from a checkpoint");
}

/// Checks that the page of Rust has a trainer's short program, and runs that twice, the second time from its own checkpoint.
/// Changes the current directory.
pub fn assert_page_runs(
    package: &Path,
    name: &str,
    short: impl Fn() -> Result<(), Box<dyn Error>>,
) {
    let page = std::fs::read_to_string(package.join("../../docs/rust.md")).unwrap();
    let program = package.join(format!("examples/{name}_short.rs"));
    let program = std::fs::read_to_string(program).unwrap();
    let blocks = page.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let (_, program) = program.split_once("\n\n").unwrap();
    let program = program.replace("#[allow(missing_docs)]\npub fn", "fn");
    assert!(blocks.into_iter().any(|block| block == program), "docs/rust.md has not:\n{program}");
    let dir = tempfile::tempdir().unwrap();
    std::env::set_current_dir(dir.path()).unwrap();
    short().unwrap();
    short().unwrap();
    assert_eq!(ringstow::steps("run").unwrap().last().unwrap().step, Some(40));
}
