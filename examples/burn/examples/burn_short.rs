//! The program of docs/rust.md.

use burn_core::tensor::{Device, Distribution, Tensor};
use burn_nn::LinearConfig;
use burn_optim::{AdamWConfig, GradientsParams};
use burn_store::ModuleSnapshot;
use ringstow::{CheckpointManager, OnDamage, Retention};
use ringstow_burn::RingstowStore;

#[allow(missing_docs)]
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    let batch = Tensor::<2>::random([64, 256], Distribution::Default, &device);
    let mut model = LinearConfig::new(256, 256).init(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut manager =
        CheckpointManager::found("run", Retention { last: Some(3), ..Retention::default() })?;
    let mut done = 0;
    if let Some(restored) = manager.restore(None, OnDamage::Raise)? {
        ringstow_burn::restore(restored.loaded, &mut model, &mut optimizer)?;
        done = restored.step;
    }
    for step in done + 1..=done + 20 {
        let loss = model.forward(batch.clone()).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        if step % 5 == 0 {
            let loss: f32 = loss.into_scalar();
            manager.save_async(
                step,
                ringstow_burn::state(&model, &optimizer)?,
                [("loss", loss.into())],
            )?;
        }
    }
    let mut store = RingstowStore::new("run-model")?; // the line that changes: it was SafetensorsStore::from_file(...)
    model.save_into(&mut store)?;
    Ok(())
}
