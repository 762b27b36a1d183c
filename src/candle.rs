//! Training with [candle](https://github.com/huggingface/candle): variables saved without a copy, an optimizer whose moments
//! can be saved, and models that are built from checkpoints. Needs the feature `candle`. Never changes a variable outside of
//! [`VarMaps::set`] and an optimizer's step.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
//! use ringstow::candle::{AdamW, VarMaps};
//! use ringstow::{CheckpointManager, Retention, OnDamage};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let batch = Tensor::ones((8, 4), DType::F32, &Device::Cpu)?;
//! let vars = VarMap::new();
//! let model = linear(4, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let mut optimizer = AdamW::new(&vars, ParamsAdamW::default())?;
//! let training = VarMaps::new([("model", &vars), ("optimizer", optimizer.vars())]);
//! let mut manager = CheckpointManager::found("run", Retention { last: Some(3), ..Retention::default() })?;
//! let restored = manager.restore(None, OnDamage::Raise)?;
//! let done = restored.map_or(Ok(0), |it| training.set(&it.loaded).map(|()| it.step))?;
//! for step in done + 1..=1000 {
//!     let loss = model.forward(&batch)?.sqr()?.mean_all()?;
//!     optimizer.backward_step(&loss)?; // waits until a save in progress has copied all variables
//!     if step % 100 == 0 {
//!         manager.save_async(step, training.state()?, [("loss", loss.to_scalar::<f32>()?.into())])?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod adam_w;
mod lent;
mod model;
mod var_maps;

pub use adam_w::AdamW;
pub use model::{CheckpointBackend, var_builder};
pub use var_maps::{VarMaps, load, save, save_async};
