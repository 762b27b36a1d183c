//! Whatever system call of a writer fails or is the last, the file is the old or the new one, and the next writer works
//! and clears what is left.

use crate::common::{names_in, noise, scratch, small_config};
use crate::streams::{CHECKED, read, sound, write};
use nix::libc::{EINTR, EIO, ENOSPC};
use ringstow::internals::sys::seam::{Call, Watch, fail_if, in_process};
use ringstow::{Config, EngineChoice, Runtime, Switch};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the child writes; set only for it.
const CHILD_PATH: &str = "RINGSTOW_TEST_STREAM";

/// More than a writer makes.
const CALLS_MAX: u64 = 500;

fn old() -> Vec<u8> {
    noise(1, 9000)
}

fn new() -> Vec<u8> {
    noise(2, 20_000)
}

/// Few threads, whose calls come in the same order each time.
fn quick() -> Runtime {
    let config = Config { engine: EngineChoice::Portable, direct: Switch::Off, ..small_config() };
    Runtime::new(config).unwrap()
}

/// Fails the `n`th call on a path below a directory, or all from that on. Other tests run meanwhile.
fn fail(below: &Path, n: u64, errno: i32, all: bool) -> Watch {
    let (below, mut seen) = (below.to_path_buf(), 0);
    in_process(fail_if(errno, move |_, on| {
        let is_own = on.starts_with(&below);
        seen += u64::from(is_own);
        is_own && (seen == n || all && seen > n)
    }))
}

fn calls_below(dir: &Path, watch: &Watch) -> Vec<(Call, PathBuf)> {
    watch.take().into_iter().filter(|(_, on)| on.starts_with(dir)).collect()
}

/// The file is one of the two, and readable; the next writer leaves nothing but its own.
#[track_caller]
fn assert_sound(path: &Path, may_be: &[Vec<u8>], what: &str) {
    let found = fs::read(path).unwrap();
    assert!(may_be.contains(&found), "{what}: {} bytes", found.len());
    assert!(read(&sound(), path).unwrap() == found, "{what}");
    write(&sound(), path, b"next", CHECKED).unwrap();
    let names = names_in(path.parent().unwrap());
    assert_eq!(names, ["file", "file.ringstow"], "{what}");
}

#[test]
fn failing_call_publishes_all_or_nothing() {
    let mut trials = 0;
    for (errno, all) in [(EIO, false), (ENOSPC, false), (EINTR, false), (EIO, true)] {
        for n in 1..CALLS_MAX {
            let root = scratch();
            let path = root.path().join("file");
            write(&sound(), &path, &old(), CHECKED).unwrap();
            let runtime = quick();
            let watch = fail(root.path(), n, errno, all);
            let done = write(&runtime, &path, &new(), CHECKED);
            let calls = calls_below(root.path(), &watch);
            drop(watch);
            let what = format!("call {n} of errno {errno}, {all}: {:?}", calls.get(n as usize - 1));
            let happened = calls.len() as u64 >= n;
            let may_be = match &done {
                Ok(_) => vec![new()],
                Err(error) if error.to_string().contains("is published") => vec![new()],
                Err(_) => vec![old()],
            };
            assert!(happened && errno != EINTR || done.is_ok(), "{what}: {done:?}");
            assert_sound(&path, &may_be, &what);
            trials += u64::from(happened);
            if !happened {
                break;
            }
        }
    }
    println!("promise: a stream is published whole or not at all: {trials} failing calls");
    assert!(trials > 100);
}

#[test]
fn killed_writer_leaves_the_old_or_the_new_file() {
    for n in 1..CALLS_MAX {
        let root = scratch();
        let path = root.path().join("file");
        write(&sound(), &path, &old(), CHECKED).unwrap();
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["streams::each_call::child_that_writes", "--exact"])
            .env(CHILD_PATH, &path)
            .env("RINGSTOW_TEST_SEAM", format!("kill:{n}"))
            .output()
            .unwrap();
        assert_sound(&path, &[old(), new()], &format!("killed before call {n}"));
        if ended.status.success() {
            assert!(n > 20, "{n} calls");
            return;
        }
    }
}

/// The life of a child that is killed.
#[test]
fn child_that_writes() {
    let Some(path) = std::env::var_os(CHILD_PATH).map(PathBuf::from) else { return };
    write(&quick(), &path, &new(), CHECKED).unwrap();
}
