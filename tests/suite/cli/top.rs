//! `top`: what is in progress.

use super::*;

/// Each look's JSON.
fn looks(dir: &Checkpoints, count: &str) -> Vec<Json> {
    let ran = ringstow(&["top", dir.path(), "--json", "--interval", "0.01", "--looks", count]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn has_file(dir: &Path, ending: &str) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| match path.is_dir() {
        true => has_file(&path, ending),
        false => path.to_string_lossy().ends_with(ending),
    })
}

/// Waits for a file. The limit only ends a test that hangs.
fn wait_for(dir: &Path, ending: &str) {
    let begun = std::time::Instant::now();
    while !has_file(dir, ending) {
        assert!(begun.elapsed().as_secs() < 300, "there is no *{ending}");
        std::thread::yield_now();
    }
}

#[test]
fn save_in_progress_is_shown_with_its_bytes_and_process() {
    let dir = Checkpoints::new();
    dir.save(1);
    // The second of 50 blocks may be written after 10 seconds, the last after minutes.
    let config =
        Config { block_bytes: 4096, pool_bytes: 64 * 4096, write_rate: 400, ..Config::default() };
    let state = crate::common::State::new(2, &[50 * 4096]).into_save();
    let handle = ringstow::Store::new(config).unwrap().save_async(state, dir.step(2)).unwrap();
    wait_for(dir.0.path(), ".part");
    let found = looks(&dir, "2");
    let save = &found[1]["saves"][0];
    assert_eq!(save["path"], dir.step(2));
    assert_eq!((&save["files"], &found[1]["copies"]), (&json!(1), &json!([])));
    if cfg!(target_os = "linux") {
        assert_eq!(save["process"], std::process::id());
        assert!(save["written_bytes"].as_u64().unwrap() <= 3 * 4096, "{save}");
    }
    assert!(found[0]["saves"][0]["bytes_per_s"].is_null(), "there was no look before");
    assert!(save["bytes_per_s"].as_f64().unwrap() >= 0.0, "{save}");
    assert!(found[1]["committed_unix_ms"].as_u64().unwrap() > 0);
    let text = ringstow(&["top", dir.path(), "--looks", "1"]).out;
    assert!(text.contains("save  step-00000002"), "{text}");
    handle.cancel();
    assert!(handle.result().is_err());
    let text = ringstow(&["top", dir.path(), "--looks", "1"]).out;
    assert!(text.contains("nothing is in progress") && text.contains("last commit 20"), "{text}");
}

#[test]
fn killed_save_has_no_process() {
    let dir = Checkpoints::new();
    dir.killed(2);
    assert_eq!(looks(&dir, "1")[0]["saves"][0]["process"], Json::Null);
    let text = ringstow(&["top", dir.path(), "--looks", "1"]).out;
    assert!(text.contains("was killed") && text.contains("nothing is committed yet"), "{text}");
}

#[test]
fn directory_that_does_not_exist_yet_has_nothing_in_progress() {
    let dir = Checkpoints::new();
    let ran = ringstow(&["top", &dir.step(1), "--looks", "1"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.contains("does not exist yet\nnothing is in progress"), "{}", ran.out);
    assert_eq!(ringstow(&["top", dir.path(), "--looks", "0"]).code, Some(2));
}

#[test]
fn copy_in_progress_is_shown_with_its_process() {
    let (dir, tier) = (Checkpoints::new(), tempfile::tempdir().unwrap());
    let from = dir.save(1);
    let to = tier.path().join("step-1");
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    // 0.8 MB at this rate take minutes.
    let mut copying = command(&["promote", from, "--to", to, "--rate", "2000"]).spawn().unwrap();
    wait_for(dir.0.path(), "journal.jsonl");
    wait_for(tier.path(), ".part");
    let found = looks(&dir, "1");
    let text = ringstow(&["top", dir.path(), "--looks", "1"]).out;
    let there = ringstow(&["top", tier.path().to_str().unwrap(), "--looks", "1"]).out;
    copying.kill().unwrap();
    copying.wait().unwrap();
    let copy = &found[0]["copies"][0];
    assert_eq!((&copy["checkpoint"], &copy["to"]), (&json!(from), &json!(to)));
    assert!(copy["sent_bytes"].as_u64().unwrap() < copy["bytes"].as_u64().unwrap(), "{copy}");
    if cfg!(target_os = "linux") {
        assert_eq!(copy["process"], copying.id());
    }
    assert!(text.contains(&format!("copy  step-00000001 to {to}")), "{text}");
    assert!(there.contains("copy to here  step-1"), "{there}");
    let of_killed = &looks(&dir, "1")[0]["copies"][0];
    assert_eq!(of_killed["process"], Json::Null);
    // The journal says nothing before the end of a file: what is in it counts.
    let files = fs::read_dir(to).unwrap().map(|entry| entry.unwrap().path());
    let part = files.into_iter().find(|path| path.extension().is_some_and(|end| end == "part"));
    fs::write(part.unwrap(), [7; 8192]).unwrap();
    if cfg!(target_os = "linux") {
        assert_eq!(looks(&dir, "1")[0]["copies"][0]["sent_bytes"], 8192);
    }
}

#[test]
fn interval_that_is_no_time_is_refused() {
    for interval in ["0", "-1", "nan", "1e300"] {
        let dir = Checkpoints::new();
        let argument = format!("--interval={interval}");
        let ran = ringstow(&["top", dir.path(), &argument, "--looks", "1"]);
        assert_eq!(ran.code, Some(2), "{interval}");
        assert!(ran.err.contains("give seconds, above 0"), "{}", ran.err);
    }
}
