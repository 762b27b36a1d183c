//! The program, run as a user runs it, on checkpoints that the library made.

#![cfg(feature = "cli")]

mod listing;
mod removal;
mod top;

use crate::common::flip;
use ringstow::{Config, Disposal, Dtype, StateDict, Value};
use serde_json::{Value as Json, json};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Bytes of a block in these tests.
const BLOCK: u64 = 65536;

const SHARD: &str = "rank00000-0.safetensors";

/// Output and exit code of the program.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Json {
        assert!(!self.out.contains('\x1b'), "a terminal acts on this JSON: {}", self.out);
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {}", self.out))
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringstow"));
    command.args(args).stdin(Stdio::null());
    command
}

fn ringstow(args: &[&str]) -> Ran {
    let Output { status, stdout, stderr } = command(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let ran = Ran { code: status.code(), out: text(stdout), err: text(stderr) };
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
    for line in ran.out.lines().filter(|_| !args.contains(&"--json")) {
        assert!(
            line.chars().count() <= 100 || line.contains(&*std::env::temp_dir().to_string_lossy()),
            "too wide: {line}"
        );
    }
    ran
}

/// A directory of checkpoints.
struct Checkpoints(TempDir);

impl Checkpoints {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    fn step(&self, step: u32) -> String {
        format!("{}/step-{step:08}", self.path())
    }

    /// Saves one of two tensors, of one block and of three.
    fn save(&self, step: u32) -> PathBuf {
        let path = PathBuf::from(self.step(step));
        let small = vec![step as u8; 1000];
        let large: Vec<u8> = (0..200_000u32).flat_map(|n| (n as u8 ^ 7).to_le_bytes()).collect();
        let mut state = StateDict::new();
        state.bytes("layer.bias", Dtype::F32, &[250], &small).unwrap();
        state.bytes("layer.weight", Dtype::U8, &[200, 1000], &large).unwrap();
        state.value("step", step).value("lr", 1e-3);
        save(&state, &path);
        path
    }

    /// Leaves what a save leaves that is killed before its commit.
    fn killed(&self, step: u32) -> PathBuf {
        let path = PathBuf::from(self.step(step));
        fs::create_dir(&path).unwrap();
        fs::write(path.join(format!("{SHARD}.part")), "half").unwrap();
        path
    }

    /// Runs `ringstow retain`.
    fn retain(&self, flags: &[&str]) -> Ran {
        ringstow(&[&["retain", self.path()], flags].concat())
    }
}

fn save(state: &StateDict, path: &Path) {
    let config = Config { block_bytes: BLOCK, pool_bytes: 4 * BLOCK, ..Config::default() };
    ringstow::Store::new(config.clone()).unwrap().save(state, path).unwrap();
}

#[test]
fn bad_configuration_file_is_shown_by_line_with_escaped_name() {
    let dir = Checkpoints::new();
    let file = dir.0.path().join("my\n\x1b.toml");
    fs::write(&file, "queue_depth = 8\npool_byte = 1\n").unwrap();
    let ran = command(&["ls", dir.path()]).env("RINGSTOW_CONFIG", &file).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    let said = String::from_utf8(ran.stderr).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains(r"my\n\u{1b}.toml: ") && lines[0].contains("line 2"), "{said}");
    assert_eq!(lines[2], "  2 | pool_byte = 1", "{said}");
    assert!(lines.last().unwrap().contains("pool_bytes"), "{said}");
    assert!(!said.contains('\x1b'), "{said:?}");
}

#[test]
fn unknown_variable_is_warned_of_once() {
    let dir = Checkpoints::new();
    dir.save(1);
    let ran = command(&["ls", dir.path()]).env("RINGSTOW_POOL_BYTE", "1G").output().unwrap();
    assert_eq!(ran.status.code(), Some(0));
    let said = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("RINGSTOW_POOL_BYTE ") && said.contains("RINGSTOW_POOL_BYTES?"),
        "{said}"
    );
}

#[test]
fn doctor_checks_a_directory_and_leaves_nothing_there() {
    let dir = Checkpoints::new();
    let ran = ringstow(&["doctor", dir.path()]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("O_DIRECT"), "{}", ran.out);
    let json = ringstow(&["doctor", dir.path(), "--json"]).json();
    assert!(json["checks"].as_array().unwrap().iter().all(|check| check["name"].is_string()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(ringstow(&["doctor", "/proc/nowhere/at/all"]).code, Some(1));
}

#[test]
fn bench_measures_ringstow_and_fio_and_leaves_nothing() {
    let dir = Checkpoints::new();
    let small = ["--gb", "0.01", "--rounds", "2", "--pool-bytes", "1M", "--block-bytes", "64KiB"];
    let ran = ringstow(&[&["bench", dir.path()], &small[..]].concat());
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("ringstow: ") && ran.out.contains("fio: "), "{}", ran.out);
    let ran = ringstow(&[&["bench", dir.path(), "--json"], &small[..]].concat());
    let json = ran.json();
    let is_measured = |program: &Json| {
        ["save", "load"].iter().all(|way| program[way]["median"].as_f64().is_some_and(|x| x > 0.0))
    };
    assert!(is_measured(&json["ringstow"]), "{json}");
    assert!(is_measured(&json["fio"]) != json["fio_refused"].is_string(), "{json}");
    assert_eq!(json["config"]["block_bytes"], 64 << 10);
    let ran = ringstow(&[&["bench", dir.path(), "--engine", "portable"], &small[..]].concat());
    assert!(ran.out.contains("ringstow: portable, "), "{}", ran.out);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn bench_without_fio_measures_and_says_how_to_get_it() {
    let dir = Checkpoints::new();
    let bench = ["bench", dir.path(), "--gb", "0.001", "--rounds", "1", "--engine", "portable"];
    let ran = command(&bench).env("PATH", "").output().unwrap();
    let out = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{out}");
    let fio = out.lines().find(|line| line.starts_with("fio")).unwrap();
    assert!(fio.contains("refused") && out.contains("apt-get"), "{out}");
}

#[test]
fn bench_refuses_too_much_data_before_writing() {
    let dir = Checkpoints::new();
    let ran = ringstow(&["bench", dir.path(), "--gb", "1000000"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("--gb"), "{}", ran.err);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn wrong_arguments_end_with_2_and_say_what_may_be() {
    let dir = Checkpoints::new();
    for args in [
        &["frobnicate"][..],
        &["verify"],
        &["verify", dir.path(), "--block-bytes", "1000"],
        &["verify", dir.path(), "--pool-bytes", "4 apples"],
        &["bench", dir.path(), "--engine", "warp"],
        &["bench", dir.path(), "--engine", "portable", "--fixed", "on"],
        &["bench", dir.path(), "--rounds", "0"],
    ] {
        let ran = ringstow(args);
        assert_eq!(ran.code, Some(2), "{args:?}");
        assert!(!ran.err.is_empty(), "{args:?}");
    }
}

#[test]
fn help_and_version_end_with_0() {
    let version = ringstow(&["--version"]).out;
    assert!(
        version.starts_with(concat!("ringstow ", env!("CARGO_PKG_VERSION"), " (")),
        "{version}"
    );
    assert_eq!(version.contains("(uring, "), cfg!(feature = "uring"), "{version}");
    assert!(version.contains("portable"), "{version}");
    for command in ["ls", "show", "verify", "diff", "prune", "retain", "doctor", "bench"] {
        assert_eq!(ringstow(&[command, "--help"]).code, Some(0));
    }
    assert!(ringstow(&["--help"]).out.contains("Exit codes"));
}

#[test]
fn closed_pipe_is_not_an_error() {
    let dir = Checkpoints::new();
    dir.save(1);
    let mut child = command(&["show", &dir.step(1), "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0));
    assert_eq!(ended.stderr, b"");
}

#[test]
fn convert_names_the_python_package() {
    let ran = ringstow(&["convert", "ckpt", "hf", "--to", "hf", "--prefix", "model."]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("pip install ringstow"), "{}", ran.err);
    assert!(ringstow(&["--help"]).out.contains("convert"));
    let ran = ringstow(&["report", "run", "-o", "page.html"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("report run -o page.html is not in this program"), "{}", ran.err);
    assert!(ran.err.contains("pip install ringstow"), "{}", ran.err);
}

#[test]
fn stripe_directories_come_from_option_or_environment() {
    let (dir, disk) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let (path, stripe) = (dir.step(7), disk.path().to_str().unwrap());
    let [a, b] = [vec![1; 100_000], vec![2; 100_000]];
    let mut state = StateDict::new();
    state.bytes("a", Dtype::U8, &[100_000], &a).unwrap();
    state.bytes("b", Dtype::U8, &[100_000], &b).unwrap();
    let stripes = vec![disk.path().to_path_buf()];
    let config =
        Config { block_bytes: BLOCK, pool_bytes: 4 * BLOCK, stripe: stripes, ..Config::default() };
    ringstow::Store::new(config.clone()).unwrap().save(&state, &path).unwrap();

    let ls = ringstow(&["ls", dir.path()]);
    assert!(ls.out.contains("INCOMPLETE") && ls.out.contains("RINGSTOW_STRIPE"), "{}", ls.out);
    let verify = ringstow(&["verify", &path, "--json"]);
    assert_eq!(verify.code, Some(1));
    assert!(verify.json()[0]["problem"].as_str().unwrap().contains("RINGSTOW_STRIPE"));
    let ls = ringstow(&["ls", dir.path(), "--stripe", stripe]);
    assert!(ls.out.contains("committed"), "{}", ls.out);
    assert_eq!(ringstow(&["verify", &path, "--stripe", stripe]).code, Some(0));
    assert!(ringstow(&["show", &path, "--stripe", stripe]).out.contains("rank00000-1"));

    let mut verify = command(&["verify", &path]);
    assert_eq!(verify.env("RINGSTOW_STRIPE", stripe).output().unwrap().status.code(), Some(0));
    let shard = disk.path().join("step-00000007/rank00000-1.safetensors");
    flip(&shard, 70_000);
    let verify = ringstow(&["verify", &path, "--stripe", stripe, "--json"]);
    assert_eq!(verify.code, Some(1));
    assert_eq!(verify.json()[0]["damaged_tensors"], json!(["b"]));

    let litter = disk.path().join("step-00000007/rank00000-5.g3.safetensors.part");
    fs::write(&litter, "half").unwrap();
    ringstow(&["prune", dir.path()]);
    assert!(litter.exists());
    ringstow(&["prune", dir.path(), "--stripe", stripe]);
    assert!(!litter.exists() && shard.exists());
}

#[test]
fn striped_bench_leaves_nothing_on_any_disk() {
    let [dir, disk] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let text = |dir: &TempDir| dir.path().to_str().unwrap().to_owned();
    let (dir, disk) = ((text(&dir), dir), (text(&disk), disk));
    let bench = ["bench", &dir.0, "--gb", "0.001", "--rounds", "1", "--stripe", &disk.0];
    let ran = ringstow(&[&bench[..], &["--files", "2", "--engine", "portable", "--json"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(ran.json()["config"]["files"], 2);
    for (path, _) in [dir, disk] {
        assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    }
}

// The signal SIGXFSZ, which comes with the error, would end the program.
#[test]
fn file_size_limit_is_an_error_with_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 100 && exec \"$0\" bench \"$1\" --gb 0.001 --rounds 1"]);
    shell.arg(env!("CARGO_BIN_EXE_ringstow")).arg(dir.path());
    let ran = shell.output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{}: {err}", ran.status);
    assert!(err.contains("File too large") && err.contains("ulimit -f"), "{err}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn full_disk_behind_stdout_is_not_reported_as_a_saves() {
    let dir = Checkpoints::new();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ran = command(&["ls", dir.path()]).stdout(full).output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{err}");
    assert!(err.contains("standard output") && err.contains("No space left"), "{err}");
    assert!(!err.contains("this save"), "{err}");
}
