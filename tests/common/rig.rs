//! What a test needs from the machine: a device, a file system, a right, a program.

/// If it is set, as `.ci/run` does, a rig that is missing fails the test.
const REQUIRED: &str = "RINGSTOW_REQUIRE_RIGS";

/// Says why a test does nothing here. Panics if every rig is required.
#[track_caller]
pub fn missing(reason: &str) {
    assert!(
        std::env::var_os(REQUIRED).is_none(),
        "{REQUIRED} is set, and this machine lacks a rig: {reason}"
    );
    println!("skipped: {reason}");
}
