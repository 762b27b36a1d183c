//! Checkpoints at paths that are no Unicode, which no path has to be.
#![cfg(target_os = "linux")] // elsewhere a file system may refuse them

use crate::common::{
    SIZES, State, assert_no_litter, assert_says, on, runtime, scratch, small_config, verify,
};
use ringstow::internals::store;
use ringstow::{
    Config, Disposal, OpenOptions, Runtime, SaveReport, StateDict, Store, prune, retain,
};
use serde_json::{json, to_value};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
#[cfg(feature = "cli")]
use std::{path::Path, process::Command};

/// A directory of checkpoints whose name is no UTF-8, and that name as reports have it.
fn root() -> (tempfile::TempDir, PathBuf, String) {
    let scratch = scratch();
    let root = scratch.path().join(OsStr::from_bytes(b"sm\xff"));
    let told = format!("{}/sm\u{0}ff", scratch.path().to_str().unwrap());
    (scratch, root, told)
}

#[test]
fn reports_of_paths_that_are_not_utf_8_become_json() {
    let ((_scratch, root, told), runtime) = (root(), runtime());
    let (first, second) = (root.join("step-1"), root.join("step-2"));
    let saved = State::new(1, &SIZES).save(&runtime, &first).unwrap();
    State::new(2, &SIZES).save(&runtime, &second).unwrap();
    let text = serde_json::to_string(&saved).unwrap();
    assert_eq!(to_value(&saved).unwrap()["path"], json!(format!("{told}/step-1")));
    assert_eq!(serde_json::from_str::<SaveReport>(&text).unwrap(), saved, "nothing is lost");

    let loaded = crate::common::load_all(&runtime, &first).unwrap();
    assert_eq!(to_value(&loaded.report).unwrap()["path"], json!(format!("{told}/step-1")));

    crate::common::flip(&crate::common::shard_of(&first), 5000);
    let checked = to_value(verify(&runtime, &first).unwrap()).unwrap();
    let file = format!("{told}/step-1/rank00000-0.safetensors");
    assert_eq!(checked["damage"][0]["file"], json!(file));

    fs::write(root.join("step-2/rank00000-9.safetensors.part"), "left").unwrap();
    let pruned = to_value(prune(&root).unwrap()).unwrap();
    assert_eq!(pruned["removed"], json!([format!("{told}/step-2/rank00000-9.safetensors.part")]));

    let found = to_value(Store::found().unwrap().list(&root).unwrap()).unwrap();
    assert_eq!(found[0]["path"], json!(format!("{told}/step-1")));
    let retained = to_value(retain(&root, 1, Disposal::Recycle).unwrap()).unwrap();
    assert_eq!(retained["removed"], json!([format!("{told}/step-1")]));
    assert_eq!(retained["kept"], json!([format!("{told}/step-2")]));
    let removed = to_value(ringstow::remove(&second, Disposal::Remove).unwrap()).unwrap();
    assert_eq!(removed["path"], json!(format!("{told}/step-2")));
}

#[test]
fn a_stripe_that_is_no_utf_8_is_one_like_any_other() {
    let (_scratch, root, _) = root();
    let stripe = root.join("disk");
    fs::create_dir_all(&stripe).unwrap();
    let elsewhere = scratch();
    let dir = elsewhere.path().join("step-1");
    let config = Config { stripe: vec![stripe.clone()], files: 2, ..small_config() };
    let runtime = Runtime::new(config.clone()).unwrap();
    let state = State::new(1, &SIZES);
    state.save(&runtime, &dir).unwrap();
    state.assert_at(&runtime, &dir);
    crate::common::assert_no_litter_in(&config, &dir);
}

#[test]
fn checkpoint_whose_path_is_not_utf_8_is_not_striped() {
    let (_scratch, root, _) = root();
    let stripe = scratch();
    let config = Config { stripe: vec![stripe.path().into()], files: 2, ..small_config() };
    let (striped, alone) = (Runtime::new(config.clone()).unwrap(), runtime());
    let (dir, state) = (root.join("step-1"), State::new(1, &SIZES));
    let error = state.save(&striped, &dir).unwrap_err();
    assert_says(&error, &["step-1", "no UTF-8", "Config.stripe"]);
    assert!(!root.exists() && fs::read_dir(stripe.path()).unwrap().next().is_none());
    state.save(&alone, &dir).unwrap();
    assert_no_litter(&dir);
    // Nor is another's companion, of the same name and with a marker that reads alike, taken for its own.
    let companion = stripe.path().join("step-1");
    fs::create_dir(&companion).unwrap();
    let marker = json!({ "checkpoint": dir.to_string_lossy() });
    fs::write(companion.join("companion.json"), marker.to_string()).unwrap();
    fs::write(companion.join("rank00000-7.safetensors"), "another's").unwrap();
    store::prune(&root, &config).unwrap();
    let opened = OpenOptions::of(&config).open(&dir).unwrap();
    let names = opened.tensors().iter().map(|tensor| tensor.name.as_str());
    opened.load_names(names, on(&striped)).unwrap();
    assert!(companion.join("rank00000-7.safetensors").exists());
}

#[cfg(feature = "cli")]
#[test]
fn the_program_tells_such_paths_in_json() {
    let ((_scratch, root, told), runtime) = (root(), runtime());
    for step in 1..3 {
        State::new(step, &SIZES).save(&runtime, &root.join(format!("step-{step}"))).unwrap();
    }
    let run = |words: &[&str], path: &Path| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_ringstow"));
        let ran = program.args(words).arg("--json").arg(path).output().unwrap();
        assert!(ran.status.success(), "{words:?}: {}", String::from_utf8_lossy(&ran.stderr));
        serde_json::from_slice::<serde_json::Value>(&ran.stdout).unwrap()
    };
    let (first, second) = (json!(format!("{told}/step-1")), json!(format!("{told}/step-2")));
    assert_eq!(run(&["ls"], &root)[0]["path"], first);
    assert_eq!(run(&["show"], &root.join("step-1"))["path"], first);
    let checked = run(&["verify", "--quiet"], &root);
    assert_eq!((&checked[1]["path"], &checked[1]["report"]["path"]), (&second, &second));
    assert_eq!(run(&["prune"], &root)["removed"], json!([]));
    assert_eq!(run(&["retain", "--keep", "1"], &root)["removed"], json!([first]));
}

/// What reads of a path return that must be refused. Those of an object store are not asked: they are for a store to answer.
fn reads_of(path: &str) -> Vec<ringstow::Result<()>> {
    if path.starts_with("s3://") {
        return Vec::new();
    }
    vec![
        ringstow::load(path).map(drop),
        ringstow::load_async(path).map(drop),
        ringstow::verify(path).map(drop),
        ringstow::Checkpoint::open(path).map(drop),
        ringstow::latest(path).map(drop),
    ]
}

#[test]
fn a_url_or_a_tilde_is_refused_and_nothing_is_made() {
    let here: Vec<_> = std::fs::read_dir(".").unwrap().map(|entry| entry.unwrap().path()).collect();
    let config = ringstow::Config::default();
    for path in ["s3://bucket/x", "s3:/bucket/x", "https://host/x", "~/x", "~"] {
        let refused = [
            ringstow::Store::new(config.clone()).unwrap().save(&StateDict::new(), path).map(drop),
            ringstow::Store::new(config.clone())
                .unwrap()
                .save_async(StateDict::new(), path)
                .map(drop),
            ringstow::Store::new(config.clone())
                .unwrap()
                .write_rank(&StateDict::new(), 0, path)
                .map(drop),
            ringstow::Store::new(config.clone())
                .unwrap()
                .write_rank_async(StateDict::new(), 0, path)
                .map(drop),
            ringstow::Store::new(config.clone())
                .unwrap()
                .export_async(StateDict::new(), path)
                .map(drop),
            ringstow::Store::found().unwrap().begin(path, 1).map(drop),
        ];
        for refused in refused.into_iter().chain(reads_of(path)) {
            let error = refused.unwrap_err();
            assert!(matches!(error, ringstow::Error::Invalid { .. }), "{path}: {error:?}");
        }
    }
    let now: Vec<_> = std::fs::read_dir(".").unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(here, now);
}
