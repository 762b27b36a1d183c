//! Loads a part of a tensor: the program of `docs/rust.md`.

use ringstow::{Checkpoint, StateDict};

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let weight = vec![0.5f32; 1024 * 256];
    let mut state = StateDict::new();
    state.slice("layer.weight", &[1024, 256], &weight)?; // or `tensor`: any safetensors::View
    ringstow::save(&state, "run/step-1000")?;

    let checkpoint = Checkpoint::open("run/step-1000")?; // reads no tensor
    let rows = checkpoint.load_part("layer.weight", &[16..32, 0..256])?; // reads these rows
    assert_eq!(rows.shape(), [16, 256]);
    Ok(())
}
