//! A checkpoint as a directory: how one comes to be, whole or not at all, and how it is found,
//! opened, read and checked.

mod commit;
mod diagnose;
mod dir;
mod export;
mod foreign;
mod index;
mod list;
mod load;
mod loaded;
mod lock;
mod open;
mod parts;
mod places;
mod prune;
mod ranks;
mod retain;
mod retire;
mod save;
mod session;
mod slices;
mod spares;
mod stamp;
mod sweep;
mod unique;
mod verify;
mod whole;
mod write_rank;

pub use export::export;
pub use list::{Found, Status, latest, latest_with, list, list_with};
pub use load::LoadOptions;
pub use loaded::{Loaded, LoadedTensor, TensorView};
pub use open::{Checkpoint, Kind};
pub use prune::{prune, prune_plan, prune_with};
pub use ranks::part_of;
pub use retain::{Retained, remove_spares, retain, retain_plan, retain_with};
pub use retire::{Disposal, Retired, retire, retire_with};
pub(crate) use save::Contents;
pub use save::save;
pub use session::{Committed, Session};
pub use slices::Slice;
pub(crate) use stamp::while_replaced;
pub use sweep::{Left, Swept};
pub use verify::verify;
pub use write_rank::write_rank;
