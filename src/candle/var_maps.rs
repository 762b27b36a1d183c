//! Saves candle's maps of variables, and sets them from a checkpoint.

use super::lent::{Lendable, LentSource, Lock};
use crate::api::Store;
use crate::error::{Error, Result};
use crate::format::select::is_below;
use crate::format::{Dtype, TensorInfo};
use crate::handle::SaveHandle;
use crate::pipeline::report::SaveReport;
use crate::state::StateDict;
#[cfg(doc)]
use crate::store::Checkpoint;
use crate::store::{LoadOptions, Loaded, OpenOptions, TensorView, while_replaced};
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// The maps of variables that a training consists of: `model`, `optimizer`. A checkpoint has variable `layer.weight` of the
/// map `model` under the name `model.layer.weight`. Of the map with the empty name, it has the variables under their own.
///
/// A `VarMap` is a handle: a variable that is added to one later belongs to the next save.
#[derive(Clone)]
pub struct VarMaps(Vec<(String, VarMap)>);

impl VarMaps {
    /// These maps by their names.
    pub fn new<'m, N: Into<String>>(maps: impl IntoIterator<Item = (N, &'m VarMap)>) -> Self {
        Self(maps.into_iter().map(|(name, map)| (name.into(), map.clone())).collect())
    }

    /// A state to save: all variables as they are when the save begins. While the save copies them, everything that changes
    /// a variable waits, in any thread: `Var::set`, an optimizer's step. There is no second copy of a variable on the CPU;
    /// the save copies those of other devices to the host when it begins.
    ///
    /// Other threads must not set one variable from another while a save begins: candle locks two variables for that.
    ///
    /// # Errors
    /// [`Error::Invalid`] for two variables of one name; [`Error::Unsupported`] for a type that candle only stores.
    pub fn state(&self) -> Result<StateDict<'static>> {
        let mut state = StateDict::new();
        let mut tensors = Vec::new();
        for (name, var) in self.vars()? {
            let tensor = var.into_inner();
            let dtype = dtype_of(&name, &tensor)?;
            let shape = tensor.dims().iter().map(|&dim| dim as u64).collect();
            let lendable = Lendable::new(name.clone(), tensor)?;
            state.source(TensorInfo { name, dtype, shape }, Box::new(LentSource(lendable.clone())));
            tensors.push(lendable);
        }
        let tensors: Arc<[Arc<Lendable>]> = tensors.into();
        state.lock_while_read(move || Lock::hold(&tensors));
        Ok(state)
    }

    /// Sets all variables to a checkpoint's tensors. Tensors that belong to none of the maps are ignored.
    ///
    /// # Errors
    /// [`Error::Keys`] listing variables that the checkpoint does not have, tensors below the name of a map that the map
    /// does not have, and those of another type or shape; then no variable has changed. [`Error::Invalid`] if candle cannot
    /// set one.
    pub fn set(&self, loaded: &Loaded) -> Result<()> {
        let vars = self.vars()?;
        let mut tensors = Vec::with_capacity(vars.len());
        let (mut missing, mut mismatched) = (Vec::new(), Vec::new());
        for (name, var) in &vars {
            match loaded.tensor(name) {
                None => missing.push(name.clone()),
                Some(view) => match tensor_of(name, view, var) {
                    Ok(tensor) => tensors.push((name, var, tensor)),
                    Err(why) => mismatched.push(why),
                },
            }
        }
        let of_no_var = |name: &&str| self.has(name) && !vars.contains_key(*name);
        let unexpected: Vec<String> =
            loaded.tensors().map(|(name, _)| name).filter(of_no_var).map(String::from).collect();
        if !(missing.is_empty() && unexpected.is_empty() && mismatched.is_empty()) {
            let path = loaded.report.path.clone();
            return Err(Error::Keys { path, missing, unexpected, mismatched });
        }
        tensors.into_iter().try_for_each(|(name, var, tensor)| {
            let tensor = tensor.to_device(var.device());
            tensor.and_then(|tensor| var.set(&tensor)).map_err(|error| {
                Error::invalid(format!("variable {name:?} cannot be set: {error}"))
            })
        })
    }

    /// Sets all variables to the tensors of the checkpoint at `path`, and reads no others. It may also be a directory of
    /// safetensors files; those have no checksums.
    ///
    /// # Errors
    /// As for [`OpenOptions::open`] with `foreign`, [`Checkpoint::load_names`] and [`VarMaps::set`].
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        let store = Store::found()?;
        let loaded = while_replaced(|| {
            let checkpoint =
                OpenOptions::new().foreign(true).open_once(path.as_ref(), store.config())?;
            let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
            checkpoint.load_names(names.filter(|name| self.has(name)), LoadOptions::default())
        })?;
        self.set(&loaded)
    }

    /// Whether a name belongs to one of the maps.
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(map, _)| map.is_empty() || is_below(name, map))
    }

    /// All variables by their names in a checkpoint.
    fn vars(&self) -> Result<BTreeMap<String, Var>> {
        let mut vars = BTreeMap::new();
        for (map, its_vars) in &self.0 {
            let its_vars = its_vars.data().lock().unwrap_or_else(PoisonError::into_inner);
            for (name, var) in its_vars.iter() {
                let name = if map.is_empty() { name.clone() } else { format!("{map}.{name}") };
                if let Some(twice) = vars.insert(name.clone(), var.clone()) {
                    return Err(Error::invalid(format!(
                        "two variables are named {name:?}, of shapes {:?} and {:?}: give the maps other names",
                        twice.dims(),
                        var.dims()
                    )));
                }
            }
        }
        Ok(vars)
    }
}

impl std::fmt::Debug for VarMaps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

/// Saves a map's variables as the checkpoint at `path`, and returns once it is durable. In place of `VarMap::save`.
///
/// # Errors
/// As for [`VarMaps::state`] and [`save`](crate::save()).
pub fn save(vars: &VarMap, path: impl AsRef<Path>) -> Result<SaveReport> {
    crate::api::save(&VarMaps::new([("", vars)]).state()?, path)
}

/// Starts saving a map's variables and returns at once. Saves the values of the call: what changes a variable waits until all
/// are copied.
///
/// # Errors
/// As for [`VarMaps::state`] and [`save_async`](crate::save_async).
pub fn save_async(vars: &VarMap, path: impl AsRef<Path>) -> Result<SaveHandle> {
    crate::api::save_async(VarMaps::new([("", vars)]).state()?, path)
}

/// Sets a map's variables to the tensors of the checkpoint at `path`. In place of `VarMap::load`; the directory may also hold
/// what that reads: safetensors files.
///
/// # Errors
/// As for [`VarMaps::load`].
pub fn load(vars: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    VarMaps::new([("", vars)]).load(path)
}

/// The type of a variable in a checkpoint.
fn dtype_of(name: &str, tensor: &Tensor) -> Result<Dtype> {
    Dtype::from_safetensors(tensor.dtype().into()).ok_or_else(|| Error::Unsupported {
        what: format!("variable {name:?} is of {:?}, which is not known here", tensor.dtype()),
        remedy: "upgrade ringstow, or save it as bytes (U8)".into(),
    })
}

/// A tensor to set a variable to, on the CPU. The error says how the two differ.
fn tensor_of(name: &str, view: TensorView<'_>, var: &Var) -> std::result::Result<Tensor, String> {
    let (dtype, dims) = (safetensors::Dtype::from(var.dtype()), var.dims());
    let has_shape = view.shape().iter().copied().eq(dims.iter().map(|&dim| dim as u64));
    if view.dtype().safetensors() != Some(dtype) || !has_shape {
        return Err(format!(
            "{name:?} is {} {:?} in the checkpoint, {dtype} {dims:?} in the map",
            view.dtype(),
            view.shape()
        ));
    }
    Tensor::from_raw_buffer(view.data(), var.dtype(), dims, &candle_core::Device::Cpu)
        .map_err(|error| format!("{name:?}: {error}"))
}
