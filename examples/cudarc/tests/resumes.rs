//! The trainer, run over the fake driver as over a GPU's.

use std::env;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A directory that has the fake driver under the names of NVIDIA's.
fn driver() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    // Cargo puts the library of a dev-dependency beside the test.
    let library = env::current_exe().unwrap().with_file_name("libfake_cuda.so");
    for name in ["libcuda.so", "libcuda.so.1"] {
        symlink(&library, dir.path().join(name)).unwrap();
    }
    dir
}

fn train(driver: &TempDir, dir: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringstow-cudarc-example"))
        .env("LD_LIBRARY_PATH", driver.path())
        .args(["--steps", "12", "--every", "4", "--layers", "2", "--dir"])
        .arg(dir)
        .args(more)
        .output()
        .unwrap()
}

/// The last line of a run to its end.
fn end(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    text.lines().last().unwrap().to_owned()
}

#[test]
fn a_run_that_died_ends_with_the_bits_of_one_that_did_not() {
    let (driver, root) = (driver(), tempfile::tempdir().unwrap());
    let [whole, died] = ["whole", "died"].map(|name| root.path().join(name));
    let expected = end(&train(&driver, &whole, &[]));
    assert!(expected.starts_with("step 12: crc32"), "{expected}");

    assert!(!train(&driver, &died, &["--die-at", "10"]).status.success());
    let resumed = train(&driver, &died, &[]);
    assert_eq!(end(&resumed), expected);
    let text = String::from_utf8_lossy(&resumed.stdout);
    assert!(text.starts_with("resumed from") && text.contains("at step "), "{text}");
}
