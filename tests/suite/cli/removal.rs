//! `prune` and `retain`.

use super::*;
use crate::common::{State, runtime};
use std::os::unix::net::UnixListener;

#[test]
fn prune_removes_what_its_dry_run_lists() {
    let dir = Checkpoints::new();
    let whole = dir.save(1);
    let killed = dir.killed(2);
    let stale = whole.join("rank00000-0.g9.safetensors.part");
    fs::write(&stale, "half").unwrap();
    let label = Path::new(dir.path()).join(".ringstow-run.json.0123456789abcdef.part");
    fs::write(&label, "{").unwrap();
    let damaged = dir.save(3);
    flip(&damaged.join("manifest.json"), 20);

    let planned = ringstow(&["prune", "--dry-run", dir.path()]);
    assert_eq!(planned.code, Some(0), "{}", planned.err);
    assert!(planned.out.contains("would remove"), "{}", planned.out);
    assert!(stale.exists() && killed.exists(), "a dry run changes nothing");
    let plan = ringstow(&["prune", "-n", dir.path(), "--json"]).json();

    let done = ringstow(&["prune", dir.path(), "--json"]).json();
    assert_eq!(plan, done, "it does what it said");
    assert_eq!(done["removed"].as_array().unwrap().len(), 4);
    assert!(!stale.exists() && !killed.exists() && !label.exists());
    assert_eq!(ringstow(&["verify", whole.to_str().unwrap()]).code, Some(0));
    assert!(damaged.join(SHARD).exists(), "what is damaged is left alone");
    assert_eq!(done["left"].as_array().unwrap().len(), 1);
    fs::remove_dir_all(damaged).unwrap();
    let again = ringstow(&["prune", dir.path()]);
    assert!(again.out.starts_with("nothing to clear away"), "{}", again.out);
}

#[test]
fn prune_leaves_directories_whose_manifest_is_no_file_and_clears_the_others() {
    let dir = Checkpoints::new();
    let odd = [1, 2, 4].map(|step| PathBuf::from(dir.step(step)));
    odd.iter().for_each(|odd| fs::create_dir(odd).unwrap());
    fs::create_dir(odd[0].join("manifest.json")).unwrap();
    let fifo = odd[1].join("manifest.json");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _socket = UnixListener::bind(odd[2].join("manifest.json")).unwrap();
    odd.iter().for_each(|odd| fs::write(odd.join(SHARD), "").unwrap());
    let killed = dir.killed(3);

    let done = ringstow(&["prune", dir.path(), "--json"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let done = done.json();
    assert!(!killed.exists() && odd.iter().all(|odd| odd.join(SHARD).exists()));
    for odd in &odd {
        let is_it = |left: &&Json| left["path"].as_str() == odd.to_str();
        let left = done["left"].as_array().unwrap().iter().find(is_it).expect("it is reported");
        let reason = left["reason"].as_str().unwrap();
        assert!(reason.contains("manifest.json: not a regular file"), "{reason}");
    }
}

#[test]
fn retain_removes_what_its_dry_run_lists() {
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
    let [kept, removed] = [[newer.clone(), newest.clone()], [oldest.clone(), older.clone()]];
    assert_eq!(
        done,
        json!({
            "counted": "step-*", "kept": kept, "reasons": ["it is among the 2 newest", "it is among the 2 newest"],
            "removed": removed, "cleared": [], "left": [], "removed_recycled": [],
            "warnings": []
        })
    );
    assert!(!oldest.exists() && !older.exists());
    assert_eq!(ringstow(&["verify", dir.path()]).out.matches("ok  ").count(), 2);

    let last = dir.retain(&["-k", "1"]);
    let lines = format!(
        "steps  step-*\nremoved  {}\nkept  {}: it is the newest\n",
        newer.display(),
        newest.display()
    );
    assert_eq!((last.code, last.out), (Some(0), lines));
}

/// Saves these ranks' parts of a step independently, of `ranks` in total.
fn save_each(dir: &Checkpoints, step: u32, there: &[u32], ranks: u32) -> PathBuf {
    let whole = PathBuf::from(dir.step(step));
    for &rank in there {
        let (state, save) = (State::new(1, &[500]), format!("a-{step}"));
        state.save_alone((rank, ranks), &save, &runtime(), &whole);
    }
    whole
}

#[test]
fn independent_ranks_count_as_one_checkpoint() {
    let dir = Checkpoints::new();
    let whole = save_each(&dir, 1, &[0, 1], 2);
    let newer = save_each(&dir, 2, &[0, 1], 2);
    let half = save_each(&dir, 3, &[0, 2], 4);

    let ran = ringstow(&["ls", dir.path()]);
    assert_eq!(ran.out.matches("committed  ").count(), 2, "{}", ran.out);
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
    assert_eq!((&done["kept"], &done["removed"]), (&json!([newer]), &json!([whole])));
    assert_eq!(done["left"][0]["path"], json!(half));
    assert!(!whole.exists() && half.join("rank00002").join(SHARD).exists());
}

#[test]
fn retain_removes_nothing_up_to_keep() {
    let dir = Checkpoints::new();
    let nowhere = ringstow(&["retain", "/nowhere/at/all", "--keep", "1"]);
    for (refused, said) in [
        (dir.retain(&["--keep", "x"]), "it must be a whole number"),
        (dir.retain(&["--keep", "0"]), "keep at least 1"),
        (dir.retain(&[]), "--keep <N>"),
        (nowhere, "/nowhere/at/all"),
    ] {
        assert_eq!(refused.code, Some(2));
        assert!(refused.err.contains(said), "{}", refused.err);
    }
    assert_eq!(dir.retain(&["--keep-within", "2d"]).code, Some(0), "any rule is enough");
    let none = dir.retain(&["--keep", "3"]);
    assert_eq!(none.code, Some(0), "{}", none.err);
    assert!(none.out.starts_with("no checkpoints in"), "{}", none.out);
    let all = [1, 2].map(|step| dir.save(step));
    let done = dir.retain(&["--keep", "3", "--json"]).json();
    assert_eq!(
        done,
        json!({
            "counted": "step-*", "kept": all, "reasons": ["it is among the 3 newest", "it is among the 3 newest"],
            "removed": [], "cleared": [], "left": [], "removed_recycled": [],
            "warnings": []
        })
    );
    assert_eq!(ringstow(&["verify", dir.path()]).code, Some(0));
}

#[test]
fn retain_ignores_what_cannot_be_loaded() {
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
    assert_eq!((&done["kept"], &done["removed"]), (&json!([older]), &json!([oldest])));
    let left: Vec<&Json> =
        done["left"].as_array().unwrap().iter().map(|left| &left["path"]).collect();
    assert_eq!(left, [&json!(damaged), &json!(killed)]);
    assert!(damaged.join(SHARD).exists() && killed.join(format!("{SHARD}.part")).exists());
}

#[test]
fn retain_ignores_names_without_a_number_at_the_end() {
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
fn retain_recycles_files_only_on_request() {
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
    assert_eq!(planned["removed_recycled"], json!([spare, spares]));
    let recycled = dir.retain(&["--keep", "1", "--dry-run", "--json", "--recycle"]).json();
    assert_eq!(recycled["removed_recycled"], json!([]));
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
#[cfg(target_os = "linux")]
fn recycled_files_are_listed_and_pruned() {
    let dir = Checkpoints::new();
    [1, 2].into_iter().for_each(|step| drop(dir.save(step)));
    assert!(!ringstow(&["ls", dir.path()]).out.contains("--recycled"));
    // Without a flag, the configuration decides.
    let ran = command(&["retain", dir.path(), "-k", "1"]).env("RINGSTOW_RECYCLE", "true").output();
    assert!(ran.unwrap().status.success());
    let spare = dir.0.path().join(".ringstow-spares/rank00000-0.spare");
    assert!(spare.exists());
    let listed = ringstow(&["ls", dir.path()]).out;
    assert!(listed.contains("kB in .ringstow-spares"), "{listed}");
    assert!(listed.contains(&format!("`ringstow prune --recycled {}`", dir.path())), "{listed}");

    assert!(ringstow(&["prune", dir.path()]).out.starts_with("nothing to clear away"));
    let planned = ringstow(&["prune", dir.path(), "--recycled", "--dry-run", "--json"]).json();
    assert_eq!(planned["removed"], json!([spare, spare.parent().unwrap()]));
    assert!(spare.exists());
    assert_eq!(ringstow(&["prune", dir.path(), "--recycled", "--json"]).json(), planned);
    assert!(!spare.parent().unwrap().exists());
}

#[test]
fn retain_takes_a_pattern_and_warns_if_nothing_matches() {
    let dir = Checkpoints::new();
    for (number, name) in ["epoch=1-loss=0.3", "epoch=2-loss=0.2"].into_iter().enumerate() {
        fs::rename(dir.save(number as u32), dir.0.path().join(name)).unwrap();
    }
    let ran = dir.retain(&["-k", "1"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("none of the 2 checkpoints"), "{}", ran.err);
    assert!(ran.out.matches("left alone").count() == 2, "{}", ran.out);
    let bad = dir.retain(&["-k", "1", "--pattern", "epoch=*-loss=*"]);
    assert_eq!(bad.code, Some(2));
    assert!(bad.err.contains("put `{step}` where the step is"), "{}", bad.err);
    let done = dir.retain(&["-k", "1", "--pattern", "epoch={step}-loss=*", "--json"]).json();
    assert_eq!(done["removed"], json!([dir.0.path().join("epoch=1-loss=0.3")]));
    assert_eq!(done["counted"], "epoch={step}-loss=*");
}

#[test]
#[cfg(all(debug_assertions, target_os = "linux"))] // only such builds play a network file system
fn prune_needs_a_promise_where_other_hosts_may_be_saving() {
    let dir = Checkpoints::new();
    let (whole, killed) = (dir.save(1), dir.killed(2));
    let prune = |flags: &[&str]| {
        let play = format!("nfs4:nolock:{}", dir.path());
        let mut prune = command(&[&["prune", dir.path(), "--json"], flags].concat());
        let done = prune.env("RINGSTOW_TEST_FILE_SYSTEM", play).output().unwrap();
        serde_json::from_slice::<Json>(&done.stdout).unwrap()
    };
    let done = prune(&[]);
    assert_eq!(done["removed"], json!([]));
    let reason = done["left"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("`nolock`") && reason.contains("--no-other-writers"), "{reason}");
    let planned = prune(&["--no-other-writers", "--dry-run"]);
    assert!(killed.exists());
    let done = prune(&["--no-other-writers"]);
    assert_eq!(done, planned);
    assert!(!killed.exists() && done["left"] == json!([]), "{done}");
    assert_eq!(ringstow(&["verify", whole.to_str().unwrap()]).code, Some(0));
}

#[test]
#[cfg(all(debug_assertions, target_os = "linux"))] // the seam exists in these builds only
fn clean_up_that_the_system_stops_at_one_checkpoint_exits_with_1() {
    let dir = Checkpoints::new();
    let disk = tempfile::tempdir().unwrap();
    let stripe = ["--stripe", disk.path().to_str().unwrap()];
    let config = Config { stripe: vec![disk.path().into()], ..Config::default() };
    let store = ringstow::Store::new(config).unwrap();
    for step in [1, 2] {
        store.save(StateDict::new().value("step", step), dir.step(step)).unwrap();
    }
    for command in [&["prune", dir.path()][..], &["retain", dir.path(), "-k", "1"]] {
        let at = |n: u64, flags: &[&str]| {
            let mut run = self::command(&[command, &stripe, flags].concat());
            let ran = run.env("RINGSTOW_TEST_SEAM", format!("fail:{n}:5")).output().unwrap();
            (ran.status.code(), String::from_utf8(ran.stdout).unwrap())
        };
        let of_marker = |n: &u64| at(*n, &["--dry-run"]).1.contains("companion.json");
        let n = (1..100).find(of_marker).expect("the marker is read");
        let (code, said) = at(n, &["--dry-run", "--json"]);
        let left: Json = serde_json::from_str(&said).unwrap();
        assert!(code == Some(1) && left["left"][0]["failed"] == true, "{code:?} {said}");
        let (code, said) = at(n, &[]);
        assert!(code == Some(1) && said.contains("left alone  "), "{code:?} {said}");
    }
}

#[test]
fn retain_names_each_checkpoint_that_it_could_not_remove_and_removes_the_others() {
    let dir = Checkpoints::new();
    let [first, second, third, last] = [1, 2, 3, 4].map(|step| dir.save(step));
    for step in [&first, &second] {
        // No manifest can take the name.
        fs::create_dir(step.join("manifest.json.retired")).unwrap();
    }
    let ran = dir.retain(&["-k", "1", "--json"]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    let done = ran.json();
    assert_eq!((&done["removed"], &done["kept"]), (&json!([third]), &json!([last])));
    for (at, step) in [&first, &second].into_iter().enumerate() {
        let left = &done["left"][at];
        assert_eq!((&left["path"], &left["failed"]), (&json!(step), &json!(true)));
        assert!(left["reason"].as_str().unwrap().contains("Is a directory"), "{left}");
    }
    assert!(!third.exists() && last.exists());
    let text = dir.retain(&["-k", "1"]);
    assert_eq!(text.code, Some(1));
    assert!(
        text.out.contains(&format!("left alone  {}: renaming", first.display())),
        "{}",
        text.out
    );
}

#[test]
fn retain_keeps_steps_by_number_and_by_metric_and_says_why() {
    let dir = Checkpoints::new();
    for (step, loss) in [(5, 0.1), (10, 0.5), (15, f64::NAN), (20, 0.3), (25, 0.1), (30, 0.9)] {
        let mut state = StateDict::new();
        state.step(step).metrics([("val:loss", loss)]).unwrap();
        save(&state, Path::new(&dir.step(step as u32)));
    }
    let rules = ["-k", "1", "--keep-every", "10", "--keep-best", "val:loss:min:1"];
    let line = |step, what: &str| what.replacen("  ", &format!("  {}", dir.step(step)), 1);
    let planned = dir.retain(&[&rules[..], &["--dry-run"]].concat()).out;
    for (step, what) in [
        (5, "would remove  "),
        (10, "kept  : its number is a multiple of 10"),
        (15, "would remove  "),
        (20, "kept  : its number is a multiple of 10"),
        (25, "kept  : its val:loss of 0.1 is the lowest"),
        (30, "kept  : it is the newest; its number is a multiple of 10"),
    ] {
        assert!(planned.lines().any(|found| found == line(step, what)), "{step}: {planned}");
    }
    let misspelled = dir.retain(&["-k", "1", "--keep-best", "loss:min:1"]);
    assert_eq!(misspelled.code, Some(0), "{}", misspelled.err);
    assert!(misspelled.err.contains("no step in") && misspelled.err.contains("have val:loss"));
    assert_eq!(misspelled.out.matches("kept  ").count(), 6, "{}", misspelled.out);
    let recent =
        dir.retain(&["-k", "1", "--keep-every-time", "1d", "--keep-within", "1h", "--dry-run"]);
    let reason = "it was saved within 1h of the last save";
    assert_eq!(recent.out.matches(reason).count(), 6, "{}", recent.out);
    assert!(recent.out.contains("it is the first in an interval of 1day"), "{}", recent.out);
    assert_eq!(dir.retain(&rules).code, Some(0));
    assert_eq!(
        [5, 10, 15, 20, 25, 30].map(|step| Path::new(&dir.step(step)).exists()),
        [false, true, false, true, true, true]
    );
    for (flags, said) in [
        (["--keep-best", "loss:min"], "loss:min:2"),
        (["--keep-best", "loss:low:2"], "`min` or `max`"),
        (["--keep-best", "loss:min:0"], "keep at least 1"),
        (["--keep-every", "0"], "every = 0"),
        (["--keep-every", "x"], "whole number"),
        (["--keep-within", "2"], "time unit needed"),
        (["--keep-every-time", "0s"], "more than zero"),
    ] {
        let ran = dir.retain(&[&["-k", "1"], &flags[..]].concat());
        assert!(ran.code == Some(2) && ran.err.contains(said), "{}", ran.err);
    }
}

#[test]
fn damaged_checkpoint_that_cannot_be_removed_is_to_be_removed_by_hand() {
    let dir = Checkpoints::new();
    let error = |path: &Path| ringstow::remove(path, Disposal::Remove).unwrap_err().to_string();
    let damaged = dir.save(1);
    flip(&damaged.join("manifest.json"), 20);
    let said = error(&damaged);
    assert!(said.contains("remove the checkpoint's directory yourself"), "{said}");
    assert!(damaged.join(SHARD).exists());
    // A load of it has nothing to remove.
    let said = ringstow::load(&damaged).unwrap_err().to_string();
    assert!(said.contains("go back to an earlier checkpoint"), "{said}");
}

#[test]
fn another_programs_files_are_never_to_be_removed_by_hand() {
    let dir = Checkpoints::new();
    let theirs = dir.0.path().join("app");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("manifest.json"), "{\"name\": \"my web app\"}").unwrap();
    let said = ringstow::remove(&theirs, Disposal::Remove).unwrap_err().to_string();
    assert!(said.contains("its manifest.json is another program's"), "{said}");
    // Beside a shard, it has overwritten ringstow's.
    let overwritten = dir.save(1);
    fs::copy(theirs.join("manifest.json"), overwritten.join("manifest.json")).unwrap();
    let both = said + &ringstow::remove(&overwritten, Disposal::Remove).unwrap_err().to_string();
    assert!(!both.contains("yourself"), "{both}");
}

#[test]
fn removal_of_a_directory_of_checkpoints_asks_for_the_path_of_one() {
    let dir = Checkpoints::new();
    let step = dir.save(1);
    let said = ringstow::remove(dir.0.path(), Disposal::Remove).unwrap_err().to_string();
    let asked = format!("such as {}: give the path of one", step.display());
    assert!(said.contains(&asked) && !said.contains("load"), "{said}");
}

#[test]
fn advice_about_a_run_that_is_itself_a_checkpoint_works() {
    let dir = Checkpoints::new();
    let step = dir.save(1);
    let mut state = StateDict::new();
    state.value("step", 7);
    let warning = || ringstow(&["ls", dir.path()]).err;
    assert_eq!(warning(), "");

    save(&state, dir.0.path());
    assert!(warning().contains("`remove` it, which keeps those in it"), "{}", warning());
    ringstow::remove(dir.path(), ringstow::Disposal::Remove).unwrap();
    assert_eq!(warning(), "");

    fs::write(dir.0.path().join(format!("{SHARD}.part")), "half").unwrap();
    assert!(warning().contains("`prune` it"), "{}", warning());
    assert_eq!(ringstow(&["prune", dir.path()]).code, Some(0));
    assert_eq!(warning(), "");

    save(&state, dir.0.path());
    fs::write(dir.0.path().join("manifest.json"), "damaged").unwrap();
    assert!(warning().ends_with("move its files\n"), "{}", warning());
    fs::remove_file(dir.0.path().join("manifest.json")).unwrap();
    fs::remove_file(dir.0.path().join(SHARD)).unwrap();
    assert_eq!(warning(), "");
    assert_eq!(ringstow(&["verify", step.to_str().unwrap()]).code, Some(0));
}

#[test]
fn slim_drops_what_was_set_apart_and_says_how_much_that_was() {
    let dir = Checkpoints::new();
    let path = dir.step(1);
    let state = State::new(1, &[3000]);
    state.save_with_extra(&runtime(), path.as_ref()).unwrap();
    let refused = ringstow(&["slim", &path, "--drop", "absent"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("nothing named \"absent\""), "{}", refused.err);
    let done = ringstow(&["slim", &path, "--drop", crate::common::EXTRA, "--json"]).json();
    assert_eq!((&done["tensors"], &done["names"]), (&json!(2), &json!([crate::common::EXTRA])));
    let again = ringstow(&["slim", &path, "--drop", crate::common::EXTRA]);
    assert_eq!(again.code, Some(0));
    assert!(again.out.contains("dropped already"), "{}", again.out);
    let shown = ringstow(&["show", &path]);
    assert!(
        shown.out.contains("dropped") && shown.out.contains(crate::common::EXTRA),
        "{}",
        shown.out
    );
}
