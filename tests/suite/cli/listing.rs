//! `ls`, `show`, `verify` and `diff`.

use super::*;

#[test]
fn ls_lists_committed_incomplete_and_damaged_by_step() {
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
fn ls_and_show_print_metrics() {
    let dir = Checkpoints::new();
    let mut state = StateDict::new();
    state.step(5).metrics([("loss", 0.25), ("a\x1bcc", f64::NAN)]).unwrap();
    save(&state, Path::new(&dir.step(5)));
    dir.save(6);
    let metrics = serde_json::json!({"a\x1bcc": {"$float": "nan"}, "loss": 0.25});
    let json = ringstow(&["ls", dir.path(), "--json"]).json();
    assert_eq!(json[0]["metrics"], metrics);
    assert_eq!(json[1]["metrics"], serde_json::json!({}));
    let shown = ringstow(&["show", &dir.step(5)]).out;
    assert!(shown.contains("step") && shown.contains("a\\u{1b}cc NaN, loss 0.25"), "{shown}");
    assert_eq!(ringstow(&["show", &dir.step(5), "--json"]).json()["metrics"], metrics);
    assert!(!ringstow(&["show", &dir.step(6)]).out.contains("metrics"));
}

/// Saves a step with this loss, and nothing else.
fn save_with_loss(path: &str, step: u64, loss: f64) {
    let mut state = StateDict::new();
    state.step(step).metrics([("loss", loss)]).unwrap();
    state.value("lr", 0.5);
    save(&state, Path::new(path));
}

#[test]
fn ls_shows_metrics_if_a_checkpoint_has_some() {
    let dir = Checkpoints::new();
    dir.save(4);
    assert!(!ringstow(&["ls", dir.path()]).out.contains("METRICS"));
    save_with_loss(&dir.step(5), 5, 0.123456);
    let mut state = StateDict::new();
    let many = (0..9).map(|number| (format!("a metric of a very long name {number}"), 1e-9));
    state.step(6).metrics(many).unwrap();
    save(&state, Path::new(&dir.step(6)));
    let ran = ringstow(&["ls", dir.path()]);
    assert!(ran.out.lines().next().unwrap().ends_with("METRICS"), "{}", ran.out);
    let row = ran.out.lines().find(|line| line.starts_with("step-00000005")).unwrap();
    assert!(row.ends_with("loss 0.1235"), "{row}");
    let words: Vec<&str> = ran.out.split_whitespace().collect(); // the cell wraps
    assert!(words.join(" ").contains("name 2 1e-9, … 6 more"), "{}", ran.out);
}

#[test]
fn ls_of_a_directory_of_runs_names_them() {
    let dir = Checkpoints::new();
    let step = |run: &str, step: u64| format!("{}/{run}/step-{step:08}", dir.path());
    save_with_loss(&step("first", 10), 10, 0.5);
    save_with_loss(&step("first", 20), 20, 0.25);
    save_with_loss(&step("second", 7), 7, 0.75);
    fs::create_dir_all(dir.0.path().join("logs/of/old/runs")).unwrap();
    let there = ringstow(&["ls", dir.path()]);
    assert_eq!(there.code, Some(0), "{}", there.err);
    assert!(there.out.starts_with("no checkpoints in"), "{}", there.out);
    assert!(there.out.contains("2 runs in"), "{}", there.out);
    for (run, count, newest) in [("first", "2", "20"), ("second", "1", "7")] {
        let row = there.out.lines().find(|line| line.starts_with(run)).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells[1..3], [count, newest], "{row}");
    }
    assert!(there.out.contains(&format!("ringstow ls {}/first", dir.path())), "{}", there.out);
    assert!(!there.out.contains("logs"), "{}", there.out);
    let json = ringstow(&["ls", dir.path(), "--json"]);
    assert_eq!(json.json(), json!([]));
    assert!(json.err.contains("first") && json.err.contains("second"), "{}", json.err);
    // Beside a checkpoint, runs are named too; within a run or a checkpoint there are none.
    dir.save(3);
    let both = ringstow(&["ls", dir.path()]).out;
    assert!(both.starts_with("NAME") && both.contains("2 runs in"), "{both}");
    for none in [format!("{}/first", dir.path()), dir.step(3)] {
        assert!(!ringstow(&["ls", &none]).out.contains("runs in"), "{none}");
    }
}

#[test]
fn diff_shows_step_and_metrics_of_both() {
    let dir = Checkpoints::new();
    let (a, b) = (dir.step(900), dir.step(1000));
    save_with_loss(&a, 900, 0.5);
    save_with_loss(&b, 1000, f64::NAN);
    let ran = ringstow(&["diff", &a, &b]);
    assert_eq!(ran.code, Some(0), "steps and metrics are no difference: {}", ran.out);
    assert!(ran.out.starts_with("A: step 900, loss 0.5\nB: step 1000, loss NaN\n"), "{}", ran.out);
    let json = ringstow(&["diff", &a, &b, "--json"]).json();
    assert_eq!((&json["step_a"], &json["step_b"]), (&json!(900), &json!(1000)));
    assert_eq!(json["metrics_a"], json!({"loss": 0.5}));
    assert_eq!(json["metrics_b"], json!({"loss": {"$float": "nan"}}));
}

#[test]
fn ls_accepts_an_empty_directory_but_not_a_missing_one() {
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
fn show_prints_tensors_files_and_values() {
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
fn show_cuts_long_tables_without_all() {
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
fn show_of_a_run_directory_names_the_newest() {
    let dir = Checkpoints::new();
    dir.save(1);
    dir.save(2);
    let ran = ringstow(&["show", dir.path()]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("step-00000002"), "{}", ran.err);
}

#[test]
fn hostile_names_are_escaped_on_terminals() {
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
fn verify_names_damaged_blocks_and_exits_with_1() {
    let dir = Checkpoints::new();
    dir.save(1);
    let bad = dir.save(2);
    flip(&bad.join(SHARD), 2 * BLOCK as usize + 5);
    for flags in [&[][..], &["--engine", "portable", "--direct", "off"]] {
        let ran = ringstow(&[&["verify", dir.path()], flags].concat());
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        for part in [SHARD, "offset 131072", "checksum chunk 2", "layer.weight", "step-00000002"] {
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
fn verify_reports_missing_file_and_flipped_manifest_as_damage() {
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
fn verify_says_what_still_loads() {
    let dir = Checkpoints::new();
    let step = dir.save(1);
    let says = |words: &str| {
        let ran = ringstow(&["verify", dir.path()]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.out.contains(words), "{words:?} is not in {}", ran.out);
    };
    let bytes = fs::read(step.join(SHARD)).unwrap();
    flip(&step.join(SHARD), 20);
    let ran = ringstow(&["verify", dir.path()]);
    assert!(!ran.out.contains("No tensor is intact"), "{}", ran.out);
    fs::write(step.join(SHARD), &bytes).unwrap();
    flip(&step.join(SHARD), 2 * BLOCK as usize + 5);
    says("The 1 intact tensor loads with");
    fs::remove_file(step.join(SHARD)).unwrap();
    says("No tensor is intact: `load(path, on_corrupt=\"skip\")` loads nothing but the values.");
}

#[test]
fn show_marks_what_is_missing() {
    let dir = Checkpoints::new();
    let step = dir.save(1);
    fs::remove_file(step.join(SHARD)).unwrap();
    let path = step.to_str().unwrap();
    let ran = ringstow(&["show", path]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for words in [
        "rank00000-0.safetensors (no such file)",
        "rank00000-0 (missing)",
        "problem",
        "lr",
        "0.001",
    ] {
        assert!(ran.out.contains(words), "{words:?} is not in {}", ran.out);
    }
    let json = ringstow(&["show", path, "--json"]).json();
    assert_eq!(json["files"][0]["problem"], "no such file");
    assert_eq!(
        (&json["tensors"][0]["lost"], &json["tensors"][1]["lost"]),
        (&json!(true), &json!(true))
    );
    let whole = dir.save(2);
    let json = ringstow(&["show", whole.to_str().unwrap(), "--json"]).json();
    assert_eq!(
        (&json["files"][0]["problem"], &json["tensors"][0]["lost"]),
        (&Json::Null, &json!(false))
    );
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
fn url_is_refused_and_tilde_is_expanded() {
    for (command, url) in [("prune", "s3://bucket/run"), ("ls", "https://host/run")] {
        let ran = ringstow(&[command, url]);
        assert_eq!(ran.code, Some(2));
        assert!(ran.err.contains(&format!("{url} is a URL")), "{}", ran.err);
    }
    if cfg!(not(feature = "object-store")) {
        let ran = ringstow(&["ls", "s3://bucket/run"]);
        assert_eq!(ran.code, Some(2));
        assert!(ran.err.contains("cargo feature `object-store`"), "{}", ran.err);
    }
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("run")).unwrap();
    let listed = command(&["ls", "~/run"]).env("HOME", home.path()).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let ran = ringstow(&["ls", "~nobody-of-this-name/run"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("./~nobody-of-this-name/run"), "{}", ran.err);
}

#[test]
fn doctor_names_the_configuration_file_in_force() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ringstow.toml"), "queue_depth = 3").unwrap();
    let said = command(&["doctor", "--json"]).current_dir(dir.path()).output().unwrap();
    let said: Json = serde_json::from_slice(&said.stdout).unwrap();
    let check = &said["checks"][0];
    assert_eq!(check["name"], "configuration");
    let file = dir.path().canonicalize().unwrap().join("ringstow.toml");
    assert!(check["found"].as_str().unwrap().contains(file.to_str().unwrap()), "{check}");
}

#[test]
fn doctor_reports_a_broken_configuration_and_checks_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().canonicalize().unwrap().join("ringstow.toml");
    let doctor = |flags: &[&str], variable: (&str, &str)| {
        let mut run = command(&[&["doctor"], flags].concat());
        let ran = run.current_dir(dir.path()).env(variable.0, variable.1).output().unwrap();
        assert_eq!(ran.status.code(), Some(1), "{ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    let finding = |variable| {
        let said: Json = serde_json::from_str(&doctor(&["--json"], variable)).unwrap();
        assert!(said["checks"].as_array().unwrap().len() > 5, "{said}");
        let check = &said["checks"][0];
        assert_eq!((&check["name"], &check["status"]), (&json!("configuration"), &json!("fail")));
        let text = |field: &str| check[field].as_str().unwrap().to_owned();
        (text("found"), text("remedy"))
    };
    let none = ("RINGSTOW_DIRECT", "");
    for (broken, word) in [(&b"queue_dept = 3"[..], "line 1"), (b"\xff", "UTF-8")] {
        fs::write(&file, broken).unwrap();
        let (found, remedy) = finding(none);
        assert!(found.contains(file.to_str().unwrap()) && found.contains(word), "{found}");
        assert!(found.contains("defaults"), "{found}");
        assert!(
            remedy.contains(file.to_str().unwrap()) && remedy.contains("/dev/null"),
            "{remedy}"
        );
    }
    fs::write(&file, "queue_dept = 3").unwrap();
    let said = doctor(&[], none);
    assert!(said.contains("FAIL") && said.contains("1 | queue_dept = 3"), "{said}");
    fs::remove_file(&file).unwrap();
    let (found, remedy) = finding(("RINGSTOW_DIRECT", "warp"));
    assert!(found.contains("RINGSTOW_DIRECT=warp") && remedy.contains("unset it"), "{found}");
}

#[test]
fn show_names_shards_as_they_are_on_the_disk() {
    let dir = Checkpoints::new();
    let step = dir.save(1);
    let show = |flags: &[&str]| ringstow(&[&["show", &dir.step(1)], flags].concat());
    assert!(!show(&[]).out.contains(".part"));
    assert_eq!(show(&["--json"]).json()["files"][0]["uncommitted_name"], Json::Null);
    // As a save leaves it that is killed between the commit and its renames.
    let part = format!("{SHARD}.part");
    fs::rename(step.join(SHARD), step.join(&part)).unwrap();
    assert!(show(&["--files"]).out.contains(&part), "{}", show(&["--files"]).out);
    let said = show(&[]).out;
    assert!(said.contains("of 1 files, 1 still end in .part"), "{said}");
    let file = &show(&["--json"]).json()["files"][0];
    assert_eq!((&file["name"], &file["uncommitted_name"]), (&json!(SHARD), &json!(part)));
    ringstow(&["prune", dir.path()]);
    assert!(!show(&[]).out.contains(".part"));
}

#[test]
fn diff_exits_with_0_1_or_2() {
    let dir = Checkpoints::new();
    let (one, other) = (dir.step(1), dir.step(3));
    dir.save(1);
    let bias = 1f32.to_le_bytes();
    let mut state = StateDict::new();
    state.bytes("layer.bias", Dtype::F32, &[1], &bias).unwrap();
    state.value("lr", 0.5);
    save(&state, Path::new(&other));
    let same = ringstow(&["diff", &one, &one]);
    assert_eq!(same.code, Some(0), "{}{}", same.out, same.err);
    assert!(same.out.contains("equal"), "{}", same.out);
    for flags in [&[][..], &["--values"], &["--all"]] {
        let ran = ringstow(&[&["diff", &one, &other], flags].concat());
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        for part in ["- layer.weight", "lr: 0.001 -> 0.5", "- step: 1", "F32 [250] -> F32 [1]"] {
            assert!(ran.out.contains(part), "no {part:?} in {}", ran.out);
        }
    }
    let json = ringstow(&["diff", &one, &other, "--json"]);
    assert_eq!(json.code, Some(1));
    assert_eq!(json.json()["only_in_a"], json!(["layer.weight"]));
    let quiet = ringstow(&["diff", "-q", &one, &other]);
    assert_eq!((quiet.code, &*quiet.out), (Some(1), ""));
    assert_eq!(ringstow(&["diff", &one, "/nowhere/at/all"]).code, Some(2));
    let failed = ringstow(&["diff", &one, "/nowhere/at/all", "--json"]);
    assert_eq!((failed.code, failed.json()["error"].is_string()), (Some(2), true));
    assert_eq!(ringstow(&["diff", &one]).code, Some(2));
}

#[test]
fn diff_says_what_slim_has_dropped() {
    let dir = Checkpoints::new();
    let (whole, slim) = (dir.step(1), dir.step(2));
    let bias = 1f32.to_le_bytes();
    for path in [&whole, &slim] {
        let mut state = StateDict::new();
        state.bytes("layer.bias", Dtype::F32, &[1], &bias).unwrap();
        state.bytes("optimizer.m", Dtype::F32, &[1], &bias).unwrap().droppable("optimizer");
        save(&state, Path::new(path));
    }
    let said = "`slim` has dropped";
    assert!(!ringstow(&["diff", &whole, &slim]).out.contains(said));
    assert_eq!(ringstow(&["slim", &slim, "--drop", "optimizer"]).code, Some(0));
    let ran = ringstow(&["diff", &whole, &slim]);
    assert!(ran.out.contains("`slim` has dropped optimizer from B"), "{}", ran.out);
    assert!(ran.out.contains("- optimizer.m") && ran.code == Some(1), "{}", ran.out);
    let json = ringstow(&["diff", &slim, &whole, "--json"]).json();
    assert_eq!((&json["dropped_a"], &json["dropped_b"]), (&json!(["optimizer"]), &json!([])));
}

#[test]
fn ls_names_the_copies_that_have_not_ended() {
    let (dir, there) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let from = dir.save(1);
    dir.save(2);
    flip(&from.join(SHARD), 100_000); // a copy of this begins and fails
    let to = there.path().join("step-1");
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    assert_ne!(ringstow(&["promote", from, "--to", to, "-q"]).code, Some(0));
    let listed = ringstow(&["ls", dir.path()]).out;
    let words: Vec<&str> = listed.split_whitespace().collect();
    let said = format!("not copied yet: {from} to {to};");
    assert!(words.join(" ").contains(&said), "{listed}");
    assert_eq!(listed.matches("not copied yet").count(), 1, "{listed}");
}

#[test]
fn ls_of_several_places_shows_which_has_which_step() {
    let (dir, there) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let copy = |from: &Path| {
        let to = there.path().join(from.file_name().unwrap());
        let ran =
            ringstow(&["promote", from.to_str().unwrap(), "--to", to.to_str().unwrap(), "-q"]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
    };
    let (first, second) = (dir.save(1), dir.save(2));
    copy(&first);
    copy(&second);
    fs::remove_dir_all(&first).unwrap();
    fs::remove_dir_all(&second).unwrap();
    dir.save(2);
    dir.killed(3);
    let listed = ringstow(&["ls", dir.path(), there.path().to_str().unwrap()]);
    assert_eq!(listed.code, Some(0), "{}", listed.err);
    let row = |name: &str| {
        let line = listed.out.lines().find(|line| line.starts_with(name)).unwrap();
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect::<Vec<_>>()
    };
    assert_eq!(row("NAME"), ["NAME", "STEP", dir.path(), there.path().to_str().unwrap()]);
    assert_eq!(row("step-00000001"), ["step-00000001", "1", "-", "committed"]);
    assert_eq!(row("step-00000002"), ["step-00000002", "2", "committed", "an older save"]);
    assert_eq!(row("step-00000003"), ["step-00000003", "3", "INCOMPLETE", "-"]);

    assert!(listed.out.contains("step-00000003 is not a committed checkpoint"), "{}", listed.out);

    let json = ringstow(&["ls", dir.path(), there.path().to_str().unwrap(), "--json"]).json();
    assert_eq!(json[dir.path()][0]["step"], 2);
    assert_eq!(json[there.path().to_str().unwrap()][0]["step"], 1);
}

#[test]
fn ls_of_several_places_shows_a_checkpoint_in_one_row() {
    let (dir, there) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let kept = dir.save(7);
    let renamed = dir.0.path().join("kept");
    fs::rename(kept, &renamed).unwrap();
    dir.save(9); // beside a step, `kept` is none
    let to = there.path().join("kept");
    let ran = ringstow(&["promote", renamed.to_str().unwrap(), "--to", to.to_str().unwrap(), "-q"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let listed = ringstow(&["ls", dir.path(), there.path().to_str().unwrap()]).out;
    let rows: Vec<&str> = listed.lines().filter(|line| line.starts_with("kept")).collect();
    assert_eq!(rows.len(), 1, "{listed}");
    assert_eq!(rows[0].matches("committed").count(), 2, "{listed}");
}

#[test]
fn ls_shows_the_other_places_if_one_cannot_be_asked() {
    let dir = Checkpoints::new();
    dir.save(1);
    let away = dir.0.path().join("away");
    let ran = ringstow(&["ls", away.to_str().unwrap(), dir.path()]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("away"), "{}", ran.err);
    let line = ran.out.lines().find(|line| line.starts_with("step-00000001")).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>(),
        ["step-00000001", "1", "?", "committed"]
    );
    let none = ringstow(&["ls", away.to_str().unwrap(), away.to_str().unwrap()]);
    assert_eq!((none.code, &*none.out), (Some(2), ""));
}

#[test]
fn ls_lists_no_link_of_a_managers_own() {
    let dir = Checkpoints::new();
    dir.save(1);
    std::os::unix::fs::symlink("step-00000001", dir.0.path().join(".ringstow-copied")).unwrap();
    std::os::unix::fs::symlink("step-00000001", dir.0.path().join("best")).unwrap();
    let listed = ringstow(&["ls", dir.path()]).out;
    assert!(listed.contains("best") && !listed.contains(".ringstow-copied"), "{listed}");
}
