//! Two processes that train, each of which is killed at many moments of their saves.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

const RANKS: u32 = 2;

fn start(root: &Path, rank: u32, ranks: u32, kill: Option<u64>) -> Child {
    let numbers = [rank, ranks, 8, 2].map(|number| number.to_string());
    Command::new(env!("CARGO_BIN_EXE_ringstow-ranks-example"))
        .arg(root)
        .args(numbers) // 8 steps, and 2 from one save to the next
        .envs(kill.map(|call| ("RINGSTOW_TEST_SEAM", format!("kill:{call}"))))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs all ranks, of which one may be killed before a system call.
fn run(root: &Path, ranks: u32, kill: Option<(u32, u64)>) -> Vec<Output> {
    let call = |rank| kill.filter(|(victim, _)| *victim == rank).map(|(_, call)| call);
    let all: Vec<Child> = (0..ranks).map(|rank| start(root, rank, ranks, call(rank))).collect();
    all.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn assert_success(outputs: &[Output]) {
    for output in outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let step = |root: &Path| root.join("step-00000008");
    let diff = ringstow::Store::found().unwrap().diff(step(one), step(other), false).unwrap();
    diff.is_equal() && diff.equal_tensors == 2
}

#[test]
fn ranks_of_which_one_is_killed_at_any_moment_end_with_the_bits_of_those_that_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    assert_success(&run(&whole, RANKS, None));
    for victim in 0..RANKS {
        let (mut kills, mut resumed) = (0, 0);
        for call in (1..).step_by(17) {
            let root = dir.path().join(format!("{victim}-{call}"));
            let died = run(&root, RANKS, Some((victim, call)));
            if died[victim as usize].status.success() {
                break; // there is no such call
            }
            kills += 1;
            let again = run(&root, RANKS, None);
            assert_success(&again);
            resumed += u32::from(String::from_utf8_lossy(&again[0].stdout).starts_with("resumed"));
            assert!(is_same(&whole, &root), "rank {victim}, killed before call {call}");
        }
        assert!(kills >= 4 && resumed >= 2, "rank {victim}: {kills} kills, {resumed} resumed");
    }
}

#[test]
fn another_number_of_ranks_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let (two, three) = (dir.path().join("two"), dir.path().join("three"));
    assert_success(&run(&two, 2, None));
    assert_success(&run(&three, 3, None));
    assert!(is_same(&two, &three));
    // Step 6 was saved by two ranks, step 8 is by one.
    std::fs::remove_dir_all(two.join("step-00000008")).unwrap();
    assert_success(&run(&two, 1, None));
    assert!(is_same(&two, &three));
}
