//! Saves in the background what the training shares with the save: the program of `docs/rust.md`.

use ringstow::{SaveHandle, StateDict};
use std::sync::Arc;

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let mut weight = Arc::new(vec![0.0f32; 1 << 20]);
    let mut saving: Option<SaveHandle> = None;
    for step in 1..=10 {
        // Train. This copies the weight only while a save still holds it.
        Arc::make_mut(&mut weight).iter_mut().for_each(|w| *w += 1.0);
        if step % 5 == 0 {
            saving.take().map(SaveHandle::result).transpose()?; // one save at a time
            let mut state = StateDict::new();
            state.step(step).shared("weight", &[1 << 20], weight.clone())?;
            saving = Some(ringstow::save_async(state, format!("background/step-{step}"))?);
        }
    }
    saving.map(SaveHandle::result).transpose()?;
    Ok(())
}
