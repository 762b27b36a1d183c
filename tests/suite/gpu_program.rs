//! The program's doctor over the fake driver: a working GPU, and drivers that fail.

#![cfg(all(feature = "cli", feature = "cuda"))]

use serde_json::Value as Json;
use std::env;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// The fake driver under NVIDIA's file names, and a working directory.
struct Machine {
    driver: TempDir,
    dir: TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine =
            Self { driver: tempfile::tempdir().unwrap(), dir: tempfile::tempdir().unwrap() };
        // Cargo puts the library of a dev-dependency beside the test.
        let library = env::current_exe().unwrap().with_file_name("libfake_cuda.so");
        assert!(library.exists(), "{} is not built", library.display());
        for name in ["libcuda.so", "libcuda.so.1"] {
            symlink(&library, machine.driver.path().join(name)).unwrap();
        }
        machine
    }

    /// Runs the program on the directory, with environment variables for the fake driver.
    fn run(&self, fake: &[(&str, &str)], args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_ringstow"))
            .arg(args[0])
            .arg(self.dir.path())
            .args(&args[1..])
            .env("LD_LIBRARY_PATH", self.driver.path())
            .envs(fake.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Returns the doctor's checks of GPUs.
    fn gpu_checks(&self, fake: &[(&str, &str)]) -> Vec<Json> {
        let output = self.run(fake, &["doctor", "--json"]);
        assert_eq!(output.status.code(), Some(0), "a GPU keeps no save from working");
        let diagnosis: Json = serde_json::from_slice(&output.stdout).unwrap();
        let checks = diagnosis["checks"].as_array().unwrap().iter();
        checks.filter(|check| check["name"].as_str().unwrap().starts_with("GPU")).cloned().collect()
    }
}

#[track_caller]
fn assert_says(check: &Json, status: &str, found: &str) {
    assert_eq!(check["status"], status, "{check}");
    assert!(check["found"].as_str().unwrap().contains(found), "{check}");
    assert_eq!(check["remedy"].is_string(), status != "ok", "{check}");
}

#[test]
fn doctor_names_each_gpu_and_measures_its_copies() {
    let checks = Machine::new().gpu_checks(&[("FAKE_CUDA_DEVICES", "2")]);
    assert_says(&checks[0], "ok", "2, driver for CUDA 12.8");
    let of_first: Vec<&Json> = checks
        .iter()
        .filter(|check| check["name"].as_str().unwrap().starts_with("GPU 0"))
        .collect();
    assert_says(of_first[0], "ok", "Fake GPU 0");
    assert_says(of_first[1], "ok", "67.1 MB");
    // The rates themselves depend on the machine.
    for check in &of_first[2..] {
        assert!(check["found"].as_str().unwrap().contains("GB/s pinned"), "{check}");
    }
    assert_eq!(of_first.len(), 4);
    assert!(checks.iter().any(|check| check["name"] == "GPU 1 from host"));
}

#[test]
fn doctor_explains_an_unusable_driver() {
    let machine = Machine::new();
    let old = machine.gpu_checks(&[("FAKE_CUDA_DRIVER_VERSION", "11080")]);
    assert_says(&old[0], "warn", "CUDA 11.8, 12.0 is needed");
    let no_gpu = machine.gpu_checks(&[("FAKE_CUDA_DEVICES", "0")]);
    assert_says(&no_gpu[0], "warn", "driver library");
    assert_eq!((old.len(), no_gpu.len()), (1, 1));
}

#[test]
fn doctor_reports_refused_pinning_and_measures_without() {
    let refusals: Vec<String> =
        (0..8).map(|after| format!("cuMemHostRegister_v2:{after}:304")).collect();
    let checks = Machine::new().gpu_checks(&[("FAKE_CUDA_FAIL", &refusals.join(","))]);
    assert_says(&checks[2], "warn", "67.1 MB refused");
    assert!(checks[2]["remedy"].as_str().unwrap().contains("ulimit -l"));
    assert_says(&checks[3], "ok", "pageable");
    assert!(!checks[3]["found"].as_str().unwrap().contains("pinned"));
}

#[test]
fn failing_gpu_is_a_finding_not_a_failure() {
    let checks = Machine::new().gpu_checks(&[("FAKE_CUDA_FAIL", "cuMemAlloc_v2:0:2")]);
    assert_says(checks.last().unwrap(), "warn", "OUT_OF_MEMORY");
}
