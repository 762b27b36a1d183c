//! A later change of directory moves nothing that is in progress.

use crate::common::held::{self, made};
use crate::common::is_alone;
use std::sync::{Arc, Barrier};

#[test]
fn background_save_keeps_its_path_across_chdir() {
    if !is_alone("chdir::background_save_keeps_its_path_across_chdir") {
        return;
    }
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::env::set_current_dir(here.path()).unwrap();
    let gate = Arc::new(Barrier::new(2));
    let met = gate.clone();
    let waits = made(64, move |_, to| {
        met.wait();
        to.fill(7);
        Ok(())
    });
    let saving = ringstow::save_async(held::only(waits), "ckpt").unwrap();
    std::env::set_current_dir(there.path()).unwrap();
    gate.wait();
    saving.result().unwrap();
    let loaded = ringstow::load_async(here.path().join("ckpt")).unwrap().result().unwrap();
    assert_eq!(loaded.tensor("t").unwrap().data(), [7; 64]);
    assert_eq!(std::fs::read_dir(there.path()).unwrap().count(), 0);
}
