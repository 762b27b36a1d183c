//! The program of docs/rust.md.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear};
use ringstow::candle::{AdamW, VarMaps}; // the line that changes: AdamW was candle_nn's
use ringstow::{CheckpointManager, OnDamage, Retention};

#[allow(missing_docs)]
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let batch = Tensor::randn(0f32, 1.0, (64, 256), &Device::Cpu)?;
    let vars = VarMap::new();
    let model = linear(256, 256, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut optimizer = AdamW::new_lr(&vars, 1e-3)?;
    let training = VarMaps::new([("model", &vars), ("optimizer", optimizer.vars())]);
    let mut manager =
        CheckpointManager::found("run", Retention { last: Some(3), ..Retention::default() })?;
    let mut done = 0;
    if let Some(restored) = manager.restore(None, OnDamage::Raise)? {
        training.set(&restored.loaded)?;
        done = restored.step;
    }
    for step in done + 1..=done + 20 {
        let loss = model.forward(&batch)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?; // waits until a save in progress has copied all variables
        if step % 5 == 0 {
            manager.save_async(
                step,
                training.state()?,
                [("loss", loss.to_scalar::<f32>()?.into())],
            )?;
        }
    }
    ringstow::candle::save(&vars, "run-model")?; // the model alone, durable: in place of vars.save(...)
    Ok(())
}
