//! Exports of models.

use crate::common::held::{self, Filled, HeldUp};
use crate::common::{assert_says, names_in, small_config};
use crate::{BYTES, Hosts, LOCK, state, store};
use ringstow::internals::format::names;
use ringstow::{Config, Store};
use std::fs;

#[test]
fn export_never_clears_what_another_host_may_be_writing() {
    let hosts = Hosts::without_locks();
    let dir = hosts.dir();
    let several = Store::new(Config { shard_bytes: 8192, ..small_config() }).unwrap();
    let first = HeldUp::start(1, false, |state| store().export_async(state, &dir).unwrap());
    let before = names_in(&dir);
    for other in [store(), several] {
        let mut model = state(2);
        held::add(&mut model, "u", Filled { byte: 2, bytes: BYTES });
        let error = other.export(&model, &dir).unwrap_err();
        assert_says(&error, &["model.safetensors.part", "remove"]);
        assert_eq!(names_in(&dir), before);
    }
    first.end().unwrap();
    assert_eq!(names_in(&dir), [names::MODEL_CLAIM, "model.safetensors"]);
    let loaded = ringstow::OpenOptions::new().foreign(true).open(&dir).unwrap();
    assert_eq!(loaded.tensors().len(), 1);
}

#[test]
fn export_leaves_no_lock_file_beside_the_model() {
    let hosts = Hosts::with_locks();
    let dir = hosts.dir();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("config.json"), "{}").unwrap();
    let fails = |state| store().export_async(state, &dir).unwrap();
    assert!(HeldUp::start(2, true, fails).end().is_err());
    assert_eq!(names_in(&dir), ["config.json"]);
    // Of an export that was killed.
    fs::write(dir.join(LOCK), "").unwrap();
    store().export(&state(1), &dir).unwrap();
    assert_eq!(names_in(&dir), [names::MODEL_CLAIM, "config.json", "model.safetensors"]);
}
