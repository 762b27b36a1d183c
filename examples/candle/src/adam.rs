//! The optimizer, and with it all that a checkpoint of the training holds: parameters, moments and
//! the number of steps made.

use candle_core::{Device, Result as CandleResult, Tensor, Var};
use candle_nn::VarMap;
use ringstow::{Checkpoint, SaveHandle, StateDict, Value};
use std::error::Error;
use std::path::Path;

/// Adam, with moments that can be saved.
pub struct Adam {
    /// Name, parameter, first and second moment, sorted by name.
    pub slots: Vec<(String, Var, Var, Var)>,
    /// Steps made.
    pub step: u64,
}

impl Adam {
    /// Moments of zero for all of a model's parameters.
    pub fn new(parameters: &VarMap) -> CandleResult<Self> {
        let parameters = parameters.data().lock().expect("no panic while it is held");
        let mut slots = Vec::new();
        for (name, var) in parameters.iter() {
            let zeros = || Var::from_tensor(&var.zeros_like()?);
            slots.push((name.clone(), var.clone(), zeros()?, zeros()?));
        }
        slots.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self { slots, step: 0 })
    }

    /// Changes the parameters against the gradients of a loss.
    pub fn step(&mut self, loss: &Tensor) -> CandleResult<()> {
        const RATE: f64 = 1e-3;
        const DECAY_1: f64 = 0.9;
        const DECAY_2: f64 = 0.999;
        const EPSILON: f64 = 1e-8;
        let gradients = loss.backward()?;
        self.step += 1;
        let correct = |decay: f64| 1.0 - decay.powi(self.step as i32);
        for (_, parameter, first, second) in &self.slots {
            let Some(gradient) = gradients.get(parameter) else { continue };
            first.set(&((first.as_tensor() * DECAY_1)? + (gradient * (1.0 - DECAY_1))?)?)?;
            second
                .set(&((second.as_tensor() * DECAY_2)? + (gradient.sqr()? * (1.0 - DECAY_2))?)?)?;
            let size = ((second.as_tensor() / correct(DECAY_2))?.sqrt()? + EPSILON)?;
            let change = ((first.as_tensor() * (RATE / correct(DECAY_1)))? / size)?;
            parameter.set(&(parameter.as_tensor() - change)?)?;
        }
        Ok(())
    }

    /// Every tensor of the training state by its name in the checkpoint.
    fn tensors(&self) -> impl Iterator<Item = (String, &Var)> {
        self.slots.iter().flat_map(|(name, parameter, first, second)| {
            [
                (format!("model.{name}"), parameter),
                (format!("adam.first.{name}"), first),
                (format!("adam.second.{name}"), second),
            ]
        })
    }

    /// Starts to save. The tensors are shared, not copied: they must stay as they are until
    /// [`SaveHandle::wait_staged`] returns.
    pub fn save(&self, dir: &Path) -> ringstow::Result<SaveHandle> {
        let mut state = StateDict::new();
        for (name, var) in self.tensors() {
            state.tensor(name, var.as_tensor().clone())?;
        }
        state.value("step", self.step);
        ringstow::save_async(state, dir.join(format!("step-{:08}", self.step)))
    }

    /// Takes the state of a checkpoint.
    pub fn resume(&mut self, path: &Path) -> Result<(), Box<dyn Error>> {
        let checkpoint = Checkpoint::open(path)?;
        let names: Vec<String> = self.tensors().map(|(name, _)| name).collect();
        let loaded = checkpoint.load(&names)?;
        for (name, var) in self.tensors() {
            let values: &[f32] = loaded.tensor(&name).ok_or("asked for")?.as_slice()?;
            var.set(&Tensor::from_slice(values, var.shape(), &Device::Cpu)?)?;
        }
        let step =
            checkpoint.state()?.get("step").and_then(Value::as_int).ok_or("it has no step")?;
        self.step = step as u64;
        Ok(())
    }
}
