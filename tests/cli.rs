//! The program, run as a user runs it, on checkpoints that the library made.

#![cfg(feature = "cli")]

use ringstow::{Config, Dtype, PartOf, Session, StateDict, Value};
use serde_json::{Value as Json, json};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Bytes of a block in these tests.
const BLOCK: u64 = 65536;

const SHARD: &str = "rank00000-0.safetensors";

/// What the program said, and how it ended.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Json {
        assert!(!self.out.contains('\x1b'), "JSON goes to a terminal as well: {}", self.out);
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

    /// What a save that was killed before its commit leaves.
    fn killed(&self, step: u32) -> PathBuf {
        let path = PathBuf::from(self.step(step));
        fs::create_dir(&path).unwrap();
        fs::write(path.join(format!("{SHARD}.part")), "half").unwrap();
        path
    }

    /// Has the program retain some of them.
    fn retain(&self, flags: &[&str]) -> Ran {
        ringstow(&[&["retain", self.path()], flags].concat())
    }
}

fn save(state: &StateDict, path: &Path) {
    let config = Config { block_bytes: BLOCK, pool_bytes: 4 * BLOCK, ..Config::default() };
    ringstow::save(state, path, &config).unwrap();
}

/// Flips a bit of a file.
fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

#[test]
fn ls_lists_committed_and_incomplete_and_damaged_ones_by_step() {
    let dir = Checkpoints::new();
    dir.save(20);
    dir.save(3);
    dir.killed(100);
    let cut = dir.save(50);
    OpenOptions::new().write(true).open(cut.join(SHARD)).unwrap().set_len(5).unwrap();
    let ran = ringstow(&["ls", dir.path()]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let order: Vec<usize> = ["step-00000003", "step-00000020", "step-00000050", "step-00000100"]
        .iter()
        .map(|name| ran.out.find(name).unwrap())
        .collect();
    assert!(order.is_sorted(), "{}", ran.out);
    assert!(ran.out.contains("INCOMPLETE") && ran.out.contains("DAMAGED"), "{}", ran.out);

    let json = ringstow(&["ls", dir.path(), "--json"]).json();
    let statuses: Vec<&str> =
        json.as_array().unwrap().iter().map(|c| c["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["committed", "committed", "damaged", "incomplete"]);
    assert_eq!(json[0]["step"], 3);
    assert_eq!(json[0]["tensors"], 2);
}

#[test]
fn ls_of_nothing_is_no_error_and_ls_of_nowhere_is() {
    let dir = Checkpoints::new();
    let ran = ringstow(&["ls", dir.path()]);
    assert_eq!(ran.code, Some(0));
    assert!(ran.out.starts_with("no checkpoints in"), "{}", ran.out);
    assert_eq!(ringstow(&["ls", dir.path(), "--json"]).json(), Json::Array(vec![]));
    let ran = ringstow(&["ls", "/nowhere/at/all"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.starts_with("ringstow: ") && ran.err.lines().count() == 1, "{}", ran.err);
}

#[test]
fn show_tells_tensors_files_and_values() {
    let dir = Checkpoints::new();
    dir.save(7);
    let ran = ringstow(&["show", &dir.step(7)]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for part in ["layer.weight", "[200, 1000]", "F32", SHARD, "step: 7", "lr: 0.001"] {
        assert!(ran.out.contains(part), "no {part:?} in {}", ran.out);
    }
    let only = ringstow(&["show", &dir.step(7), "--values"]).out;
    assert!(only.contains("lr: 0.001") && !only.contains("layer.weight"), "{only}");

    let json = ringstow(&["show", &dir.step(7), "--json"]).json();
    assert_eq!(json["tensors"][1]["name"], "layer.weight");
    assert_eq!(json["tensors"][1]["bytes"], 200_000);
    assert_eq!(json["tensors"][1]["files"][0], SHARD);
    assert_eq!(json["files"][0]["name"], SHARD);
    assert_eq!(json["values"]["step"], 7);
}

#[test]
fn show_cuts_long_tables_unless_all_is_asked_for() {
    let dir = Checkpoints::new();
    let mut state = StateDict::new();
    for number in 0..100 {
        state.bytes(format!("t{number}."), Dtype::U8, &[1], b"x").unwrap();
    }
    save(&state, dir.0.path());
    let cut = ringstow(&["show", dir.path(), "--tensors"]).out;
    assert!(!cut.contains("t99.") && cut.contains("76 more"), "{cut}");
    let all = ringstow(&["show", dir.path(), "--tensors", "--all"]).out;
    assert!(all.contains("t99.") && !all.contains("more"), "{all}");
}

#[test]
fn show_of_a_directory_of_checkpoints_names_the_newest() {
    let dir = Checkpoints::new();
    dir.save(1);
    dir.save(2);
    let ran = ringstow(&["show", dir.path()]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("step-00000002"), "{}", ran.err);
}

#[test]
fn hostile_names_reach_no_terminal_as_they_are() {
    let dir = Checkpoints::new();
    let mut state = StateDict::new();
    state.bytes("evil\x1b]0;owned\x07\r\n\u{9b}2J\u{202e}", Dtype::U8, &[1], b"x").unwrap();
    state.value("ke\x1by", "va\x1b[31mlue\u{9b}").value("list", Value::List(vec!["\x07".into()]));
    save(&state, dir.0.path());
    for args in [&["show", dir.path()][..], &["show", dir.path(), "--json"]] {
        let ran = ringstow(args);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let raw = |c: char| c.is_control() && c != '\n';
        assert!(!ran.out.contains(raw), "{:?}", ran.out);
    }
    flip(&dir.0.path().join(SHARD), 10);
    let ran = ringstow(&["verify", dir.path()]);
    assert!(!ran.out.contains('\x1b') && !ran.err.contains('\x1b'));
}

#[test]
fn a_bad_configuration_file_is_shown_in_lines_and_its_name_in_one() {
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
fn a_variable_that_is_no_setting_is_warned_of_once() {
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
fn verify_of_whole_checkpoints_ends_with_0() {
    let dir = Checkpoints::new();
    dir.save(1);
    dir.save(2);
    dir.killed(3);
    let ran = ringstow(&["verify", dir.path()]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert_eq!(ran.out.matches("ok  ").count(), 2, "{}", ran.out);
    assert!(ran.out.contains("skipped"), "{}", ran.out);
    assert!(ran.err.is_empty(), "no bar where stderr is no terminal: {}", ran.err);
    assert_eq!(ringstow(&["verify", "-q", dir.path()]).out, "");
}

#[test]
fn verify_names_file_block_and_tensors_of_damage_and_ends_with_1() {
    let dir = Checkpoints::new();
    dir.save(1);
    let bad = dir.save(2);
    flip(&bad.join(SHARD), 2 * BLOCK + 5);
    for flags in [&[][..], &["--engine", "portable", "--direct", "off"]] {
        let ran = ringstow(&[&["verify", dir.path()], flags].concat());
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        for part in [SHARD, "offset 131072", "block 2", "layer.weight", "step-00000002"] {
            assert!(ran.out.contains(part), "no {part:?} in {}", ran.out);
        }
        assert!(!ran.out.contains("layer.bias"), "{}", ran.out);
    }
    let ran = ringstow(&["verify", "--json", dir.path()]);
    assert_eq!(ran.code, Some(1));
    let json = ran.json();
    assert_eq!(json[0]["verdict"], "ok");
    assert_eq!(json[1]["verdict"], "damaged");
    assert_eq!(json[1]["report"]["damage"][0]["offset"], 2 * BLOCK);
    assert_eq!(json[1]["damaged_tensors"][0], "layer.weight");
}

#[test]
fn verify_takes_a_missing_file_and_a_flipped_manifest_for_damage() {
    let dir = Checkpoints::new();
    let missing = dir.save(1);
    fs::remove_file(missing.join(SHARD)).unwrap();
    let flipped = dir.save(2);
    flip(&flipped.join("manifest.json"), 20);
    for path in [missing, flipped] {
        let ran = ringstow(&["verify", path.to_str().unwrap()]);
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        assert!(ran.out.contains("DAMAGED"), "{}", ran.out);
    }
}

#[test]
fn verify_of_what_is_no_checkpoint_ends_with_2() {
    let dir = Checkpoints::new();
    let file = dir.0.path().join("file");
    fs::write(&file, "x").unwrap();
    let killed = dir.killed(1);
    for path in ["/nowhere/at/all", dir.path(), file.to_str().unwrap(), killed.to_str().unwrap()] {
        let ran = ringstow(&["verify", path]);
        assert_eq!(ran.code, Some(2), "{path}: {}{}", ran.out, ran.err);
        assert!(!(ran.out.is_empty() && ran.err.is_empty()));
    }
    let empty = tempfile::tempdir().unwrap();
    for command in ["verify", "show"] {
        assert_eq!(ringstow(&[command, empty.path().to_str().unwrap()]).code, Some(2));
    }
}

#[test]
fn prune_says_what_it_would_do_then_does_it() {
    let dir = Checkpoints::new();
    let whole = dir.save(1);
    let killed = dir.killed(2);
    let stale = whole.join("rank00000-0.g9.safetensors.part");
    fs::write(&stale, "half").unwrap();
    let damaged = dir.save(3);
    flip(&damaged.join("manifest.json"), 20);

    let planned = ringstow(&["prune", "--dry-run", dir.path()]);
    assert_eq!(planned.code, Some(0), "{}", planned.err);
    assert!(planned.out.contains("would remove"), "{}", planned.out);
    assert!(stale.exists() && killed.exists(), "a dry run changes nothing");
    let plan = ringstow(&["prune", "-n", dir.path(), "--json"]).json();

    let done = ringstow(&["prune", dir.path(), "--json"]).json();
    assert_eq!(plan, done, "it does what it said");
    assert_eq!(done["removed"].as_array().unwrap().len(), 3);
    assert!(!stale.exists() && !killed.exists());
    assert_eq!(ringstow(&["verify", whole.to_str().unwrap()]).code, Some(0));
    assert!(damaged.join(SHARD).exists(), "what is damaged is left alone");
    assert_eq!(done["left"].as_array().unwrap().len(), 1);
    fs::remove_dir_all(damaged).unwrap();
    let again = ringstow(&["prune", dir.path()]);
    assert!(again.out.starts_with("nothing to clear away"), "{}", again.out);
}

#[test]
fn retain_says_what_it_would_do_then_does_it() {
    let dir = Checkpoints::new();
    let [oldest, older, newer, newest] = [1, 2, 3, 10].map(|step| dir.save(step));
    let retain = |flags: &[&str]| dir.retain(&[&["--keep", "2"], flags].concat());

    let planned = retain(&["--dry-run"]);
    assert_eq!(planned.code, Some(0), "{}", planned.err);
    for path in [&oldest, &older] {
        let line = format!("would remove  {}\n", path.display());
        assert!(planned.out.contains(&line), "no {line:?} in {}", planned.out);
        assert!(path.join(SHARD).exists(), "a dry run changes nothing");
    }
    let plan = retain(&["-n", "--json"]).json();

    let done = retain(&["--json"]).json();
    assert_eq!(plan, done, "it does what it said");
    let [kept, retired] = [[newer.clone(), newest.clone()], [oldest.clone(), older.clone()]];
    assert_eq!(
        done,
        json!({ "kept": kept, "retired": retired, "cleared": [], "left": [], "spares": [] })
    );
    assert!(!oldest.exists() && !older.exists());
    assert_eq!(ringstow(&["verify", dir.path()]).out.matches("ok  ").count(), 2);

    let last = dir.retain(&["-k", "1"]);
    let lines = format!("removed  {}\nkept  {}\n", newer.display(), newest.display());
    assert_eq!((last.code, last.out), (Some(0), lines));
}

/// Has each of these ranks save its part of a step by itself, of `ranks` in all.
fn save_each(dir: &Checkpoints, step: u32, there: &[u32], ranks: u32) -> PathBuf {
    let whole = PathBuf::from(dir.step(step));
    for &rank in there {
        let part = whole.join(format!("rank{rank:05}"));
        let part_of = PartOf { rank, ranks, save: format!("a-{step}") };
        let session = Session::begin(&part, 1).unwrap().part_of(part_of);
        let mut state = StateDict::new();
        state.bytes("w", Dtype::U8, &[500], &[1; 500]).unwrap();
        let receipt = ringstow::write_rank(&state, 0, &part, &Config::default()).unwrap().0;
        session.commit(vec![receipt], Value::Dict(Vec::new()).to_json().unwrap()).unwrap();
    }
    whole
}

#[test]
fn what_ranks_saved_each_by_itself_is_listed_verified_and_removed_as_one() {
    let dir = Checkpoints::new();
    let whole = save_each(&dir, 1, &[0, 1], 2);
    let newer = save_each(&dir, 2, &[0, 1], 2);
    let half = save_each(&dir, 3, &[0, 2], 4);

    let ran = ringstow(&["ls", dir.path()]);
    assert_eq!(ran.out.matches("committed ").count(), 2, "{}", ran.out);
    assert!(ran.out.contains("INCOMPLETE") && ran.out.contains("ranks 1, 3"), "{}", ran.out);
    let json = ringstow(&["ls", dir.path(), "--json"]).json();
    assert_eq!((&json[0]["path"], &json[0]["tensors"]), (&json!(whole), &json!(2)));
    assert_eq!(json[0]["parts"], json!([whole.join("rank00000"), whole.join("rank00001")]));
    let part = ringstow(&["ls", &whole.join("rank00001").display().to_string(), "--json"]).json();
    assert_eq!(part[0]["part_of"], json!({ "rank": 1, "ranks": 2, "save": "a-1" }));

    let shown = ringstow(&["show", &dir.step(1)]);
    assert_eq!(shown.code, Some(2));
    assert!(shown.err.contains("step-00000001/rank00000"), "{}", shown.err);
    assert_eq!(ringstow(&["verify", "--quiet", dir.path()]).code, Some(0));
    flip(&newer.join("rank00001").join(SHARD), 4100);
    let damaged = ringstow(&["verify", "--quiet", dir.path()]);
    assert_eq!(damaged.code, Some(1), "{}", damaged.err);
    assert!(damaged.out.contains("step-00000002/rank00001"), "{}", damaged.out);

    let done = dir.retain(&["--keep", "1", "--json"]).json();
    assert_eq!((&done["kept"], &done["retired"]), (&json!([newer]), &json!([whole])));
    assert_eq!(done["left"][0]["path"], json!(half));
    assert!(!whole.exists() && half.join("rank00002").join(SHARD).exists());
}

#[test]
fn retain_of_no_more_than_stay_removes_nothing() {
    let dir = Checkpoints::new();
    let none = dir.retain(&["--keep", "3"]);
    assert_eq!(none.code, Some(0), "{}", none.err);
    assert!(none.out.starts_with("no checkpoints in"), "{}", none.out);
    let all = [1, 2].map(|step| dir.save(step));
    let done = dir.retain(&["--keep", "3", "--json"]).json();
    assert_eq!(
        done,
        json!({ "kept": all, "retired": [], "cleared": [], "left": [], "spares": [] })
    );
    assert_eq!(ringstow(&["verify", dir.path()]).code, Some(0));
}

#[test]
fn retain_neither_counts_nor_removes_what_cannot_be_loaded() {
    let dir = Checkpoints::new();
    let [oldest, older, damaged] = [1, 2, 3].map(|step| dir.save(step));
    flip(&damaged.join("manifest.json"), 20);
    let killed = dir.killed(4);
    let planned = dir.retain(&["--keep", "1", "--dry-run"]).out;
    for path in [&damaged, &killed] {
        let line = format!("left alone  {}: ", path.display());
        assert!(planned.contains(&line), "no {line:?} in {planned}");
    }
    let done = dir.retain(&["--keep", "1", "--json"]).json();
    assert_eq!((&done["kept"], &done["retired"]), (&json!([older]), &json!([oldest])));
    let left: Vec<&Json> =
        done["left"].as_array().unwrap().iter().map(|left| &left["path"]).collect();
    assert_eq!(left, [&json!(damaged), &json!(killed)]);
    assert!(damaged.join(SHARD).exists() && killed.join(format!("{SHARD}.part")).exists());
}

#[test]
fn retain_leaves_alone_what_has_no_number_at_the_end_of_its_name() {
    let dir = Checkpoints::new();
    let [oldest, newest, last] = [1, 2, 3].map(|step| dir.save(step));
    let best = PathBuf::from(format!("{}/best", dir.path()));
    fs::rename(last, &best).unwrap();
    let planned = dir.retain(&["--keep", "1", "--dry-run"]).out;
    let ran = dir.retain(&["--keep", "1"]).out;
    for out in [&planned, &ran] {
        let line = format!("left alone  {}: its name does not end in a number", best.display());
        assert!(out.contains(&line), "no {line:?} in {out}");
    }
    assert!(best.join(SHARD).exists() && newest.join(SHARD).exists() && !oldest.exists());
}

#[test]
#[cfg(target_os = "linux")]
fn retain_keeps_files_for_the_next_save_only_if_asked_to() {
    let dir = Checkpoints::new();
    let [_, _, newest] = [1, 2, 3].map(|step| dir.save(step));
    let spares = dir.0.path().join(".ringstow-spares");

    assert_eq!(dir.retain(&["--keep", "2", "--recycle"]).code, Some(0));
    let names: Vec<_> = fs::read_dir(&spares).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["rank00000-0.spare"]);
    let planned = dir.retain(&["--keep", "1", "--dry-run"]);
    assert_eq!(planned.code, Some(0));
    let spare = spares.join("rank00000-0.spare");
    let line = format!("would remove  {}", spare.display());
    assert!(planned.out.contains(&line), "no {line:?} in {}", planned.out);
    let planned = dir.retain(&["--keep", "1", "--dry-run", "--json"]).json();
    assert_eq!(planned["spares"], json!([spare, spares]));
    let recycled = dir.retain(&["--keep", "1", "--dry-run", "--json", "--recycle"]).json();
    assert_eq!(recycled["spares"], json!([]));
    assert!(spares.join("rank00000-0.spare").exists(), "a dry run changes nothing");

    let done = dir.retain(&["--keep", "1"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let line = format!("removed  {}", spare.display());
    assert!(done.out.contains(&line), "no {line:?} in {}", done.out);
    let names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(names, [newest], "spare files of earlier calls go too");
}

#[test]
fn retain_of_nowhere_or_of_none_says_what_to_do() {
    let dir = Checkpoints::new();
    let whole = dir.save(1);
    let none = dir.retain(&["--keep", "0"]);
    assert_eq!(none.code, Some(2));
    assert!(none.err.contains("keep at least 1"), "{}", none.err);
    assert!(dir.retain(&[]).err.contains("--keep <N>"));
    assert!(whole.join(SHARD).exists());
    let ran = ringstow(&["retain", "/nowhere/at/all", "--keep", "1"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.starts_with("ringstow: ") && ran.err.contains("/nowhere"), "{}", ran.err);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
}

#[test]
fn doctor_finds_a_directory_and_leaves_nothing_there() {
    let dir = Checkpoints::new();
    let ran = ringstow(&["doctor", dir.path()]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("O_DIRECT"), "{}", ran.out);
    let json = ringstow(&["doctor", dir.path(), "--json"]).json();
    assert!(json["checks"].as_array().unwrap().iter().all(|check| check["name"].is_string()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(ringstow(&["doctor", "/nowhere/at/all"]).code, Some(1));
}

#[test]
fn bench_measures_each_rung_and_leaves_nothing_behind() {
    let dir = Checkpoints::new();
    let small = ["--gb", "0.01", "--rounds", "2", "--pool-bytes", "1M", "--block-bytes", "64KiB"];
    let ran = ringstow(&[&["bench", dir.path()], &small[..]].concat());
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("portable, buffered"), "{}", ran.out);
    let ran = ringstow(&[&["bench", dir.path(), "--json"], &small[..]].concat());
    let json = ran.json();
    for way in json["ways"].as_array().unwrap() {
        let measured = way["save"]["gb_per_s"]["median"].as_f64().is_some_and(|x| x > 0.0);
        assert!(measured || way["refused"].is_string(), "{way}");
    }
    let ran = ringstow(&[&["bench", dir.path(), "--engine", "portable"], &small[..]].concat());
    assert!(!ran.out.contains("uring"), "{}", ran.out);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn bench_refuses_what_does_not_fit_before_it_writes_a_byte() {
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
    assert!(ringstow(&["--version"]).out.starts_with("ringstow "));
    for command in ["ls", "show", "verify", "prune", "retain", "doctor", "bench"] {
        assert_eq!(ringstow(&[command, "--help"]).code, Some(0));
    }
    assert!(ringstow(&["--help"]).out.contains("Exit codes"));
}

#[test]
fn a_reader_that_is_gone_is_no_error() {
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
fn convert_is_the_python_packages_and_says_so() {
    let ran = ringstow(&["convert", "ckpt", "hf", "--to", "hf", "--prefix", "model."]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("pip install ringstow"), "{}", ran.err);
    assert!(ringstow(&["--help"]).out.contains("convert"));
}

#[test]
fn striped_checkpoints_are_found_where_an_option_or_the_environment_says() {
    let (dir, disk) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let (path, stripe) = (dir.step(7), disk.path().to_str().unwrap());
    let [a, b] = [vec![1; 100_000], vec![2; 100_000]];
    let mut state = StateDict::new();
    state.bytes("a", Dtype::U8, &[100_000], &a).unwrap();
    state.bytes("b", Dtype::U8, &[100_000], &b).unwrap();
    let stripes = vec![disk.path().to_path_buf()];
    let config =
        Config { block_bytes: BLOCK, pool_bytes: 4 * BLOCK, stripe: stripes, ..Config::default() };
    ringstow::save(&state, &path, &config).unwrap();

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
fn a_striped_bench_leaves_nothing_on_any_disk() {
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

/// The signal that comes with it would end the program, and anybody's trainer, without a word.
#[test]
fn a_limit_of_file_lengths_is_an_error_with_its_remedy_and_nothing_is_left() {
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
fn a_full_disk_behind_the_output_is_not_said_to_be_a_saves() {
    let dir = Checkpoints::new();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ran = command(&["ls", dir.path()]).stdout(full).output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{err}");
    assert!(err.contains("standard output") && err.contains("No space left"), "{err}");
    assert!(!err.contains("this save"), "{err}");
}
