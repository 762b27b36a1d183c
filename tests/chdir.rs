//! A later change of directory moves nothing that is in progress. Alone in its program: the current directory
//! is the process's.

use ringstow::{Dtype, Source, StateDict, TensorInfo};
use std::sync::{Arc, Barrier};

/// Bytes that are had once somebody has met it.
struct Waits(Arc<Barrier>);

impl Source for Waits {
    fn nbytes(&self) -> u64 {
        64
    }
    fn read(&self, _: usize, to: &mut [u8]) -> ringstow::Result<()> {
        self.0.wait();
        to.fill(7);
        Ok(())
    }
}

#[test]
fn background_save_keeps_its_path_across_chdir() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::env::set_current_dir(here.path()).unwrap();
    let gate = Arc::new(Barrier::new(2));
    let mut state = StateDict::new();
    let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![64] };
    state.source(info, Box::new(Waits(gate.clone())));
    let saving = ringstow::save_async(state, "ckpt").unwrap();
    std::env::set_current_dir(there.path()).unwrap();
    gate.wait();
    saving.result().unwrap();
    let loaded = ringstow::load_async(here.path().join("ckpt")).unwrap().result().unwrap();
    assert_eq!(loaded.tensor("t").unwrap().data(), [7; 64]);
    assert_eq!(std::fs::read_dir(there.path()).unwrap().count(), 0);
}
