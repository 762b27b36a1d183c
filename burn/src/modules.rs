//! Reads and changes modules as a whole. A statistic that a forward pass keeps (`RunningState`) is shared by all clones of its module,
//! and its last change waits until the next pass: burn's own visitors see the value before.

use burn_pack::Tensor;
use burn_store::{ApplyResult, ModuleAdapter, ModuleSnapshot};
use ringstow::Result;

/// The tensors as they are now, with the last change of each statistic. Copies none.
pub fn collect<M: ModuleSnapshot>(
    module: &M,
    adapter: Option<Box<dyn ModuleAdapter>>,
    skip_enum_variants: bool,
) -> Vec<Tensor> {
    // This applies the changes that wait, also in `module`, as its next pass would.
    module.valid().collect(None, adapter, skip_enum_variants)
}

/// Changes a module, or leaves it as it is if the change fails.
///
/// # Errors
/// Those of `change`.
pub fn change<M: ModuleSnapshot>(
    module: &mut M,
    change: impl FnOnce(&mut M) -> Result<ApplyResult>,
) -> Result<ApplyResult> {
    let before = collect(module, None, false);
    let mut changed = module.clone();
    match change(&mut changed) {
        Ok(result) => {
            *module = changed;
            Ok(result)
        }
        Err(error) => {
            // The clone has changed the statistics, which it shares, and goes.
            changed.apply(before, None, None, false);
            Err(error)
        }
    }
}
