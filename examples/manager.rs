//! Saves the steps of a training with a manager, and resumes: the program of `docs/rust.md`.

use ringstow::{CheckpointManager, OnDamage, Retention, StateDict};

#[allow(missing_docs)]
pub fn main() -> ringstow::Result<()> {
    let best = Some("loss:min:2".parse()?);
    let keep = Retention { last: Some(3), every: Some(1000), best, ..Retention::default() };
    let mut manager = CheckpointManager::found("managed", keep)?;
    let (mut weight, mut done) = (vec![0.0f32; 1024], 0);
    if let Some(restored) = manager.restore(None, OnDamage::Previous)? {
        weight = restored.loaded.tensor("weight").expect("it was saved").as_slice()?.to_vec();
        done = restored.step;
    }
    for step in done + 1..=done + 5 {
        weight.iter_mut().for_each(|w| *w += 1.0); // train
        let mut state = StateDict::new();
        state.slice("weight", &[1024], &weight)?;
        manager.save(step, &mut state, [("loss", 1.0 / step as f64)])?;
    }
    assert_eq!(manager.steps()?.len(), 3); // the newest three, two of which are the best
    Ok(())
}
