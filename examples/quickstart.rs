//! The README's program: saves a state, and reads it back, all of it and a part.

use ringstow::{Checkpoint, Config, StateDict};

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let weight = vec![0.5f32; 1024 * 256];
    let mut state = StateDict::new();
    state.slice("layer.weight", &[1024, 256], &weight)?; // or `tensor`: any safetensors::View
    state.value("step", 1000);
    ringstow::save(&state, "run/step-1000", &Config::default())?;

    let newest = ringstow::latest("run")?.expect("a checkpoint was saved");
    let loaded = ringstow::load(&newest)?;
    let step = loaded.value("step")?.as_int();
    let weight: &[f32] = loaded.tensor("layer.weight").expect("it was saved").as_slice()?;
    assert_eq!((step, weight[0]), (Some(1000), 0.5));

    let checkpoint = Checkpoint::open(&newest)?; // reads no tensor
    let rows = checkpoint.load_part("layer.weight", &[16..32, 0..256])?; // reads these rows
    assert_eq!(rows.shape(), [16, 256]);
    Ok(())
}
