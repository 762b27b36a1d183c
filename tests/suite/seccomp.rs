//! What a container's seccomp filter leaves: saves and loads that say what was denied, and what to do.
//!
//! A filter holds for the thread that installs it and all that it starts, for good; so each test saves from
//! a thread of its own.
#![cfg(all(target_os = "linux", feature = "uring"))]

use crate::common::*;
use nix::libc;
use ringstow::internals::engine::fallback::Fallback;
use ringstow::{Config, EngineChoice, Error, IoPriority, Runtime, SaveReport};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::path::Path;
use std::process::Command;

const SETUP: i64 = libc::SYS_io_uring_setup;
const ENTER: i64 = libc::SYS_io_uring_enter;
const REGISTER: i64 = libc::SYS_io_uring_register;

/// What `work` returns on a thread to which the kernel answers these system calls with `errno`.
fn denied<T: Send>(calls: &[i64], errno: i32, work: impl FnOnce() -> T + Send) -> T {
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let answer = SeccompAction::Errno(errno as u32);
    let target = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, answer, target).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            seccompiler::apply_filter(&program).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

/// All that a report says of what was not to be had.
fn said(report: &SaveReport) -> String {
    let words = |f: &Fallback| format!("{}: {}; {}\n", f.wanted, f.reason, f.remedy);
    report.moved.fallbacks.iter().map(words).collect()
}

fn save_and_load(path: &Path) -> SaveReport {
    let (state, runtime) = (State::new(1, &SIZES), runtime());
    let report = state.save(&runtime, path).unwrap();
    state.assert_at(&runtime, path);
    report
}

#[test]
fn priorities_that_a_filter_refuses_are_reported_and_the_save_goes_on() {
    let root = scratch();
    let config = Config { io_priority: IoPriority::Low, nice: 5, ..small_config() };
    let runtime = Runtime::new(config).unwrap();
    let state = State::new(1, &SIZES);
    let report = denied(&[libc::SYS_ioprio_set], libc::EPERM, || {
        state.save(&runtime, &root.path().join("a")).unwrap()
    });
    let why = said(&report);
    assert!(why.contains("Config.io_priority") && why.contains("ioprio_set"), "{why}");
    state.assert_at(&runtime, &root.path().join("a"));
}

#[test]
fn dockers_filter_falls_back_to_portable_and_says_why() {
    let root = scratch();
    for errno in [libc::EPERM, libc::EACCES] {
        let report = denied(&[SETUP, ENTER, REGISTER], errno, || {
            save_and_load(&root.path().join(format!("denied-{errno}")))
        });
        assert_eq!(report.moved.engine.to_string(), "portable");
        let why = said(&report);
        assert!(why.contains("seccomp") && why.contains("--security-opt"), "{why}");
    }
}

#[test]
fn filter_with_enosys_reads_as_an_old_kernel() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let report = denied(&[SETUP, ENTER, REGISTER], libc::ENOSYS, || save_and_load(&path));
    let why = said(&report);
    assert!(why.contains("no usable io_uring"), "{why}");
}

#[test]
fn filter_of_a_part_of_io_uring_costs_no_checkpoint() {
    let root = scratch();
    for (name, call) in [("enter", ENTER), ("register", REGISTER)] {
        let report = denied(&[call], libc::EPERM, || save_and_load(&root.path().join(name)));
        let why = said(&report);
        assert!(why.contains("seccomp"), "{name}: {why}");
    }
}

#[test]
fn requested_engine_is_never_replaced() {
    let root = scratch();
    let tokio_uring = cfg!(feature = "tokio-uring").then_some(EngineChoice::TokioUring);
    for engine in [EngineChoice::Uring].into_iter().chain(tokio_uring) {
        for call in [SETUP, ENTER] {
            let error = denied(&[call], libc::EPERM, || {
                let runtime = Runtime::new(Config { engine, ..small_config() })?;
                State::new(1, &SIZES).save(&runtime, &root.path().join("ckpt"))
            });
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            assert_says(&error, &["seccomp", "io_uring_setup"]);
            assert_eq!(names_in(root.path()), [""; 0]);
        }
    }
}

#[test]
fn save_runs_on_the_caller_when_threads_are_refused() {
    let (root, state) = (scratch(), State::new(1, &SIZES));
    let path = root.path().join("ckpt");
    for engine in [EngineChoice::Auto, EngineChoice::Portable] {
        let runtime = Runtime::new(Config { engine, ..small_config() }).unwrap();
        // The engines have their threads from here on.
        state.save(&runtime, &path).unwrap();
        state.assert_at(&runtime, &path);
        denied(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN, || {
            state.save(&runtime, &path).unwrap();
            state.assert_at(&runtime, &path);
        });
    }
}

#[test]
#[cfg(feature = "cli")]
fn the_doctor_under_a_filter_names_it() {
    let root = scratch();
    let output = denied(&[SETUP, ENTER, REGISTER], libc::EPERM, || {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_ringstow"));
        doctor.arg("doctor").arg(root.path()).output().unwrap()
    });
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("seccomp") && said.contains("--security-opt"), "{said}");
}
