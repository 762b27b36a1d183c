//! A training's module and optimizer, as one state.

use crate::optimizer::{self, Parts};
use crate::source::{self, below};
use crate::{modules, stored};
use burn_optim::ModuleOptimizer;
use burn_pack::Tensor;
use burn_store::ModuleSnapshot;
use ringstow::{Error, Loaded, Result, StateDict};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The part that [`state`] saves the module as.
const MODULE: &str = "model";
/// The part that [`state`] saves the optimizer as.
const OPTIMIZER: &str = "optimizer";

/// A state of a module, `model`, and its optimizer, `optimizer`, as they are now: for any of ringstow's saves. Steps may go on
/// during a background save.
///
/// The module's tensors are not copied here. Those of the optimizer are: burn gives its state away in no other way.
///
/// # Errors
/// As for [`add_module`] and [`add_optimizer`].
pub fn state<M: ModuleSnapshot>(
    module: &M,
    optimizer: &ModuleOptimizer,
) -> Result<StateDict<'static>> {
    let mut state = StateDict::new();
    add_module(&mut state, MODULE, module)?;
    add_optimizer(&mut state, OPTIMIZER, optimizer)?;
    Ok(state)
}

/// Sets a module and its optimizer to what [`state`] saved. Read values before: this takes the loaded checkpoint, whose memory the
/// tensors come from.
///
/// # Errors
/// As for [`set_module`] and [`set_optimizer`]; then neither has changed.
pub fn restore<M: ModuleSnapshot>(
    loaded: Loaded,
    module: &mut M,
    optimizer: &mut ModuleOptimizer,
) -> Result<()> {
    let loaded = Arc::new(loaded);
    let restored = set_optimizer(&loaded, OPTIMIZER, module, optimizer.clone())?;
    set_module(&loaded, MODULE, module)?;
    *optimizer = restored;
    Ok(())
}

/// Adds a module's tensors below a name. Copies none.
///
/// # Errors
/// [`Error::Unsupported`] for quantized tensors.
pub fn add_module<M: ModuleSnapshot>(
    state: &mut StateDict<'static>,
    name: &str,
    module: &M,
) -> Result<()> {
    source::add(state, name, modules::collect(module, None, false))
}

/// Adds an optimizer's state below a name. Copies it.
///
/// # Errors
/// [`Error::Invalid`] if burn cannot make a record of it.
pub fn add_optimizer(
    state: &mut StateDict<'static>,
    name: &str,
    optimizer: &ModuleOptimizer,
) -> Result<()> {
    let Parts { tensors, parameters } = optimizer::parts(optimizer)?;
    state.value(optimizer::parameters_of(name), parameters);
    source::add(state, name, tensors)
}

/// Sets a module to what [`add_module`] saved below a name.
///
/// # Errors
/// [`Error::Keys`] listing tensors that the checkpoint does not have, those that the module does not have, and those of another
/// type or shape. The module has not changed then.
pub fn set_module<M: ModuleSnapshot>(
    loaded: &Arc<Loaded>,
    name: &str,
    module: &mut M,
) -> Result<()> {
    let stored = stored::of_loaded(name, loaded)?;
    check(loaded, name, &stored, modules::collect(module, None, false))?;
    let set = |changed: &mut M| {
        let result = changed.apply(stored, None, None, false);
        match result.errors.is_empty() && result.missing.is_empty() {
            true => Ok(result),
            false => {
                Err(Error::invalid(format!("burn does not take the tensors of {name:?}: {result}")))
            }
        }
    };
    modules::change(module, set).map(drop)
}

/// An optimizer with the state that [`add_optimizer`] saved below a name. It knows the parameters of this module alone.
///
/// # Errors
/// [`Error::Invalid`] if the checkpoint has no optimizer of that name, one of another kind, or one of another module.
pub fn set_optimizer<M: ModuleSnapshot>(
    loaded: &Arc<Loaded>,
    name: &str,
    module: &M,
    optimizer: ModuleOptimizer,
) -> Result<ModuleOptimizer> {
    let own = module.collect(None, None, false).into_iter();
    let ids = own.filter_map(|tensor| Some((tensor.name, tensor.param_id?))).collect();
    let record = optimizer::record(name, stored::of_loaded(name, loaded)?, loaded.state()?, &ids)?;
    let saved = record.len();
    let restored = optimizer.load_record(record);
    // burn leaves out what it does not know, and begins anew with it.
    match restored.to_record().len() {
        taken if taken == saved => Ok(restored),
        taken => Err(Error::invalid(format!(
            "the optimizer takes {taken} of the {saved} tensors of {name:?} in {}: it is of another kind than the one that \
             was saved",
            loaded.report.path.display()
        ))),
    }
}

/// Compares names, shapes and types before anything changes.
fn check(loaded: &Loaded, part: &str, stored: &[Tensor], own: Vec<Tensor>) -> Result<()> {
    let mut left: BTreeMap<&str, &Tensor> =
        stored.iter().map(|it| (it.name.as_str(), it)).collect();
    let (mut missing, mut mismatched) = (Vec::new(), Vec::new());
    for tensor in &own {
        let name = below(part, &tensor.name);
        match left.remove(tensor.name.as_str()) {
            None => missing.push(name),
            Some(found) => {
                let types = [tensor, found].map(|it| crate::kinds::stored(&name, it.dtype));
                let [own_type, its_type] =
                    types.map(|it| it.map_or("quantized".into(), |it| it.to_string()));
                if own_type != its_type || tensor.shape != found.shape {
                    mismatched.push(format!(
                        "{name:?} is {its_type} {:?} in the checkpoint, {own_type} {:?} in the module",
                        found.shape.to_vec(),
                        tensor.shape.to_vec()
                    ));
                }
            }
        }
    }
    let unexpected: Vec<String> = left.keys().map(|name| below(part, name)).collect();
    if missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() {
        return Ok(());
    }
    let path = loaded.report.path.clone();
    Err(Error::Keys { path, missing, unexpected, mismatched })
}
