//! The first program of `docs/rust.md`: saves a state and loads it again.

use ringstow::StateDict;

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let weight = vec![0.5f32; 1024 * 256];
    let mut state = StateDict::new();
    state.slice("layer.weight", &[1024, 256], &weight)?;
    state.value("step", 1000);
    ringstow::save(&state, "run/step-1000")?;
    let newest = ringstow::latest("run")?.expect("a checkpoint was saved");
    let loaded = ringstow::load(&newest)?;
    let weight: &[f32] = loaded.tensor("layer.weight").expect("it was saved").as_slice()?;
    assert_eq!((loaded.value("step")?.as_int(), weight[0]), (Some(1000), 0.5));
    Ok(())
}
