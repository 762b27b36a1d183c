//! Saves and loads [burn](https://burn.dev)'s modules and optimizers as ringstow checkpoints.
//!
//! - [`state`] and [`restore`] are for a training: a module, and its optimizer, by a [`ringstow::CheckpointManager`].
//! - [`RingstowStore`] is a [`burn_store::ModuleStore`]: `module.save_into(&mut store)` and `module.load_from(&mut store)`, with
//!   burn's filters, remappings and adapters.
//!
//! burn's tensors never change: a step of an optimizer makes new ones. A background save keeps the old ones, so it stores
//! the values of its call, and nothing has to wait.

mod kinds;
mod modules;
mod optimizer;
mod source;
mod store;
mod stored;
mod training;

pub use store::RingstowStore;
pub use training::{add_module, add_optimizer, restore, set_module, set_optimizer, state};
