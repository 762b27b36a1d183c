//! AdamW with state that can be saved: candle-nn's own keeps its moments to itself.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Var, bail};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use std::sync::PoisonError;

/// `candle_nn::AdamW`, bit by bit, with moments and a count of steps in a `VarMap` that can be saved.
///
/// That map has `NAME.exp_avg` and `NAME.exp_avg_sq` for each variable of floats, and `step`. Learning rate, decays and the
/// like stay the program's: a checkpoint does not have them.
#[derive(Debug)]
pub struct AdamW {
    vars: Vec<Trained>,
    step: Var,
    params: ParamsAdamW,
    map: Map,
}

/// A variable, and its moments.
#[derive(Debug)]
struct Trained {
    var: Var,
    first_moment: Var,
    second_moment: Var,
}

/// `VarMap` has no `Debug`.
struct Map(VarMap);

impl std::fmt::Debug for Map {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VarMap")
    }
}

impl AdamW {
    /// Trains the variables of floats that `vars` has now.
    ///
    /// # Errors
    /// candle's, if it cannot make a moment.
    pub fn new(vars: &VarMap, params: ParamsAdamW) -> Result<Self> {
        let map = VarMap::new();
        let step = Var::zeros((), DType::I64, &Device::Cpu)?;
        let mut trained = Vec::new();
        let named = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut own = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        own.insert("step".into(), step.clone());
        for (name, var) in named.iter().filter(|(_, var)| var.dtype().is_float()) {
            let zeros = || Var::zeros(var.shape(), var.dtype(), var.device());
            let (first_moment, second_moment) = (zeros()?, zeros()?);
            own.insert(format!("{name}.exp_avg"), first_moment.clone());
            own.insert(format!("{name}.exp_avg_sq"), second_moment.clone());
            trained.push(Trained { var: var.clone(), first_moment, second_moment });
        }
        drop((named, own));
        Ok(Self { vars: trained, step, params, map: Map(map) })
    }

    /// [`AdamW::new`] with candle's defaults and this learning rate.
    ///
    /// # Errors
    /// As for [`AdamW::new`].
    pub fn new_lr(vars: &VarMap, learning_rate: f64) -> Result<Self> {
        Self::new(vars, ParamsAdamW { lr: learning_rate, ..ParamsAdamW::default() })
    }

    /// The moments and the count of steps, to save and to set.
    pub fn vars(&self) -> &VarMap {
        &self.map.0
    }

    /// Learning rate, decays and the like.
    pub fn params(&self) -> &ParamsAdamW {
        &self.params
    }

    /// Sets learning rate, decays and the like.
    pub fn set_params(&mut self, params: ParamsAdamW) {
        self.params = params;
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    /// Refuses variables without names: a checkpoint could give their moments to others.
    fn new(vars: Vec<Var>, config: ParamsAdamW) -> Result<Self> {
        if !vars.is_empty() {
            bail!(
                "variables without names cannot be saved: call `AdamW::new(&var_map, params)` with the VarMap"
            )
        }
        Self::new(&VarMap::new(), config)
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }

    /// The arithmetic of candle-nn 0.11, in its order: the results have the same bits.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let step = self.step.to_scalar::<i64>()? + 1;
        self.step.set(&candle_core::Tensor::new(step, &Device::Cpu)?)?;
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params;
        let scale_m = 1.0 / (1.0 - beta1.powi(step as i32));
        let scale_v = 1.0 / (1.0 - beta2.powi(step as i32));
        for Trained { var, first_moment: m, second_moment: v } in &self.vars {
            let Some(g) = grads.get(var) else { continue };
            let next_m = ((m.as_tensor() * beta1)? + (g * (1.0 - beta1))?)?;
            let next_v = ((v.as_tensor() * beta2)? + (g.sqr()? * (1.0 - beta2))?)?;
            let m_hat = (&next_m * scale_m)?;
            let v_hat = (&next_v * scale_v)?;
            let decayed = (var.as_tensor() * (1.0 - lr * weight_decay))?;
            let adjusted = (m_hat / (v_hat.sqrt()? + eps)?)?;
            let next = (decayed - (adjusted * lr)?)?;
            m.set(&next_m)?;
            v.set(&next_v)?;
            var.set(&next)?;
        }
        Ok(())
    }
}
